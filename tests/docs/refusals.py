"""Combinations of settings that are refused, and the page that lists them with the reason: docs/refused.md.

    PYTHONPATH=tests python -m docs.refusals > docs/refused.md

Each row is a small recipe with changes; what is written beside it is what the schema's own validator said. A test holds
the page, and that no validator is without a row.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

import proximo.config
from proximo.config.schema.overrides import apply_overrides, parse_override
from proximo.trainer_kinds import recipe_kind
from recipe_files import DPO, KTO, PIPELINE, PPO, REWARD, SFT

RECIPES = {"sft": SFT, "reward": REWARD, "dpo": DPO, "kto": KTO, "ppo": PPO, "pipeline": PIPELINE}
LLAMA = "{model_type: llama}"
EARLY = "{learning_rate: 1e-6, in_backward: true, max_gradient_norm: null, non_finite_gradient: stop}"
RESAMPLE = "ppo.advantage={kind: group_centred, zero_variance_groups: resample} ppo.responses_per_prompt=4"
AT = "devices.reference.addresses=['http://t:8000']"
SERVED = f"reference.path=owner/other {AT}"
ROWS: tuple[tuple[str, str, str], ...] = (
    ("ppo", "KL and reference", "ppo.kl.adaptive.target=6 ppo.kl.coefficient=0"),
    ("ppo", "KL and reference", "ppo.kl.adaptive={target: 6, horizon: 10}"),
    ("ppo", "KL and reference", "model.lora.rank=8 ppo.kl.reference_every_steps=5"),
    ("ppo", "KL and reference", "reference={path: owner/other, lora: {rank: 8}}"),
    ("ppo", "KL and reference", "ppo.kl.estimator=full reference.path=owner/other devices.reference.device=cuda:1"),
    ("ppo", "KL and reference", "reference={path: owner/other, balancing_coefficient: 0.01}"),
    ("ppo", "KL and reference", "ppo.kl={kind: loss, estimator: k3}"),
    ("dpo", "KL and reference", "model.lora.rank=8 reference.path=owner/other"),
    ("ppo", "KL and reference", AT),
    ("dpo", "KL and reference", AT),
    ("ppo", "KL and reference", f"{AT} devices.reference.shard=full"),
    ("ppo", "KL and reference", f"{SERVED} engine={{kind: vllm, addresses: ['http://t:8000/']}}"),
    ("ppo", "KL and reference", f"{SERVED} ppo.rollout.temperature=0.7"),
    ("ppo", "Environments", "environment.path=games:Guess"),
    ("ppo", "Environments", "environment.path=games:Guess reward=[] ppo.score.minus_reference_answer=true"),
    ("ppo", "Environments", "environment.path=games:Guess reward=[] ppo.score.overlong_buffer_tokens=8"),
    ("ppo", "Environments", "environment.path=games:Guess reward=[] ppo.rollout.min_new_tokens=2"),
    ("ppo", "Environments", "environment.path=games:Guess reward=[] ppo.policy_loss.aggregation=constant"),
    (
        "ppo",
        "Environments",
        "environment.path=games:Guess reward=[{kind: function, function: games:count, name: environment}]",
    ),
    ("ppo", "Environments", "environment={kind: agent} reward=[]"),
    ("ppo", "Environments", "environment={kind: verifiers, python: python, env: {}} reward=[]"),
    ("ppo", "Environments", "environment={kind: agent, path: a.py:run, max_observation_tokens: 9} reward=[]"),
    ("ppo", "Environments", "environment={kind: agent, path: a.py:run, host: 10.0.0.1} reward=[]"),
    ("ppo", "Environments", "environment={kind: agent, path: a.py:run, host: 0.0.0.0, token_env: T} reward=[]"),
    ("ppo", "Without a reward", "reward=[] ppo.kl=none"),
    ("ppo", "Without a reward", "reward=[]"),
    ("ppo", "Without a reward", "reward=[] reference.path=owner/teacher ppo.kl={kind: loss, estimator: weighted_k3}"),
    ("ppo", "Without a reward", "reward=[] reference.path=owner/teacher ppo.solved_score=1"),
    ("ppo", "Without a reward", "reward=[] reference.path=owner/teacher data.filter.above=0.9"),
    ("ppo", "Online DPO", "ppo.kl.kind=margin"),
    ("ppo", "Online DPO", "ppo.policy_loss.objective=online_dpo ppo.kl.kind=reward"),
    ("ppo", "Online DPO", "ppo.policy_loss.objective=online_dpo ppo.kl.coefficient=0"),
    ("ppo", "Online DPO", "ppo.policy_loss.objective=online_dpo ppo.responses_per_prompt=4"),
    ("ppo", "Online DPO", "ppo.policy_loss.objective=online_dpo ppo.advantage=gae"),
    ("ppo", "Online DPO", "ppo.policy_loss.objective=online_dpo ppo.minibatch_responses=3"),
    ("ppo", "Online DPO", "ppo.policy_loss.objective=online_dpo ppo.policy_loss.entropy_coefficient=0.01"),
    ("ppo", "Advantages and values", "ppo.advantage=group_centred"),
    ("ppo", "Advantages and values", "ppo.advantage.standardise=group"),
    ("ppo", "Advantages and values", "ppo.advantage=return_to_go ppo.critic_warmup_steps=2"),
    ("ppo", "Advantages and values", "ppo.critic_warmup_steps=10"),
    ("ppo", "Advantages and values", "ppo.truncation=bootstrap ppo.advantage=return_to_go"),
    ("ppo", "Advantages and values", "ppo.advantage={kind: pass_at_k, k: 4} ppo.responses_per_prompt=2"),
    ("ppo", "Advantages and values", "ppo.advantage=greedy_baseline ppo.rollout.greedy=true"),
    ("ppo", "Advantages and values", "ppo.advantage=greedy_baseline ppo.score.minus_reference_answer=true"),
    ("ppo", "Advantages and values", "value.init_from=reward reward=[{kind: function, function: 'm:f'}]"),
    ("ppo", "Scores", "ppo.score.whiten_rewards=keep_mean ppo.advantage=return_to_go"),
    ("ppo", "Rollout", "ppo.rollout.temperature=0"),
    ("ppo", "Rollout", "ppo.rollout={greedy: true, top_k: 50}"),
    ("ppo", "Rollout", "ppo.rollout.greedy=true ppo.responses_per_prompt=4"),
    ("ppo", "Rollout", "data.filter.above=0.9 ppo.rollout.staleness=1"),
    ("ppo", "Rollout", f"data.filter.above=0.9 {RESAMPLE}"),
    ("ppo", "Rollout", f"{RESAMPLE} ppo.rollout.staleness=1"),
    ("ppo", "Rollout", f"{RESAMPLE} ppo.samples_per_prompt=8"),
    ("ppo", "Rollout", "engine={kind: vllm, sleep: true} ppo.rollout.staleness=1"),
    ("ppo", "Scores", "ppo.score.min_tokens=3"),
    ("ppo", "Scores", "reward.0.weight=0"),
    ("ppo", "Scores", "ppo.task_reward=maths"),
    ("ppo", "Scores", "ppo.score.missing_eos_penalty=1 ppo.truncation=unscored"),
    ("ppo", "Scores", "ppo.score.min_tokens=300 ppo.score.min_tokens_penalty=1"),
    ("ppo", "Scores", "ppo.score.overlong_buffer_tokens=300"),
    ("ppo", "Scores", "reward=[{kind: model, path: a/b}, {kind: model, path: a/c}]"),
    ("ppo", "Scores", "reward=[{kind: maths, answer_from: [pattern]}]"),
    ("ppo", "Scores", "reward=[{kind: maths, answer_from: [pattern], pattern: '('}]"),
    ("ppo", "Scores", "reward=[{kind: maths, scores: {correct: 0}}]"),
    (
        "ppo",
        "Scores",
        "ppo.rollout.random_limit_min=10 ppo.score.min_tokens=20 ppo.score.min_tokens_penalty=1",
    ),
    (
        "ppo",
        "Scores",
        "reward=[{kind: model, path: a/b, dense: deltas}] ppo.advantage=group_centred ppo.responses_per_prompt=4",
    ),
    ("ppo", "Verifiers", "reward=[{kind: code, form: asserts, cpu_seconds: 30}]"),
    ("ppo", "Verifiers", "reward=[{kind: code, form: asserts, sandbox_waived: [netwrk]}]"),
    ("ppo", "Rewards of texts", "reward=[{kind: pattern, pattern: '('}]"),
    ("ppo", "Rewards of texts", "reward=[{kind: think_answer, verifier: {kind: pattern, pattern: a, workers: 2}}]"),
    ("ppo", "Rewards of texts", "reward=[{kind: think_answer, verifier: {kind: maths, scores: {correct: 0.5}}}]"),
    ("ppo", "Remote rewards", "reward=[{kind: remote, url: 'http://me:mine@host'}]"),
    ("ppo", "Remote rewards", "reward=[{kind: remote, url: 'http://host', token_env: my-token}]"),
    ("ppo", "Remote rewards", "reward=[{kind: remote, url: 'http://host', step_seconds: 60}]"),
    ("ppo", "Losses and updates", "ppo.policy_loss.behaviour_weight=masked"),
    ("ppo", "Losses and updates", "ppo.minibatch_responses=1000"),
    ("ppo", "Losses and updates", "ppo.evaluate_average=true"),
    ("ppo", "Losses and updates", "ppo.policy_optimizer={learning_rate: 1e-6, betas: [0.9, 1.0]}"),
    ("ppo", "Losses and updates", f"ppo.policy_optimizer={EARLY} ppo.guards.max_ratio=5"),
    (
        "ppo",
        "Losses and updates",
        f"ppo.policy_optimizer={EARLY} ppo.ptx.coefficient=1 ptx_data.sources=[{{path: a/b}}]",
    ),
    ("ppo", "Losses and updates", f"ppo.policy_optimizer={EARLY}"),
    ("ppo", "Losses and updates", "ppo.policy_optimizer={learning_rate: 1e-6, in_backward: true}"),
    (
        "ppo",
        "Losses and updates",
        "ppo.policy_optimizer={learning_rate: 1e-6, in_backward: true, max_gradient_norm: null}",
    ),
    ("ppo", "Losses and updates", "ppo.ptx.coefficient=1"),
    (
        "ppo",
        "Losses and updates",
        "ppo.ptx.coefficient=1 ptx_data={sources: [{path: a/b}], held_out_rows: 5}",
    ),
    ("ppo", "Losses and updates", "ppo.value_loss.coefficient=0.5"),
    (
        "ppo",
        "Losses and updates",
        "value.init_from=trunk ppo.value_optimizer={learning_rate: 1e-4}",
    ),
    ("ppo", "Rollout", "ppo.rollout.min_new_tokens=500"),
    ("ppo", "Rollout", "ppo.rollout.random_limit_min=128"),
    ("ppo", "Rollout", "ppo.rollout.random_limit_min=10 ppo.rollout.min_new_tokens=20"),
    ("ppo", "Rollout", "ppo.samples_per_prompt=2 ppo.responses_per_prompt=2"),
    ("ppo", "Evaluation", "ppo.evaluate_greedy=true ppo.evaluation_samples_per_prompt=4"),
    ("ppo", "Evaluation", "ppo.evaluate_reference=true ppo.kl=none"),
    ("ppo", "Rollout", "ppo.rollout.stop_strings=['']"),
    ("ppo", "Models", f"model.config={LLAMA}"),
    ("ppo", "Models", "model={config: {hidden_size: 64}} tokenizer.path=owner/tokenizer"),
    ("ppo", "Models", f"model={{config: {LLAMA}}}"),
    ("ppo", "Models", f"model={{config: {LLAMA}, lora: {{rank: 8}}}} tokenizer.path=owner/tokenizer"),
    ("ppo", "Models", "model.lora.rank=8 model.frozen_layers=2"),
    ("ppo", "Models", f"model={{config: {LLAMA}}} tokenizer.path=owner/tokenizer value.lora.rank=8"),
    ("ppo", "Models", "value={path: owner/a, init_from: policy}"),
    ("ppo", "Models", "value.init_from=path"),
    ("ppo", "Models", f"value={{config: {LLAMA}, lora: {{rank: 8}}}}"),
    ("ppo", "Models", "value.lora.rank=8 value.frozen_layers=2"),
    ("ppo", "Models", "tokenizer.train_vocab_size=500"),
    ("ppo", "Models", "value={init_from: trunk, lora: {rank: 8}}"),
    ("ppo", "Models", "value={init_from: trunk, balancing_coefficient: 0}"),
    ("ppo", "Models", "value.init_from=trunk devices.value.device=cuda:1"),
    ("ppo", "Models", "model.quantisation=4bit"),
    ("ppo", "Models", "model={path: owner/model, quantisation: 8bit, lora: {rank: 8}} value.lora.rank=8"),
    ("ppo", "Models", "model={path: owner/model, quantisation: 4bit, lora: {rank: 8}}"),
    ("ppo", "Models", "value={init_from: policy, quantisation: 4bit, lora: {rank: 8}}"),
    ("ppo", "Models", "reference={config: {model_type: llama}, quantisation: 4bit}"),
    ("ppo", "Models", "reference={path: owner/model, quantisation: 4bit} ppo.kl.reference_every_steps=10"),
    ("ppo", "Models", "reward=[{kind: model, path: adapter, share_base: true}]"),
    ("ppo", "Models", "model.lora.rank=8 reward=[{kind: model, path: a/b, share_base: true, revision: main}]"),
    (
        "ppo",
        "Models",
        "model.lora.rank=8 reward=[{kind: model, path: adapter, share_base: true}] "
        "value={init_from: reward, lora: {rank: 8}}",
    ),
    (
        "pipeline",
        "Models",
        "ppo.model.lora.rank=8 ppo.reward=[{kind: model, path: '@reward', share_base: true}]",
    ),
    (
        "pipeline",
        "Models",
        "ppo.model={path: owner/a, lora: {rank: 8}} ppo.reward=[{kind: model, path: '@reward', share_base: true}] "
        "reward.model={path: owner/b, lora: {rank: 8}}",
    ),
    ("pipeline", "Models", "ppo.reward=[{kind: prm, path: '@reward'}]"),
    (
        "pipeline",
        "Models",
        "prm={model: {path: owner/a, lora: {rank: 8}}, data: {sources: [{path: steps.jsonl}]}} "
        "ppo.reward=[{kind: prm, path: '@prm'}] ppo.value.init_from=policy",
    ),
    (
        "pipeline",
        "Models",
        "prm={model: {path: owner/a}, data: {sources: [{path: steps.jsonl}]}} "
        "ppo.reward=[{kind: prm, path: '@prm', step_separator: ';'}] ppo.value.init_from=policy",
    ),
    ("sft", "Models", "tokenizer={path: owner/tokenizer, train_vocab_size: 500}"),
    ("sft", "Models", "tokenizer.train_vocab_size=500"),
    ("reward", "Models", "model={lora: {rank: 8}}"),
    ("ppo", "The run", "run.folder=~/runs/x"),
    ("ppo", "The run", "run.folder=''"),
    ("ppo", "The run", "run.precision=fp16"),
    ("ppo", "The run", "run.device=cuda1"),
    ("pipeline", "The run", "sft.run.folder=elsewhere"),
    ("dpo", "Preferences", "dpo={loss: ipo, label_smoothing: 0.1}"),
    ("reward", "Reward models", "reward.loss=divergence_window reward.score_centring=0.01"),
    ("ppo", "The run", "run.sinks=[{kind: wandb}, {kind: wandb}]"),
    ("ppo", "The run", "run.push.name=a/b/c"),
    ("pipeline", "The run", "run.push.name=me/mine"),
    ("ppo", "Many devices", "devices.shard=replicate devices.offload=always"),
    ("ppo", "Many devices", "devices.num=8 devices.shard_size=3"),
    ("ppo", "Many devices", "devices.num=2 run.compile=inductor"),
    ("sft", "Many devices", "devices.num=2 sft.optimizer={learning_rate: 1e-5, kind: adamw_8bit}"),
    ("dpo", "Many devices", "devices.num=2 model={path: owner/model, quantisation: 4bit, lora: {rank: 8}}"),
    ("ppo", "Many devices", "devices.num=2 ppo.average_decay=0.99 devices.average.shard=replicate"),
    ("ppo", "Many devices", "devices.num=2 ppo.kl.reference_every_steps=5 devices.reference.offload=always"),
    ("ppo", "Many devices", "devices.num=2 value.init_from=trunk devices.value.shard=grads"),
    ("ppo", "Many devices", "devices.num=2 devices.offload=idle model={path: owner/model, lora: {rank: 8}}"),
    ("pipeline", "Many devices", "sft.devices.num=2"),
    ("ppo", "Rollout", "engine={kind: vllm, addresses: ['localhost:8000']}"),
    ("ppo", "Rollout", "engine={kind: vllm, addresses: ['http://localhost:8000'], replicas: 2}"),
    ("ppo", "Data", "data.filter.max_fraction=0.5"),
    ("ppo", "Data", "data.filter={above: 0.2, below: 0.8}"),
    ("sft", "Data", "data.proportions=[2,4,4]"),
    ("sft", "Data", "data.proportions=[2,4,4] data.phase=3"),
    ("sft", "Data", "data.proportions=[1] data.phase=0"),
    ("sft", "Data", "data.held_out_rows=5 data.evaluation_sources=[{path: a/b}]"),
    ("sft", "Data", "data.sources=[{path: a/b, weight: 2}, {path: a/c}]"),
    ("sft", "Data", "data.sources=[{path: a/b, function: 'm:f'}]"),
    ("sft", "Data", "data.sources=[{path: a/b, kwargs: {x: 1}}]"),
    ("sft", "Data", "data.sources=[{path: a/b, template: '{question}'}]"),
)
"""Command, section of the page, what is changed in a small good recipe of that command."""

ADVICE = re.compile(
    r"[:;] (?:or )?(?:change|give|keep|leave|load|lower|make|merge|move|name|put|raise|remove|set|use|write)\b.*$"
)
"""What a message says of what to do, at its end."""
INTRODUCTION = """\
# Invalid combinations of settings

