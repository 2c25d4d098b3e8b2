"""The table of test_every_knob.py: for each key of a recipe another value of it, and the run in which it shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from builders import CHARACTERS
from proximo.config import data, devices, engine, environment, run, sinks
from proximo.config.ppo import advantage, losses, objectives
from proximo.config.ppo import options as ppo
from proximo.config.ppo import rewards as shaping
from proximo.config.rewards import sources as rewards
from proximo.config.rewards import verifiers
from proximo.config.rewards.verifiers import CodeRewardConfig
from proximo.config.schema.base import Section
from proximo.config.schema.fields import sections_of
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.dpo_recipe import DPOConfig, DPORecipe
from proximo.supervised.kto_recipe import KTOConfig, KTORecipe
from proximo.supervised.prm_recipe import PRMConfig
from proximo.supervised.reward_recipe import RewardTrainingConfig
from proximo.supervised.sft_recipe import SFTConfig
from tiny_runs import LORA, Kind

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Knob:
    """A field, and what its other value is; `base` holds in both runs. `$` in a text is the folder of the inputs."""

    section: type[Section]
    name: str
    kind: Kind
    change: Changes
    base: Changes = field(default_factory=dict)
    stops: str = ""
    """What the error says, where the other value ends the run."""

    @property
    def id(self) -> str:
        return f"{self.section.__name__}.{self.name}"


def texts(**options: Any) -> dict[str, Any]:
    return {"data.sources": [{"path": "$/texts.jsonl", **options}]}


def two_sources(first: float, second: float) -> dict[str, Any]:
    paths = ("$/texts.jsonl", "$/other.jsonl")
    return {"data.sources": [{"path": p, "weight": w} for p, w in zip(paths, (first, second), strict=True)]}


def scorer(**options: Any) -> dict[str, Any]:
    return {"reward": [{"kind": "model", "path": "$/reward_model", **options}]}


def judge(**options: Any) -> dict[str, Any]:
    return {"reward": [{"kind": "prm", "path": "$/step_model", **options}]}


CHATTING = {**scorer(), "data.as_messages": True, "data.max_prompt_tokens": 20}


def function(**options: Any) -> dict[str, Any]:
    name = "knobs:share_of"
    return {"value": {"init_from": "policy"}, "reward": [{"kind": "function", "function": name, **options}]}


HOSTILE = {"verifier_class": "example_verifiers:Hostile"}


def verifier(**options: Any) -> dict[str, Any]:
    own = {"kind": "verifier", "verifier_class": "example_verifiers:Letters", "workers": 1}
    return {"value": {"init_from": "policy"}, "reward": [own | options]}


def share_of(prompts: Any, responses: Any, metadata: Any, *, letter: str = "a") -> list[float]:
    return [text.count(letter) / (len(text) + 1) for text in responses]


def always_one(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    return [1.0 for _ in responses]


def mostly_fails(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    return [float("nan"), *(1.0 for _ in responses[1:])]


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


def problems(**options: Any) -> dict[str, Any]:
    return {"data.sources": [{"function": "knobs:echoes", **options}]}


def graded() -> list[dict[str, Any]]:
    """Six grades twice, and what earlier responses got: other prompts than now."""
    return [{"prompt": "a" * (n % 6 + 1), "base_scores": [n % 6 / 5 - 0.5, n % 6 / 5 - 0.7]} for n in range(12)]


def grade(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    """The longer the prompt, the better: from -1 to 1."""
    return [len(prompt) * 0.4 - 1.4 for prompt in prompts]


GROUPS = {"ppo.responses_per_prompt": 2, "ppo.advantage": "group_centred", "value": {"init_from": "policy"}}
STEEP = {"ppo.policy_optimizer.learning_rate": 0.5, "ppo.epochs_per_step": 3}
MOVING = {"ppo.kl.reference_every_steps": 1}
IN_LOSS = {"ppo.kl": {"kind": "loss", "coefficient": 0.1}}
GATED = STEEP | {"ppo.policy_loss.objective.kind": "sapo"}
TRUSTING = STEEP | {"ppo.policy_loss.objective.kind": "m2po"}
BF16 = {"run.precision": "bf16"}
EXPERTS = {
    "model.config.model_type": "qwen2_moe",
    "model.config.num_experts": 4,
    "model.config.num_experts_per_tok": 2,
    "model.config.moe_intermediate_size": 8,
    "model.config.shared_expert_intermediate_size": 8,
}
BEST_OF = {"ppo.responses_per_prompt": 3, "ppo.advantage": {"kind": "pass_at_k"}, "value": {"init_from": "policy"}}
FAR = {"ppo.value_loss.error.kind": "huber", "ppo.value_loss.error.delta": 0.02}
NORMALISED = {"ppo.value_loss.normalise.kind": "exponential"}
EQUAL = {
    "ppo.responses_per_prompt": 2,
    "ppo.advantage": {"kind": "group_centred"},
    "ppo.task_reward": "grade",
    "value": {"init_from": "policy"},
    "reward": [
        {"kind": "function", "function": "knobs:grade"},
        {"kind": "function", "name": "form", "function": "knobs:share_of"},
    ],
}
"""A reward that goes by the prompt, so that each group is equal, and one of form that differs."""
PTX = {"ptx_data": {"sources": [{"path": "$/texts.jsonl"}]}, "ppo.ptx": {"coefficient": 0.5}}
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
CUT = {"ppo.rollout.max_new_tokens": 2, "ppo.rollout.max_num_seqs": 4}
POLICY_LORA = {"model.lora": LORA}
ONE_BASE = POLICY_LORA | {"value.init_from": "policy"} | scorer(path="$/reward_adapter", share_base=True)
FAULTY = {"reward": [{"kind": "function", "function": "knobs:mostly_fails"}], "value.init_from": "policy"}
ENDED_SOON = {"ppo.rollout.stop_token_ids": list(range(6, 24))}
TOO_SHORT = ENDED_SOON | {"ppo.score.min_tokens": 2, "ppo.score.min_tokens_penalty": 1.0}
ANSWERED = {"data.sources": [{"function": "knobs:rows", "columns": {"answer": "response"}}]}
DEAD = {"reward": [{"kind": "function", "function": "knobs:always_one"}], "value.init_from": "policy"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}"
DROPOUT = {"model": {"path": "$/with_dropout"}}

KNOBS = [
    Knob(run.RunConfig, "seed", "ppo", {"run.seed": 6}),
    Knob(run.RunConfig, "precision", "sft", {"run.precision": "bf16"}),
    Knob(run.RunConfig, "head_precision", "sft", {"run.head_precision": "float32"}, BF16),
    Knob(run.RunConfig, "save_every_steps", "sft", {"run.save_every_steps": 3}),
    Knob(run.RunConfig, "save_every_minutes", "sft", {"run.save_every_minutes": 1e-9}, {"run.save_every_steps": None}),
    Knob(run.RunConfig, "keep_last", "sft", {"run.keep_last": 3}),
    Knob(run.RunConfig, "evaluate_every_steps", "sft", {"run.evaluate_every_steps": 1}),
    Knob(run.RunConfig, "samples_per_step", "ppo", {"run.samples_per_step": 2}),
    Knob(run.RunConfig, "tensorboard", "sft", {"run.tensorboard": True}),
    Knob(run.RunConfig, "sinks", "sft", {"run.sinks": [{"kind": "function", "function": "knobs:open_sink"}]}),
    Knob(run.TokenizerConfig, "path", "sft", {"tokenizer.path": "$/other_tokenizer"}),
    Knob(run.TokenizerConfig, "train_vocab_size", "sft", {"tokenizer": {"train_vocab_size": 280}}),
    Knob(
        run.TokenizerConfig, "chat_template", "sft", {"tokenizer.chat_template": TEMPLATE}, {"data.as_messages": True}
    ),
    Knob(run.TokenizerConfig, "added_tokens", "sft", {"tokenizer.added_tokens": ["<new>"]}),
    Knob(run.LoRAConfig, "rank", "ppo", {"model.lora.rank": 3}, POLICY_LORA),
    Knob(run.LoRAConfig, "alpha", "ppo", {"model.lora.alpha": 8.0}, POLICY_LORA),
    Knob(run.LoRAConfig, "target_modules", "ppo", {"model.lora.target_modules": ["q_proj"]}, POLICY_LORA),
    Knob(run.ModelConfig, "path", "sft", {"model": {"path": "$/language_model"}}, {"model": {"path": "$/other_model"}}),
    Knob(run.ModelConfig, "revision", "sft", {"model.revision": "second"}, {"model": {"path": "owner/model"}}),
    Knob(run.ModelConfig, "config", "sft", {"model.config.initializer_range": 0.5}),
    Knob(run.ModelConfig, "lora", "ppo", POLICY_LORA, {"model": {"path": "$/language_model"}}),
    Knob(run.ModelConfig, "frozen_layers", "sft", {"model.frozen_layers": 1}),
    Knob(run.ScalarModelConfig, "frozen_layers", "reward", {"model.frozen_layers": 1}),
    Knob(run.ModelConfig, "activation_checkpointing", "sft", {"model.activation_checkpointing": True}),
    Knob(run.ModelConfig, "balancing_coefficient", "sft", {"model.balancing_coefficient": 1.0}, EXPERTS),
    Knob(run.ScalarModelConfig, "balancing_coefficient", "reward", {"model.balancing_coefficient": 1.0}, EXPERTS),
    Knob(run.ScalarModelConfig, "init_from", "ppo", {"value.init_from": "policy"}),
    Knob(
        run.ScalarModelConfig,
        "path",
        "ppo",
        {"value": {"path": "$/other_model"}},
        {"value": {"path": "$/language_model"}},
    ),
    Knob(run.ScalarModelConfig, "revision", "ppo", {"value.revision": "second"}, {"value": {"path": "owner/model"}}),
    Knob(run.ScalarModelConfig, "config", "reward", {"model.config.initializer_range": 0.5}),
    Knob(run.ScalarModelConfig, "lora", "ppo", {"value.lora": LORA}),
    Knob(run.ScalarModelConfig, "activation_checkpointing", "reward", {"model.activation_checkpointing": True}),
    Knob(run.OptimizerConfig, "learning_rate", "sft", {"sft.optimizer.learning_rate": 2e-2}),
    Knob(run.OptimizerConfig, "betas", "sft", {"sft.optimizer.betas": [0.8, 0.9]}),
    Knob(run.OptimizerConfig, "eps", "sft", {"sft.optimizer.eps": 1e-2}),
    Knob(run.OptimizerConfig, "weight_decay", "sft", {"sft.optimizer.weight_decay": 0.5}),
    Knob(run.OptimizerConfig, "schedule", "sft", {"sft.optimizer.schedule": "linear"}),
    Knob(run.OptimizerConfig, "warmup_updates", "sft", {"sft.optimizer.warmup_updates": 0}),
    Knob(run.OptimizerConfig, "final_fraction", "sft", {"sft.optimizer.final_fraction": 0.5}),
    Knob(run.OptimizerConfig, "max_gradient_norm", "sft", {"sft.optimizer.max_gradient_norm": 1e-4}),
    Knob(run.OptimizerConfig, "kind", "sft", {"sft.optimizer.kind": "adamw_paged_8bit"}, stops="kind adamw_paged"),
    Knob(data.SourceConfig, "path", "sft", {"data.sources": [{"path": "$/other.jsonl"}]}),
    Knob(data.SourceConfig, "function", "sft", {"data.sources": [{"function": "knobs:rows"}]}),
    Knob(
        data.SourceConfig,
        "kwargs",
        "sft",
        {"data.sources": [{"function": "knobs:rows", "kwargs": {"word": "ba"}}]},
        {"data.sources": [{"function": "knobs:rows"}]},
    ),
    Knob(data.SourceConfig, "format", "sft", texts(format="parquet"), stops="parquet"),
    Knob(
        data.SourceConfig, "split", "sft", texts(path="$/splits", split="second"), texts(path="$/splits", split="first")
    ),
    Knob(data.SourceConfig, "separator", "sft", texts(path="$/lines.txt", separator="--"), texts(path="$/lines.txt")),
    Knob(data.SourceConfig, "columns", "sft", texts(columns={"response": "prompt", "prompt": "response"})),
    Knob(data.SourceConfig, "problems", "sft", problems(problems="areal_code"), problems()),
    Knob(
        data.SourceConfig,
        "template",
        "sft",
        problems(problems="areal_code", template="b{prompt}"),
        problems(problems="areal_code"),
    ),
    Knob(data.SourceConfig, "weight", "sft", two_sources(3, 1), two_sources(1, 1)),
    Knob(data.SourceConfig, "max_rows", "sft", texts(max_rows=8)),
    Knob(data.DataConfig, "sources", "sft", {"data.sources": [{"path": "$/texts.jsonl"}, {"path": "$/other.jsonl"}]}),
    Knob(
        data.DataConfig,
        "proportions",
        "sft",
        {"data.proportions": [3, 1]},
        {"data.proportions": [1, 1], "data.phase": 0},
    ),
    Knob(data.DataConfig, "phase", "sft", {"data.phase": 1}, {"data.proportions": [1, 1], "data.phase": 0}),
    Knob(data.DataConfig, "split_seed", "sft", {"data.split_seed": 3}, {"data.proportions": [1, 1], "data.phase": 0}),
    Knob(data.DataConfig, "held_out_rows", "sft", {"data.held_out_rows": 1}),
    Knob(
        data.DataConfig,
        "evaluation_sources",
        "sft",
        {"data.evaluation_sources": [{"path": "$/other.jsonl"}]},
        {"data.held_out_rows": 0},
    ),
    Knob(data.DataConfig, "too_long", "sft", {"data.too_long": "truncate"}, {"data.max_tokens": 14}),
    Knob(data.DataConfig, "as_messages", "sft", {"data.as_messages": True}),
    Knob(data.DataConfig, "system", "sft", {"data.system": "abc"}, {"data.as_messages": True}),
    Knob(data.TextDataConfig, "form", "sft", {"data.form": "text"}, texts(path="$/both.jsonl")),
    Knob(data.TextDataConfig, "train_on", "sft", {"data.train_on": "everything"}),
    Knob(data.TextDataConfig, "layout", "sft", {"data.layout": "blocks"}, texts(path="$/lines.txt")),
    Knob(data.TextDataConfig, "max_tokens", "sft", {"data.max_tokens": 14}),
    Knob(data.PreferenceDataConfig, "form", "reward", {"data.form": "conversational"}),
    Knob(
        data.PreferenceDataConfig,
        "min_response_words",
        "reward",
        {"data.min_response_words": 3},
        stops="too short a response",
    ),
    Knob(data.PreferenceDataConfig, "max_tokens", "reward", {"data.max_tokens": 18}),
    Knob(
        data.LabelledDataConfig,
        "form",
        "kto",
        {"data.form": "prompt_response"},
        {"data.sources": [{"function": "knobs:labelled_pairs"}]},
    ),
    Knob(data.LabelledDataConfig, "max_tokens", "kto", {"data.max_tokens": 14}),
    Knob(data.PromptDataConfig, "max_prompt_tokens", "ppo", {"data.max_prompt_tokens": 6}),
    Knob(data.PromptDataConfig, "first_words", "ppo", {"data.first_words": 1}),
    Knob(data.PromptDataConfig, "fill_to_max", "ppo", {"data.fill_to_max": True}),
    Knob(data.SourceConfig, "whole", "sft", texts(whole=True), {"data.proportions": [1, 1], "data.phase": 0}),
    Knob(data.PromptFilterConfig, "above", "ppo", {"data.filter.above": 0.9}, FILTERED),
    Knob(data.PromptFilterConfig, "below", "ppo", {"data.filter.below": -0.8}, FILTERED),
    Knob(data.PromptFilterConfig, "max_fraction", "ppo", {"data.filter.max_fraction": 0.3}, FILTERED),
    Knob(data.PromptFilterConfig, "from_epoch", "ppo", {"data.filter.from_epoch": 0}, FILTERED),
    Knob(PPORecipe, "ptx_data", "ppo", {"ptx_data.sources": [{"path": "$/other.jsonl"}]}, PTX),
    Knob(losses.PTXConfig, "coefficient", "ppo", {"ppo.ptx.coefficient": 2.0}, PTX),
    Knob(losses.PTXConfig, "examples_per_update", "ppo", {"ppo.ptx.examples_per_update": 3}, PTX),
    Knob(SFTConfig, "num_epochs", "sft", {"sft.num_epochs": 3}),
    Knob(SFTConfig, "examples_per_step", "sft", {"sft.examples_per_step": 3}),
    Knob(SFTConfig, "tokens_per_microbatch", "sft", {"sft.tokens_per_microbatch": 400}),
    Knob(SFTConfig, "dropout", "sft", {"sft.dropout": True}, DROPOUT),
    Knob(RewardTrainingConfig, "num_epochs", "reward", {"reward.num_epochs": 3}),
    Knob(RewardTrainingConfig, "pairs_per_step", "reward", {"reward.pairs_per_step": 3}),
    Knob(RewardTrainingConfig, "tokens_per_microbatch", "reward", {"reward.tokens_per_microbatch": 900}),
    Knob(RewardTrainingConfig, "loss", "reward", {"reward.loss": "divergence_window"}),
    Knob(RewardTrainingConfig, "score_centring", "reward", {"reward.score_centring": 0.5}),
    Knob(RewardTrainingConfig, "dropout", "reward", {"reward.dropout": True}, DROPOUT),
    Knob(
        PPORecipe,
        "reference",
        "ppo",
        {"reference": {"path": "$/other_model"}},
        {"model": {"path": "$/language_model"}},
    ),
    Knob(
        DPORecipe,
        "reference",
        "dpo",
        {"reference": {"path": "$/other_model"}},
        {"model": {"path": "$/language_model"}},
    ),
    Knob(data.StepDataConfig, "step_separator", "prm", {"data.step_separator": "; "}),
    Knob(data.StepDataConfig, "train_on", "prm", {"data.train_on": "last"}),
    Knob(data.StepDataConfig, "max_tokens", "prm", {"data.max_tokens": 16}),
    Knob(PRMConfig, "num_epochs", "prm", {"prm.num_epochs": 3}),
    Knob(PRMConfig, "solutions_per_step", "prm", {"prm.solutions_per_step": 3}),
    Knob(PRMConfig, "tokens_per_microbatch", "prm", {"prm.tokens_per_microbatch": 900}),
    Knob(PRMConfig, "dropout", "prm", {"prm.dropout": True}, DROPOUT),
    Knob(PRMConfig, "optimizer", "prm", {"prm.optimizer": {"learning_rate": 1e-3}}),
    Knob(DPOConfig, "num_epochs", "dpo", {"dpo.num_epochs": 3}),
    Knob(DPOConfig, "pairs_per_step", "dpo", {"dpo.pairs_per_step": 3}),
    Knob(DPOConfig, "tokens_per_microbatch", "dpo", {"dpo.tokens_per_microbatch": 900}),
    Knob(DPOConfig, "loss", "dpo", {"dpo.loss": "ipo"}),
    Knob(DPOConfig, "beta", "dpo", {"dpo.beta": 0.2}),
    Knob(DPOConfig, "label_smoothing", "dpo", {"dpo.label_smoothing": 0.1}),
    Knob(DPOConfig, "optimizer", "dpo", {"dpo.optimizer": {"learning_rate": 1e-3}}),
    Knob(
        KTORecipe,
        "reference",
        "kto",
        {"reference": {"path": "$/other_model"}},
        {"model": {"path": "$/language_model"}},
    ),
    Knob(KTOConfig, "num_epochs", "kto", {"kto.num_epochs": 3}),
    Knob(KTOConfig, "examples_per_step", "kto", {"kto.examples_per_step": 3}),
    Knob(KTOConfig, "tokens_per_microbatch", "kto", {"kto.tokens_per_microbatch": 900}),
    Knob(KTOConfig, "beta", "kto", {"kto.beta": 0.2}),
    Knob(KTOConfig, "desirable_weight", "kto", {"kto.desirable_weight": 1.3}),
    Knob(KTOConfig, "undesirable_weight", "kto", {"kto.undesirable_weight": 1.3}),
    Knob(KTOConfig, "reference_point", "kto", {"kto.reference_point": "zero"}),
    Knob(KTOConfig, "optimizer", "kto", {"kto.optimizer": {"learning_rate": 1e-3}}),
    Knob(PPORecipe, "gold", "ppo", {"gold": None}),
    Knob(ppo.RolloutConfig, "max_new_tokens", "ppo", {"ppo.rollout.max_new_tokens": 3}),
    Knob(
        ppo.RolloutConfig,
        "min_new_tokens",
        "ppo",
        {"ppo.rollout.min_new_tokens": 30},
        {"ppo.rollout.max_new_tokens": 30, "ppo.rollout.min_new_tokens": 1},
    ),
    Knob(ppo.RolloutConfig, "random_limit_min", "ppo", {"ppo.rollout.random_limit_min": 1}),
    Knob(ppo.RolloutConfig, "temperature", "ppo", {"ppo.rollout.temperature": 0.5}),
    Knob(ppo.RolloutConfig, "greedy", "ppo", {"ppo.rollout.greedy": True}),
    Knob(ppo.RolloutConfig, "top_k", "ppo", {"ppo.rollout.top_k": 2}, {"ppo.rollout.top_k": 40}),
    Knob(ppo.RolloutConfig, "top_p", "ppo", {"ppo.rollout.top_p": 0.3}, {"ppo.rollout.top_p": 0.99}),
    Knob(ppo.RolloutConfig, "stop_token_ids", "ppo", {"ppo.rollout.stop_token_ids": list(range(6, 40))}),
    Knob(ppo.RolloutConfig, "stop_strings", "ppo", {"ppo.rollout.stop_strings": list(CHARACTERS[:30])}),
    Knob(ppo.RolloutConfig, "max_num_seqs", "ppo", {"ppo.rollout.max_num_seqs": 2}),
    Knob(ppo.RolloutConfig, "staleness", "ppo", {"ppo.rollout.staleness": 2}),
    Knob(ppo.PPOConfig, "kl", "ppo", {"ppo.kl": "none"}),
    Knob(shaping.RewardKLConfig, "estimator", "ppo", {"ppo.kl.estimator": "k3"}),
    Knob(shaping.RewardKLConfig, "clamp", "ppo", {"ppo.kl.clamp": 1e-3}),
    Knob(shaping.KLConfig, "coefficient", "ppo", {"ppo.kl.coefficient": 0.2}),
    Knob(shaping.KLConfig, "adaptive", "ppo", {"ppo.kl.adaptive": None}),
    Knob(shaping.AdaptiveKLConfig, "target", "ppo", {"ppo.kl.adaptive.target": 1e-4}, {"ppo.num_steps": 3}),
    Knob(shaping.AdaptiveKLConfig, "horizon", "ppo", {"ppo.kl.adaptive.horizon": 40}),
    Knob(shaping.KLConfig, "reference_every_steps", "ppo", {"ppo.kl.reference_every_steps": 1}),
    Knob(shaping.KLConfig, "reference_decay", "ppo", {"ppo.kl.reference_decay": 0.5}, MOVING),
    Knob(shaping.LossKLConfig, "estimator", "ppo", {"ppo.kl.estimator": "k2"}, IN_LOSS),
    Knob(shaping.LossKLConfig, "clamp", "ppo", {"ppo.kl.clamp": 1e-6}, IN_LOSS),
    Knob(ppo.PPOConfig, "average_decay", "ppo", {"ppo.average_decay": 0.5}),
    Knob(ppo.PPOConfig, "evaluate_average", "ppo", {"ppo.evaluate_average": True}, {"ppo.average_decay": 0.5}),
    Knob(ppo.PPOConfig, "num_steps", "ppo", {"ppo.num_steps": 3}),
    Knob(ppo.PPOConfig, "prompts_per_step", "ppo", {"ppo.prompts_per_step": 5}),
    Knob(ppo.PPOConfig, "responses_per_prompt", "ppo", {"ppo.responses_per_prompt": 2}),
    Knob(ppo.PPOConfig, "samples_per_prompt", "ppo", {"ppo.samples_per_prompt": 3}),
    Knob(ppo.PPOConfig, "epochs_per_step", "ppo", {"ppo.epochs_per_step": 2}),
    Knob(ppo.PPOConfig, "minibatch_responses", "ppo", {"ppo.minibatch_responses": 2}),
    Knob(
        ppo.PPOConfig,
        "num_minibatches",
        "ppo",
        {"ppo.num_minibatches": 2, "ppo.minibatch_responses": None},
        {"ppo.minibatch_responses": None},
    ),
    Knob(ppo.PPOConfig, "keep_groups_together", "ppo", {"ppo.keep_groups_together": True}, GROUPS),
    Knob(ppo.PPOConfig, "tokens_per_microbatch", "ppo", {"ppo.tokens_per_microbatch": 400}),
    Knob(ppo.PPOConfig, "release_cache", "ppo", {"ppo.release_cache": True}, stops="release_cache"),
    Knob(ppo.PPOConfig, "advantage", "ppo", {"ppo.advantage": "group_standardised"}, GROUPS),
    Knob(advantage.PassAtKConfig, "k", "ppo", {"ppo.advantage.k": 3}, BEST_OF),
    Knob(advantage.GAEConfig, "least_spread", "ppo", {"ppo.advantage.least_spread": 10.0}),
    Knob(advantage.DiscountedConfig, "gamma", "ppo", {"ppo.advantage.gamma": 0.5}),
    Knob(advantage.GAEConfig, "gae_lambda", "ppo", {"ppo.advantage.gae_lambda": 0.5}),
    Knob(advantage.GAEConfig, "length_adaptive", "ppo", {"ppo.advantage.length_adaptive": 0.4}),
    Knob(advantage.GAEConfig, "value_gae_lambda", "ppo", {"ppo.advantage.value_gae_lambda": 0.5}),
    Knob(advantage.AdvantageConfig, "standardise", "ppo", {"ppo.advantage.standardise": False}),
    Knob(advantage.AdvantageConfig, "unbiased_variance", "ppo", {"ppo.advantage.unbiased_variance": True}),
    Knob(objectives.PPOObjectiveConfig, "clip_low", "ppo", {"ppo.policy_loss.objective.clip_low": 0.9}, STEEP),
    Knob(objectives.PPOObjectiveConfig, "clip_high", "ppo", {"ppo.policy_loss.objective.clip_high": 2.0}, STEEP),
    Knob(ppo.PolicyLossConfig, "objective", "ppo", {"ppo.policy_loss.objective": "cispo"}, STEEP),
    Knob(objectives.PPOObjectiveConfig, "dual_clip", "ppo", {"ppo.policy_loss.objective.dual_clip": 1.1}, STEEP),
    Knob(objectives.SAPOConfig, "gate_positive", "ppo", {"ppo.policy_loss.objective.gate_positive": 3.0}, GATED),
    Knob(objectives.SAPOConfig, "gate_negative", "ppo", {"ppo.policy_loss.objective.gate_negative": 3.0}, GATED),
    Knob(
        objectives.M2POConfig,
        "max_second_moment",
        "ppo",
        {"ppo.policy_loss.objective.max_second_moment": 1e-4},
        TRUSTING,
    ),
    Knob(
        ppo.PolicyLossConfig,
        "aggregation",
        "ppo",
        {"ppo.policy_loss.aggregation": "response_mean"},
        {"ppo.rollout.random_limit_min": 1},  # of responses of one length both averages are the same number
    ),
    Knob(
        losses.ConstantDivisorConfig,
        "divisor",
        "ppo",
        {"ppo.policy_loss.aggregation.divisor": 3},
        {"ppo.policy_loss.aggregation.kind": "constant"},
    ),
    Knob(ppo.PolicyLossConfig, "entropy_coefficient", "ppo", {"ppo.policy_loss.entropy_coefficient": 0.1}),
    Knob(ppo.PolicyLossConfig, "behaviour_weight", "ppo", {"ppo.policy_loss.behaviour_weight": "masked"}, BF16),
    Knob(
        ppo.PolicyLossConfig,
        "rejection",
        "ppo",
        {"ppo.policy_loss.rejection": {"kind": "divergence", "limit": 1e-9}},
        BF16,
    ),
    Knob(ppo.ValueLossConfig, "error", "ppo", {"ppo.value_loss.error": "smooth_l1"}, FAR),
    Knob(losses.HuberConfig, "delta", "ppo", {"ppo.value_loss.error.delta": 0.01}, FAR),
    Knob(ppo.ValueLossConfig, "coefficient", "ppo", {"ppo.value_loss.coefficient": 1.0}, TRUNK),
    Knob(ppo.ValueLossConfig, "clip", "ppo", {"ppo.value_loss.clip": None}, STEEP | {"ppo.value_loss.clip": 1e-3}),
    Knob(ppo.ValueLossConfig, "normalise", "ppo", {"ppo.value_loss.normalise": "cumulative"}, NORMALISED),
    Knob(losses.ExponentialScaleConfig, "decay", "ppo", {"ppo.value_loss.normalise.decay": 0.5}, NORMALISED),
    Knob(run.ScalarModelConfig, "init_from", "ppo", TRUNK, {"value.init_from": "policy", "ppo.value_optimizer": SLOW}),
    Knob(run.ScalarModelConfig, "path", "ppo", {"value.path": "$/reward_model"}, TRUNK),
    Knob(ppo.PPOConfig, "critic_warmup_steps", "ppo", {"ppo.critic_warmup_steps": 1}, TRUNK),
    Knob(ppo.PPOConfig, "critic_warmup_steps", "ppo", {"ppo.critic_warmup_steps": 1}),
    Knob(
        ppo.PPOConfig,
        "truncation",
        "ppo",
        {"ppo.truncation": "mask"},
        {"ppo.rollout.stop_token_ids": list(range(6, 16))},
    ),
    Knob(ppo.PPOConfig, "truncation", "ppo", {"ppo.truncation": "unscored"}, CUT),
    Knob(ppo.ScoreConfig, "clip", "ppo", {"ppo.score.clip": 0.01}),
    Knob(shaping.ScoredTruncationConfig, "scale", "ppo", {"ppo.truncation.scale": 0.5}, CUT),
    Knob(ppo.ScoreConfig, "minus_reference_answer", "ppo", {"ppo.score.minus_reference_answer": True}, ANSWERED),
    Knob(ppo.ScoreConfig, "bias", "ppo", {"ppo.score.bias": 1.0}),
    Knob(ppo.ScoreConfig, "scale", "ppo", {"ppo.score.scale": 2.0}),
    Knob(ppo.ScoreConfig, "normalise", "ppo", {"ppo.score.normalise": "standardise"}, {"ppo.score.normalise": "scale"}),
    Knob(ppo.ScoreConfig, "missing_eos_penalty", "ppo", {"ppo.score.missing_eos_penalty": 1.0}, ENDED_SOON),
    Knob(ppo.ScoreConfig, "min_tokens", "ppo", {"ppo.score.min_tokens": 4}, TOO_SHORT),
    Knob(ppo.ScoreConfig, "min_tokens_penalty", "ppo", {"ppo.score.min_tokens_penalty": 2.0}, TOO_SHORT),
    Knob(ppo.ScoreConfig, "penalty_mode", "ppo", {"ppo.score.penalty_mode": "replace"}, TOO_SHORT),
    Knob(ppo.ScoreConfig, "overlong_buffer_tokens", "ppo", {"ppo.score.overlong_buffer_tokens": 3}, ENDED_SOON),
    Knob(
        ppo.ScoreConfig,
        "overlong_penalty",
        "ppo",
        {"ppo.score.overlong_penalty": 2.0},
        ENDED_SOON | {"ppo.score.overlong_buffer_tokens": 3},
    ),
    Knob(ppo.ScoreConfig, "whiten_rewards", "ppo", {"ppo.score.whiten_rewards": "zero_mean"}),
    Knob(
        ppo.GuardConfig,
        "max_constant_reward_steps",
        "ppo",
        {"ppo.guards.max_constant_reward_steps": 2},
        DEAD,
        "max_constant_reward_steps",
    ),
    Knob(
        ppo.GuardConfig,
        "max_ratio",
        "ppo",
        {"ppo.guards.max_ratio": 1.0001, "ppo.guards.max_skipped_fraction": 1.0},
        STEEP,
    ),
    Knob(ppo.GuardConfig, "max_kl", "ppo", {"ppo.guards.max_kl": 1e-9, "ppo.guards.max_skipped_fraction": 1.0}, STEEP),
    Knob(ppo.GuardConfig, "target_kl", "ppo", {"ppo.guards.target_kl": 1e-9}, STEEP),
    Knob(
        ppo.GuardConfig,
        "max_skipped_fraction",
        "ppo",
        {"ppo.guards.max_skipped_fraction": 0.01},
        STEEP | {"ppo.guards.max_kl": 1e-9, "ppo.guards.max_skipped_fraction": 1.0},
        "max_skipped_fraction",
    ),
    Knob(
        ppo.GuardConfig,
        "max_mismatch",
        "ppo",
        {"ppo.guards.max_mismatch": 1e-9},
        {"run.precision": "bf16", "ppo.rollout.staleness": 0},
        "max_mismatch",
    ),
    Knob(
        ppo.GuardConfig,
        "max_unscored_fraction",
        "ppo",
        {"ppo.guards.max_unscored_fraction": 0.1},
        FAULTY | {"ppo.guards.max_unscored_fraction": 0.5},
        "max_unscored_fraction",
    ),
    Knob(ppo.PPOConfig, "evaluate_greedy", "ppo", {"ppo.evaluate_greedy": True}),
    Knob(ppo.PPOConfig, "evaluation_samples_per_prompt", "ppo", {"ppo.evaluation_samples_per_prompt": 2}),
    Knob(ppo.PPOConfig, "solved_score", "ppo", {"ppo.solved_score": 0.5}),
    Knob(ppo.PPOConfig, "task_reward", "ppo", {"ppo.task_reward": "share_of_vowels"}),
    Knob(
        advantage.GroupAdvantageConfig,
        "zero_variance_groups",
        "ppo",
        {"ppo.advantage.zero_variance_groups": "exclude"},
        EQUAL,
    ),
    Knob(
        advantage.GroupAdvantageConfig,
        "resample_rounds",
        "ppo",
        {"ppo.advantage.resample_rounds": 2},
        EQUAL | {"ppo.advantage.zero_variance_groups": "resample"},
    ),
    Knob(ppo.PPOConfig, "evaluate_reference", "ppo", {"ppo.evaluate_reference": True}),
    Knob(ppo.PPOConfig, "policy_optimizer", "ppo", {"ppo.policy_optimizer": None}),
    Knob(ppo.PPOConfig, "value_optimizer", "ppo", {"ppo.value_optimizer": {"learning_rate": 1e-5}}),
    Knob(rewards.ModelRewardConfig, "kind", "ppo", scorer(), function()),
    Knob(rewards.ModelRewardConfig, "name", "ppo", scorer(name="other"), scorer()),
    Knob(rewards.ModelRewardConfig, "path", "ppo", scorer(path="$/other_scorer"), scorer()),
    Knob(
        rewards.ModelRewardConfig,
        "revision",
        "ppo",
        scorer(path="owner/scorer", revision="second"),
        scorer(path="owner/scorer"),
    ),
    Knob(rewards.ModelRewardConfig, "tokenizer", "ppo", scorer(tokenizer="$/other_template"), CHATTING),
    Knob(rewards.ModelRewardConfig, "dense", "ppo", scorer(dense="deltas"), scorer()),
    Knob(rewards.ModelRewardConfig, "share_base", "ppo", scorer(path="$/reward_adapter"), ONE_BASE, "an adapter only"),
    Knob(rewards.ModelRewardConfig, "weight", "ppo", scorer(weight=2.0), scorer()),
    Knob(rewards.PRMRewardConfig, "kind", "ppo", judge(), scorer()),
    Knob(rewards.PRMRewardConfig, "name", "ppo", judge(name="other"), judge()),
    Knob(rewards.PRMRewardConfig, "step_separator", "ppo", judge(step_separator="a"), judge()),
    Knob(rewards.FunctionRewardConfig, "kind", "ppo", function(), scorer()),
    Knob(rewards.FunctionRewardConfig, "name", "ppo", function(name="other"), function()),
    Knob(rewards.FunctionRewardConfig, "function", "ppo", function(function="tiny_runs:share_of_vowels"), function()),
    Knob(rewards.FunctionRewardConfig, "kwargs", "ppo", function(kwargs={"letter": "b"}), function()),
    Knob(rewards.FunctionRewardConfig, "weight", "ppo", function(weight=2.0), function()),
    Knob(verifiers.CustomVerifierRewardConfig, "kind", "ppo", verifier(), function()),
    Knob(verifiers.CustomVerifierRewardConfig, "name", "ppo", verifier(name="other"), verifier()),
    Knob(
        verifiers.CustomVerifierRewardConfig,
        "verifier_class",
        "ppo",
        verifier(verifier_class="example_verifiers:Hostile"),
        verifier(),
    ),
    Knob(verifiers.CustomVerifierRewardConfig, "kwargs", "ppo", verifier(kwargs={"letter": "b"}), verifier()),
]

SINKS = {
    sinks.WandbSinkConfig: "test_weights_and_biases_is_told_the_id_of_the_run",
    sinks.FunctionSinkConfig: "test_a_sink_of_ones_own_is_told_its_name_and_arguments",
}
PUSHES = {
    "name": "test_the_last_model_is_pushed_once_and_privately",
    "when": "test_the_best_is_pushed_and_no_worse_one",
}
TEXTS = (
    verifiers.PatternRewardConfig,
    verifiers.ThinkAnswerRewardConfig,
)
GRADED = {
    "weight": "test_sources_add_up_by_weight_and_keep_their_own_scores_as_components",
    "workers": "test_what_a_recipe_says_of_workers_reaches_them",
    "answer_seconds": "test_a_time_out_is_the_answers_fault_with_the_score_that_the_verifier_wants",
    "step_seconds": "test_what_is_not_graded_when_the_step_must_end_has_no_score_and_the_next_step_goes_on",
}
"""What all graded kinds share; none of it changes a healthy run."""
CODE = {
    "test_the_defaults_of_verifier_and_section_are_the_same": ("form",),
    "test_a_source_of_a_recipe_scores_programs_in_workers": ("kind", "name", "program"),
    "test_two_runs_fit_into_the_time_of_an_answer": ("answer_seconds",),
    "test_an_answer_without_a_program_has_a_score_of_its_own": ("allow_unfenced",),
    "test_a_limit_for_each_test_is_not_that_of_all": ("cpu_seconds", "limit_per_test"),
    "test_memory_is_limited_as_asked": ("memory_mib",),
    "test_a_tolerance_is_for_outputs_and_returned_values": ("float_tolerance",),
    "test_a_share_of_the_tests_earns_a_share_of_the_score_by_choice": ("partial",),
}
SHOWN_ELSEWHERE = {
    # The tiny models of these runs write no programs.
    **{(CodeRewardConfig, n): test for test, names in CODE.items() for n in names},
    (CodeRewardConfig, "sandbox_waived"): "test_a_guarantee_that_nobody_knows_cannot_be_waived",
    (CodeRewardConfig, "idle_seconds"): "test_a_program_that_sleeps_is_at_fault_when_its_idle_time_is_over",
    (CodeRewardConfig, "packages"): "test_programs_and_tests_import_the_packages_that_are_named",
    **{(verifiers.VerifierRewardConfig, name): test for name, test in GRADED.items()},
    (
        verifiers.CustomVerifierRewardConfig,
        "worker_memory_mib",
    ): "test_what_a_verifier_does_to_its_worker_is_no_score_and_harms_no_other_answer",
    **{
        (verifiers.AnswerScores, name): "test_a_share_of_the_tests_earns_a_share_of_the_score_by_choice"
        for name in ("correct", "incorrect")
    },
    (verifiers.AnswerScores, "no_answer"): "test_an_answer_without_a_program_has_a_score_of_its_own",
    # Responses of two steps are rare here.
    (rewards.PRMRewardConfig, "aggregate"): "test_the_score_of_a_response_is_an_aggregate_of_its_steps",
    (
        rewards.PRMRewardConfig,
        "dense",
    ): "test_a_step_is_rewarded_at_the_token_that_ends_it_and_the_last_one_at_the_last_token",
    # Of a grade, which a test of the verifier shows without a run.
    **{
        (s, name): "test_a_key_with_another_value_gives_another_grade"
        for s in TEXTS
        for name in set(s.model_fields) - set(GRADED)
    },
    # Another address, limit or token of a service, whose grades do not depend on them.
    **{
        (rewards.RemoteRewardConfig, name): "test_every_key_of_the_section_reaches_the_client"
        for name in rewards.RemoteRewardConfig.model_fields
    },
    **{(s, name): test for s, test in SINKS.items() for name in s.model_fields},
    (sinks.WandbSinkConfig, "samples"): "test_a_tracker_gets_a_table_of_them_where_it_is_told_to",
    **{(sinks.PushConfig, name): test for name, test in PUSHES.items()},
    (run.RunConfig, "push"): "test_the_last_model_is_pushed_once_and_privately",
    (run.RunConfig, "folder"): "test_a_run_writes_one_line_per_step_and_one_before_the_first",
    **{
        (section, "device"): "test_a_recipe_puts_each_role_on_its_device"
        for section in (devices.PlacedRoleDevicesConfig, rewards.ModelRewardConfig)
    },
    # Of vLLM servers.
    **{
        (section, name): "test_every_key_of_the_section_reaches_servers_and_engine"
        for section in (engine.LocalEngineConfig, engine.VLLMEngineConfig)
        for name in section.model_fields
    },
    **{
        (engine.ServersConfig, name): "test_every_key_reaches_the_servers" for name in engine.ServersConfig.model_fields
    },
    # Of several ranks.
    **{
        (section, "shard"): "test_a_rank_holds_what_the_formula_says"
        for section in (devices.DevicesConfig, devices.RoleDevicesConfig)
    },
    (devices.DevicesConfig, "reduce_gradients"): "test_gradients_are_reduced_once_per_update_whatever_the_accumulation",
    **{
        (section, name): "test_what_cannot_lie_on_several_ranks_is_refused_where_their_number_is_known"
        for section in (devices.DevicesConfig, devices.RoleDevicesConfig)
        for name in ("num", "shard_size", "offload")
    },
    (
        devices.DevicesConfig,
        "timeout_seconds",
    ): "test_stages_of_a_pipeline_run_on_the_same_ranks_and_choose_how_their_models_lie",
    (environment.PlayedEnvironmentConfig, "max_seconds"): "test_an_old_trajectory_begins_no_further_turn",
    (
        environment.PlayedEnvironmentConfig,
        "template_variables",
    ): "test_a_prompt_with_an_empty_thought_is_forked_after_each_turn",
    **{
        (section, name): "test_a_key_of_the_section_reaches_the_episodes"
        for section, names in (
            (environment.PlayedEnvironmentConfig, ("num_rows", "max_turns", "max_tokens", "max_observation_tokens")),
            (environment.OwnEnvironmentConfig, ("path", "kwargs")),
        )
        for name in names
    },
    (
        environment.WorkerEnvironmentConfig,
        "workers",
    ): "test_episodes_beyond_the_workers_wait_for_a_lane_that_is_stopped",
    (
        environment.WorkerEnvironmentConfig,
        "timeout_seconds",
    ): "test_a_hanging_step_is_a_fault_at_its_deadline_and_only_there",
    (environment.WorkerEnvironmentConfig, "memory_mib"): "test_faults_of_a_step_say_what_happened_and_harm_no_other",
    **{
        (section, name): "test_an_environment_runs_unchanged_from_a_short_recipe"
        for section, names in (
            (environment.RegisteredEnvironmentConfig, ("id", "kwargs")),
            (environment.ClassEnvironmentConfig, ("kind",)),
            (environment.ToolsEnvironmentConfig, ("kind",)),
            (environment.GymnasiumEnvironmentConfig, ("kind",)),
            (environment.GemEnvironmentConfig, ("kind",)),
            (environment.TextArenaEnvironmentConfig, ("kind",)),
            (environment.ReasoningGymEnvironmentConfig, ("kind",)),
            (environment.SkyRLGymEnvironmentConfig, ("kind",)),
        )
        for name in names
    },
    (environment.ToolsEnvironmentConfig, "tool_style"): "test_public_methods_are_tools_and_the_last_turn_calls_none",
    (environment.GymnasiumEnvironmentConfig, "instructions"): "test_gymnasium_is_played_in_numbers_and_shown_as_text",
    (environment.TextArenaEnvironmentConfig, "opponent"): "test_textarena_against_an_opponent",
    (environment.ProgramEnvironmentConfig, "kind"): "test_sections_that_cannot_be_are_refused",
    (environment.ProgramEnvironmentConfig, "host"): "test_an_address_of_another_machine_is_refused",
    (environment.ProgramEnvironmentConfig, "token_env"): "test_a_token_is_asked_for",
    (environment.AgentEnvironmentConfig, "path"): "test_a_function_in_a_file_is_played_in_processes",
    (environment.AgentEnvironmentConfig, "command"): "test_a_command_prints_its_reward",
    **{
        (
            environment.VerifiersEnvironmentConfig,
            name,
        ): "test_an_environment_of_verifiers_plays_against_the_built_in_engine"
        for name in ("python", "env", "renderer")
    },
    (run.RunConfig, "device"): "test_auto_takes_the_fastest_device_and_one_that_is_not_there_is_refused",
    (run.RunConfig, "num_threads"): "test_a_resume_with_other_threads_needs_permission_and_is_noted",
    (
        run.RunConfig,
        "grace_seconds",
    ): "test_a_step_that_takes_longer_than_its_grace_is_given_up",
    (run.RunConfig, "deterministic"): "test_a_run_says_so_to_its_device",
    (run.RunConfig, "compile"): "test_every_model_that_trains_is_compiled_as_the_recipe_says",
    (run.OptimizerConfig, "in_backward"): "test_one_gradient_exists_at_a_time",
    (run.OptimizerConfig, "non_finite_gradient"): "test_a_gradient_that_is_not_finite_can_stop_the_run",
    **{
        (losses.DivergenceRejectionConfig, name): "test_what_is_rejected_is_in_neither_the_loss_nor_its_denominator"
        for name in losses.DivergenceRejectionConfig.model_fields
    },
    **{
        (
            losses.RatioRejectionConfig,
            name,
        ): "test_what_is_out_of_the_bounds_of_a_ratio_is_rejected_and_counts_where_it_is_asked_to"
        for name in losses.RatioRejectionConfig.model_fields
    },
    # An objective of each kind, with its own settings.
    **{
        (section, name): "test_the_loss_of_the_policy_is_the_formula_of_its_settings"
        for section in (objectives.GSPOConfig, objectives.GMPOConfig, objectives.CISPOConfig)
        for name in section.model_fields
    },
    **{
        (section, "kind"): "test_the_loss_of_the_policy_is_the_formula_of_its_settings"
        for section in (objectives.PPOObjectiveConfig, objectives.SAPOConfig)
    },
    (
        objectives.M2POConfig,
        "kind",
    ): "test_m2po_leaves_out_the_tokens_of_the_whole_minibatch_that_are_furthest_from_the_old_policy",
    **{
        (section, "kind"): "test_loss_metrics_and_gradient_are_those_of_one_response_at_a_time_in_any_cut"
        for section in (objectives.OnlineDPOConfig, objectives.OnlineIPOConfig)
    },
    **{
        (section, "kind"): "test_advantages_are_the_formula_of_their_settings"
        for section in sections_of(advantage.Advantage)
    },
    **{
        (section, "kind"): "test_the_policy_gradient_does_not_depend_on_the_micro_batches"
        for section in (shaping.LossKLConfig, shaping.NoKLConfig)
    },
    (shaping.RewardKLConfig, "kind"): "test_each_measure_of_the_kl_enters_the_reward",
    (shaping.MarginKLConfig, "kind"): "test_the_margin_is_the_kl_of_the_recipe_and_nothing_has_to_be_said_of_it",
    **{
        (section, "kind"): "test_what_a_response_is_rewarded_with_is_the_formula_of_the_settings"
        for section in (shaping.ScoredTruncationConfig, shaping.UnscoredTruncationConfig)
    },
    (
        shaping.BootstrapTruncationConfig,
        "kind",
    ): "test_a_cut_answer_has_the_discounted_value_after_it_in_the_place_of_its_score",
    (shaping.MaskTruncationConfig, "kind"): "test_a_cut_response_can_be_left_out_and_then_counts_nowhere",
    # On a CPU sampler and learner round alike in bf16, and no weight is above any cap.
    # Where sampler and learner agree to the bit, as in bf16 without kernels, these weights are 1.
    **{
        (section, name): "test_the_loss_of_the_policy_is_the_formula_of_its_settings"
        for section in (losses.TruncatedWeightConfig, losses.MaskedWeightConfig)
        for name in section.model_fields
    },
    **{
        (section, "kind"): "test_an_average_is_over_what_it_says"
        for section in (losses.TokenMeanConfig, losses.ResponseMeanConfig, losses.ConstantDivisorConfig)
    },
    **{
        (section, "kind"): "test_the_loss_of_the_values_is_the_formula_of_its_settings"
        for section in (losses.SquaredErrorConfig, losses.HuberConfig, losses.SmoothL1Config)
    },
    **{
        (section, "kind"): "test_the_unit_of_values_is_the_deviation_of_the_returns_as_they_are_weighed"
        for section in (losses.ExponentialScaleConfig, losses.CumulativeScaleConfig)
    },
    (run.RunConfig, "token_cache"): "test_a_run_keeps_its_ids_where_it_is_told_to",
    # An extra, which need not be installed.
    (run.ModelConfig, "quantisation"): "test_a_recipe_says_how_the_base_is_stored",
    (run.ScalarModelConfig, "quantisation"): "test_a_recipe_says_how_the_base_is_stored",
    (data.SourceConfig, "subset"): "test_a_hub_data_set_is_read_through_datasets",
    (
        rewards.FunctionRewardConfig,
        "timeout_seconds",
    ): "test_a_function_that_hangs_stops_the_run_and_says_what_was_waited_for",
    # What a verifier does with its options needs no run; that a run asks it, one of its tests shows.
    **{
        (verifiers.MathsRewardConfig, name): "test_an_option_of_the_maths_verifier_changes_a_grade"
        for name in verifiers.MathsRewardConfig(kind="maths").verifier_options()
        if not name.startswith("symbolic")
    },
    (
        verifiers.MathsRewardConfig,
        "symbolic",
    ): "test_always_demands_the_extra_when_the_verifier_is_made_and_auto_does_without",
    **{
        (verifiers.CountdownRewardConfig, name): "test_an_option_of_the_countdown_verifier_changes_a_grade"
        for name in verifiers.CountdownRewardConfig(kind="countdown").verifier_options()
    },
    **{
        (section, name): "test_sources_of_both_kinds_score_through_workers"
        for section in (verifiers.MathsRewardConfig, verifiers.CountdownRewardConfig)
        for name in ("kind", "name")
    },
}
"""Keys that another test shows, by its name."""
