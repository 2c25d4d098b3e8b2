"""The table of test_every_knob.py: for each key of a recipe another value of it, and the run in which it shows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proximo.config.ppo.advantage import Advantage
from proximo.config.schema.fields import sections_of
from tiny_runs import LORA, Kind

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Knob:
    """A key, and another value of it; `base` holds in both runs. `$` in a text is the folder of the inputs.

    The key of an item of a list is that of its `kind`.
    """

    kind: Kind
    key: str
    value: Any
    base: Changes
    stops: str
    """What the error says, where the other value ends the run."""


def knobs(kind: Kind, values: Changes, base: Changes | None = None, *, stops: str = "") -> Iterator[Knob]:
    """Each key by itself."""
    return (Knob(kind, key, value, base or {}, stops) for key, value in values.items())


def texts(**options: Any) -> dict[str, Any]:
    return {"data.sources": [{"path": "$/texts.jsonl", **options}]}


def problems(**options: Any) -> dict[str, Any]:
    return {"data.sources": [{"function": "knobs:echoes", **options}]}


MODEL = {"kind": "model", "path": "$/reward_model"}
JUDGE = {"kind": "prm", "path": "$/step_model"}
FUNCTION = {"kind": "function", "function": "knobs:share_of"}
VERIFIER = {"kind": "verifier", "verifier_class": "example_verifiers:Letters", "workers": 1}
FROM_POLICY = {"value": {"init_from": "policy"}}
SCORED = {"reward": [MODEL]}
JUDGED = {"reward": [JUDGE]}
CALLED = FROM_POLICY | {"reward": [FUNCTION]}
GRADED = FROM_POLICY | {"reward": [VERIFIER]}


def share_of(prompts: Any, responses: Any, metadata: Any, *, letter: str = "a") -> list[float]:
    return [text.count(letter) / (len(text) + 1) for text in responses]


class Nowhere:
    def write(self, step: int, metrics: Any) -> None: ...

    def close(self) -> None: ...


def open_sink(run: Any) -> Nowhere:
    return Nowhere()


def rows(word: str = "ab") -> list[dict[str, str]]:
    return [{"prompt": word * (row % 3 + 1), "response": word * (row % 2 + 1)} for row in range(12)]


def labelled_pairs() -> list[dict[str, Any]]:
    return [
        {"prompt": "a" * n, "chosen": "b" * n, "rejected": "c", "response": "d" * n, "label": n % 2}
        for n in range(1, 9)
    ]


def echoes() -> list[dict[str, Any]]:
    """In AReaL's form, with another response beside its solution."""
    cases = {"inputs": ["a"], "outputs": ["a"]}
    return [{"prompt": "ab" * n, "response": "ba", "input_output": cases, "solutions": ["c" * n]} for n in range(1, 13)]


def graded() -> list[dict[str, Any]]:
    """Six grades twice, and what earlier responses got: other prompts than now."""
    return [{"prompt": "a" * (n % 6 + 1), "base_scores": [n % 6 / 5 - 0.5, n % 6 / 5 - 0.7]} for n in range(12)]