These settings are refused before anything is loaded. Each line has settings, in an otherwise valid recipe of `proximo
ppo` or of the command that begins the line, and the reason. The error message also says what to do.
"""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One row of the page."""

    kind: str
    section: str
    changes: str
    reasons: tuple[str, ...]


def refusals() -> list[Refusal]:
    """All rows with what the validators said."""
    return [
        Refusal(kind=kind, section=section, changes=changes, reasons=reasons_of(kind, changes))
        for kind, section, changes in ROWS
    ]


def reasons_of(kind: str, changes: str) -> tuple[str, ...]:
    """Why a good recipe with these changes is refused; empty where it is not."""
    schema = recipe_kind(kind).schema
    overrides = tuple(parse_override(change) for change in split_changes(changes))
    tree = apply_overrides(yaml.safe_load(RECIPES[kind]), overrides, schema)
    try:
        schema.model_validate(tree)
    except ValidationError as error:
        said = [each for each in error.errors() if each["type"] == "value_error"]
        return tuple(each["msg"].removeprefix("Value error, ") for each in said)
    return ()


def split_changes(changes: str) -> list[str]:
    """At blanks outside brackets."""
    parts, depth = [""], 0
    for character in changes:
        depth += (character in "[{") - (character in "]}")
        if character == " " and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def page() -> str:
    """docs/refused.md."""
    rows, lines = refusals(), [INTRODUCTION]
    for section in dict.fromkeys(row.section for row in rows):
        lines.append(f"## {section}\n")
        for row in rows:
            if row.section == section:
                command = "" if row.kind == "ppo" else f"{row.kind}: "
                reasons = " ".join(ADVICE.sub("", reason) for reason in row.reasons)
                lines.append(f"- {command}`{row.changes}`: {reasons}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def validators() -> Iterator[tuple[str, int, str]]:
    """File, line and the longest constant piece of every ValueError that a schema raises."""
    for file in sorted(Path(proximo.config.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = getattr(node.exc.func, "id", "")
                if name == "ValueError" and isinstance(node.exc.args[0], ast.Constant | ast.JoinedStr):
                    pieces = [each.value for each in ast.walk(node.exc.args[0]) if isinstance(each, ast.Constant)]
                    yield file.name, node.lineno, max((str(piece) for piece in pieces), key=len)


if __name__ == "__main__":
    print(page(), end="")