def grade(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    """The longer the prompt, the better: from -1 to 1."""
    return [len(prompt) * 0.4 - 1.4 for prompt in prompts]


GROUPS = {"ppo.responses_per_prompt": 2, "ppo.advantage": "group_centred", "value": {"init_from": "policy"}}
BF16 = {"run.precision": "bf16"}
EXPERTS = {
    "model.config.model_type": "qwen2_moe",
    "model.config.num_experts": 4,
    "model.config.num_experts_per_tok": 2,
    "model.config.moe_intermediate_size": 8,
    "model.config.shared_expert_intermediate_size": 8,
}
FILTERED = {
    "data.sources": [{"function": "knobs:graded"}],
    "data.held_out_rows": 0,
    "data.filter": {"above": 0.3, "below": -0.5},
    "ppo.num_steps": 4,
    "reward": [{"kind": "function", "function": "knobs:grade"}],
    "value.init_from": "policy",
}
SLOW = {"learning_rate": 1e-5}
TRUNK = {"value.init_from": "trunk", "ppo.value_optimizer": SLOW}
ONE_BASE = {
    "model.lora": LORA,
    "value.init_from": "policy",
    "reward": [MODEL | {"path": "$/reward_adapter", "share_base": True}],
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}"
DROPOUT = {"model": {"path": "$/with_dropout"}}
SAVED = {"model": {"path": "$/language_model"}}
FIRST_HALF = {"data.proportions": [1, 1], "data.phase": 0}
ROWS = {"data.sources": [{"function": "knobs:rows"}]}
TWO_SOURCES = {"data.sources": [{"path": path, "weight": 1} for path in ("$/texts.jsonl", "$/other.jsonl")]}
CHATTING = SCORED | {"data.as_messages": True, "data.max_prompt_tokens": 20}

KNOBS = [
    *knobs(
        "ppo",
        {
            "run.seed": 6,
            "run.samples_per_step": 2,
            "value.init_from": "policy",
            "value.lora": LORA,
            "data.max_prompt_tokens": 6,
            "data.first_words": 1,
            "data.fill_to_max": True,
            "gold": None,
            "ppo.rollout.max_num_seqs": 2,
            "ppo.rollout.staleness": 2,
            "ppo.kl": "none",
            "ppo.kl.coefficient": 0.2,
            "ppo.kl.adaptive": None,
            "ppo.kl.adaptive.horizon": 40,
            "ppo.kl.reference_every_steps": 1,
            "ppo.average_decay": 0.5,
            "ppo.num_steps": 3,
            "ppo.prompts_per_step": 5,
            "ppo.responses_per_prompt": 2,
            "ppo.samples_per_prompt": 3,
            "ppo.epochs_per_step": 2,
            "ppo.minibatch_responses": 2,
            "ppo.tokens_per_microbatch": 400,
            "ppo.critic_warmup_steps": 1,
            "ppo.evaluate_greedy": True,
            "ppo.evaluation_samples_per_prompt": 2,
            "ppo.solved_score": 0.5,
            "ppo.task_reward": "share_of_vowels",
            "ppo.evaluate_reference": True,
            "ppo.policy_optimizer": None,
            "ppo.value_optimizer": {"learning_rate": 1e-5},
        },
    ),
    *knobs(
        "sft",
        {
            "run.precision": "bf16",
            "run.save_every_steps": 3,
            "run.keep_last": 3,
            "run.evaluate_every_steps": 1,
            "run.tensorboard": True,
            "run.sinks": [{"kind": "function", "function": "knobs:open_sink"}],
            "tokenizer.path": "$/other_tokenizer",
            "tokenizer.added_tokens": ["<new>"],
            "model.config.initializer_range": 0.5,
            "model.frozen_layers": 1,
            "model.activation_checkpointing": True,
            "sft.optimizer.learning_rate": 2e-2,
            "data.sources.0.path": "$/other.jsonl",
            "data.sources.0.columns": {"response": "prompt", "prompt": "response"},
            "data.sources.0.max_rows": 8,
            "data.sources": [{"path": "$/texts.jsonl"}, {"path": "$/other.jsonl"}],
            "data.held_out_rows": 1,
            "data.as_messages": True,
            "data.train_on": "everything",
            "data.max_tokens": 14,
            "sft.num_epochs": 3,
            "sft.examples_per_step": 3,
            "sft.tokens_per_microbatch": 400,
        },
    ),
    *knobs("sft", {"run.head_precision": "float32"}, BF16),
    *knobs("sft", {"run.save_every_minutes": 1e-9}, {"run.save_every_steps": None}),
    *knobs("sft", {"tokenizer.train_vocab_size": 262}, {"tokenizer": {"train_vocab_size": 300}}),
    *knobs("sft", {"tokenizer.chat_template": TEMPLATE, "data.system": "abc"}, {"data.as_messages": True}),
    *knobs("sft", {"model.path": "$/language_model"}, {"model": {"path": "$/other_model"}}),
    *knobs("sft", {"model.revision": "second"}, {"model": {"path": "owner/model"}}),
    *knobs("ppo", {"model.lora": LORA, "reference": {"path": "$/other_model"}}, SAVED),
    *knobs(
        "reward",
        {
            "data.form": "conversational",
            "data.max_tokens": 18,
            "reward.pairs_per_step": 3,
        },
    ),
    *knobs("sft", {"model.balancing_coefficient": 1.0}, EXPERTS),
    *knobs("ppo", {"value.path": "$/other_model"}, {"value": {"path": "$/language_model"}}),
    *knobs("ppo", {"value.revision": "second"}, {"value": {"path": "owner/model"}}),
    *knobs("sft", {"data.sources.0.function": "knobs:echoes", "data.sources.0.kwargs": {"word": "ba"}}, ROWS),
    *knobs("sft", {"data.sources.0.format": "parquet"}, stops="parquet"),
    *knobs("sft", {"data.sources.0.split": "second"}, texts(path="$/splits", split="first")),
    *knobs("sft", {"data.sources.0.separator": "--", "data.layout": "blocks"}, texts(path="$/lines.txt")),
    *knobs("sft", {"data.sources.0.problems": "areal_code"}, problems()),
    *knobs("sft", {"data.sources.0.template": "b{prompt}"}, problems(problems="areal_code")),
    *knobs("sft", {"data.sources.0.weight": 3}, TWO_SOURCES),
    *knobs(
        "sft",
        {
            "data.proportions": [3, 1],
            "data.phase": 1,
            "data.split_seed": 3,
            "data.sources.0.whole": True,
        },
        FIRST_HALF,
    ),
    *knobs("sft", {"data.evaluation_sources": [{"path": "$/other.jsonl"}]}, {"data.held_out_rows": 0}),
    *knobs("sft", {"data.too_long": "truncate"}, {"data.max_tokens": 14}),
    *knobs("sft", {"data.form": "text"}, texts(path="$/both.jsonl")),
    *knobs("reward", {"data.min_response_words": 3}, stops="too short a response"),
    *knobs("kto", {"data.form": "prompt_response"}, {"data.sources": [{"function": "knobs:labelled_pairs"}]}),
    *knobs(
        "kto",
        {
            "data.max_tokens": 14,
            "kto.examples_per_step": 3,
        },
    ),
    *knobs(
        "ppo",
        {
            "data.filter.above": 0.9,
            "data.filter.below": -0.8,
            "data.filter.max_fraction": 0.3,
            "data.filter.from_epoch": 0,
        },
        FILTERED,
    ),
    *knobs("sft", {"sft.dropout": True}, DROPOUT),
    *knobs("dpo", {"reference": {"path": "$/other_model"}}, SAVED),
    *knobs(
        "prm",
        {
            "data.step_separator": "; ",
            "data.train_on": "last",
            "data.max_tokens": 16,
            "prm.solutions_per_step": 3,
        },
    ),
    *knobs("prm", {"prm.dropout": True}, DROPOUT),
    *knobs(
        "dpo",
        {
            "dpo.pairs_per_step": 3,
        },
    ),
    *knobs("ppo", {"ppo.kl.adaptive.target": 1e-4}, {"ppo.num_steps": 3}),
    *knobs("ppo", {"ppo.kl.reference_decay": 0.5}, {"ppo.kl.reference_every_steps": 1}),
    *knobs("ppo", {"ppo.evaluate_average": True}, {"ppo.average_decay": 0.5}),
    *knobs("ppo", {"ppo.num_minibatches": 2}, {"ppo.minibatch_responses": None}),
    *knobs("ppo", {"ppo.keep_groups_together": True, "ppo.advantage": "group_standardised"}, GROUPS),
    *knobs("ppo", {"ppo.release_cache": True}, stops="release_cache"),
    *knobs(
        "ppo",
        {
            "ppo.value_loss.coefficient": 1.0,
            "value.path": "$/reward_model",
        },
        TRUNK,
    ),
    *knobs("ppo", {"value.init_from": "trunk"}, {"value.init_from": "policy", "ppo.value_optimizer": SLOW}),
    *knobs(
        "ppo",
        {
            "reward.0": MODEL,
            "reward.0.name": "other",
            "reward.0.function": "tiny_runs:share_of_vowels",
            "reward.0.kwargs": {"letter": "b"},
            "reward.0.weight": 2.0,
        },
        CALLED,
    ),
    *knobs("ppo", {"reward.0": VERIFIER}, CALLED),
    *knobs(
        "ppo",
        {
            "reward.0.name": "other",
            "reward.0.path": "$/other_scorer",
            "reward.0.dense": "deltas",
            "reward.0.weight": 2.0,
            "reward.0": JUDGE,
        },
        SCORED,
    ),
    *knobs("ppo", {"reward.0.revision": "second"}, {"reward": [MODEL | {"path": "owner/scorer"}]}),
    *knobs("ppo", {"reward.0.tokenizer": "$/other_template"}, CHATTING),
    *knobs("ppo", {"reward.0.share_base": False}, ONE_BASE, stops="an adapter only"),
    *knobs("ppo", {"reward.0.name": "other", "reward.0.step_separator": "a"}, JUDGED),
    *knobs("ppo", {"reward.0": FUNCTION}, FROM_POLICY | SCORED),
    *knobs(
        "ppo",
        {
            "reward.0.name": "other",
            "reward.0.verifier_class": "example_verifiers:Hostile",
            "reward.0.kwargs": {"letter": "b"},
        },
        GRADED,
    ),
]

ELSEWHERE = {
    # The tiny models of these runs write no programs, and need no step of a solution.
    "verifiers/code": "CodeRewardConfig.*|AnswerScores.*",
    "rewards": (
        "VerifierRewardConfig.*|CustomVerifierRewardConfig.worker_memory_mib|FunctionRewardConfig.timeout_seconds"
        "|RemoteRewardConfig.*|PRMRewardConfig.(aggregate|dense)"
    ),
    "verifiers": "(Pattern|ThinkAnswer|Maths|Countdown)RewardConfig.*",
    "run/test_sinks.py": "WandbSinkConfig.*|FunctionSinkConfig.*",
    "run/test_pushes.py": "PushConfig.*|RunConfig.push",
    "run/test_loop.py": "RunConfig.(folder|num_threads)",
    "run/test_memory_options.py": "RunConfig.compile|OptimizerConfig.in_backward",
    "checkpoint/test_interruption.py": "RunConfig.grace_seconds",
    "models": (
        "RunConfig.(device|deterministic)|(Model|ScalarModel)Config.quantisation"
        "|(PlacedRoleDevices|ModelReward)Config.device"
    ),
    "data": "RunConfig.token_cache|SourceConfig.subset",
    "learner": "OptimizerConfig.*",
    "models/test_lora.py": "LoRAConfig.*",
    "supervised": "(DPO|KTO|RewardTraining)Config.*|(PRM|DPO|KTO)Config.optimizer",
    # Of servers, ranks and environments.
    "run/test_engine_section.py": "(LocalEngine|VLLMEngine)Config.*",
    "rollout": "ServersConfig.*",
    "distributed": "(Devices|RoleDevices)Config.*",
    "environments": r"\w*EnvironmentConfig.*",
    # On a CPU sampler and learner round alike in bf16, so that no weight is above any cap.
    "ppo/test_wires_of_losses.py": (
        "(PPOObjective|SAPO|M2PO|GSPO|GMPO|CISPO)Config.*|(Truncated|Masked)WeightConfig.*|PolicyLossConfig.*"
        "|(Divergence|Ratio)RejectionConfig.*|RejectionConfig.*|TokenKLConfig.clamp"
        "|(TokenMean|ResponseMean|ConstantDivisor)Config.*|(SquaredError|Huber|SmoothL1)Config.*|ValueLossConfig.*"
    ),
    "ppo/test_ptx.py": "PTXConfig.*|PPORecipe.ptx_data",
    "ppo/test_wires_of_rollouts.py": "RolloutConfig.*",
    "ppo/test_online_dpo.py": "(OnlineDPO|OnlineIPO)Config.kind",
    "ppo/test_wires_of_advantages.py": "|".join(f"{each.__name__}.*" for each in sections_of(Advantage)),
    "ppo/test_wires_of_scores.py": "ScoreConfig.*|PPOConfig.truncation|(Scored|Unscored)TruncationConfig.*",
    "ppo/test_wires_of_a_step.py": "(LossKL|NoKL|RewardKL|MarginKL)Config.kind|KLConfig.estimator|GuardConfig.*",
    "ppo/test_values_normalised.py": "(Exponential|Cumulative)ScaleConfig.*",
    "ppo/test_experience.py": "(Bootstrap|Mask)TruncationConfig.kind",
}
"""File or folder of tests -> the keys that it shows, as a pattern of `Section.key`."""
