"""Combinations of settings that are refused, and the page that lists them with the reason: docs/refused.md.

    PYTHONPATH=tests python -m docs.refusals > docs/refused.md

Each row is a small recipe with changes; what is written beside it is what the schema's own validator said. A test holds
the page, and that no validator is without a row.
"""

import ast
import re
from collections.abc import Iterator
from itertools import chain, islice
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
ROWS: dict[str, tuple[str, ...]] = {
    "KL and reference": (
        "ppo.kl.adaptive.target=6 ppo.kl.coefficient=0",
        "ppo.kl.adaptive={target: 6, horizon: 10}",
        "model.lora.rank=8 ppo.kl.reference_every_steps=5",
        "reference={path: owner/other, lora: {rank: 8}}",
        "ppo.kl.estimator=full reference.path=owner/other devices.reference.device=cuda:1",
        "reference={path: owner/other, balancing_coefficient: 0.01}",
        "dpo: model.lora.rank=8 reference.path=owner/other",
        AT,
        f"dpo: {AT}",
        f"{AT} devices.reference.shard=full",
        f"{SERVED} engine={{kind: vllm, addresses: ['http://t:8000/']}}",
        f"{SERVED} ppo.rollout.temperature=0.7",
    ),
    "Environments": (
        "environment.path=games:Guess",
        "environment.path=games:Guess reward=[] ppo.score.minus_reference_answer=true",
        "environment.path=games:Guess reward=[] ppo.score.overlong_buffer_tokens=8",
        "environment.path=games:Guess reward=[] ppo.rollout.min_new_tokens=2",
        "environment.path=games:Guess reward=[] ppo.policy_loss.aggregation=constant",
        "environment.path=games:Guess reward=[{kind: function, function: games:count, name: environment}]",
        "environment={kind: agent} reward=[]",
        "environment={kind: verifiers, python: python, env: {}} reward=[]",
        "environment={kind: agent, path: a.py:run, max_observation_tokens: 9} reward=[]",
        "environment={kind: agent, path: a.py:run, host: 10.0.0.1} reward=[]",
        "environment={kind: agent, path: a.py:run, host: 0.0.0.0, token_env: T} reward=[]",
    ),
    "Without a reward": (
        "reward=[] ppo.kl=none",
        "reward=[]",
        "reward=[] reference.path=owner/teacher ppo.kl={kind: loss, estimator: weighted_k3}",
        "reward=[] reference.path=owner/teacher ppo.solved_score=1",
        "reward=[] reference.path=owner/teacher data.filter.above=0.9",
    ),
    "Online DPO": (
        "ppo.kl.kind=margin",
        "ppo.policy_loss.objective=online_dpo ppo.kl.kind=reward",
        "ppo.policy_loss.objective=online_dpo ppo.kl.coefficient=0",
        "ppo.policy_loss.objective=online_dpo ppo.responses_per_prompt=4",
        "ppo.policy_loss.objective=online_dpo ppo.advantage=gae",
        "ppo.policy_loss.objective=online_dpo ppo.minibatch_responses=3",
        "ppo.policy_loss.objective=online_dpo ppo.policy_loss.entropy_coefficient=0.01",
    ),
    "Advantages and values": (
        "ppo.advantage=group_centred",
        "ppo.advantage.standardise=group",
        "ppo.advantage=return_to_go ppo.critic_warmup_steps=2",
        "ppo.critic_warmup_steps=10",
        "ppo.truncation=bootstrap ppo.advantage=return_to_go",
        "ppo.advantage={kind: pass_at_k, k: 4} ppo.responses_per_prompt=2",
        "ppo.advantage=greedy_baseline ppo.rollout.greedy=true",
        "ppo.advantage=greedy_baseline ppo.score.minus_reference_answer=true",
        "value.init_from=reward reward=[{kind: function, function: 'm:f'}]",
    ),
    "Scores": (
        "ppo.score.whiten_rewards=keep_mean ppo.advantage=return_to_go",
        "ppo.score.min_tokens=3",
        "reward.0.weight=0",
        "ppo.task_reward=maths",
        "ppo.score.missing_eos_penalty=1 ppo.truncation=unscored",
        "ppo.score.min_tokens=300 ppo.score.min_tokens_penalty=1",
        "ppo.score.overlong_buffer_tokens=300",
        "reward=[{kind: model, path: a/b}, {kind: model, path: a/c}]",
        "reward=[{kind: maths, answer_from: [pattern]}]",
        "reward=[{kind: maths, answer_from: [pattern], pattern: '('}]",
        "reward=[{kind: maths, scores: {correct: 0}}]",
        "ppo.rollout.random_limit_min=10 ppo.score.min_tokens=20 ppo.score.min_tokens_penalty=1",
        "reward=[{kind: model, path: a/b, dense: deltas}] ppo.advantage=group_centred ppo.responses_per_prompt=4",
    ),
    "Rollout": (
        "ppo.rollout={greedy: true, top_k: 50}",
        "ppo.rollout.greedy=true ppo.responses_per_prompt=4",
        "data.filter.above=0.9 ppo.rollout.staleness=1",
        f"data.filter.above=0.9 {RESAMPLE}",
        f"{RESAMPLE} ppo.rollout.staleness=1",
        f"{RESAMPLE} ppo.samples_per_prompt=8",
        "engine={kind: vllm, sleep: true} ppo.rollout.staleness=1",
        "ppo.rollout.min_new_tokens=500",
        "ppo.rollout.random_limit_min=10 ppo.rollout.min_new_tokens=20",
        "ppo.samples_per_prompt=2 ppo.responses_per_prompt=2",
        "engine={kind: vllm, addresses: ['localhost:8000']}",
        "engine={kind: vllm, addresses: ['http://localhost:8000'], replicas: 2}",
    ),
    "Verifiers": (
        "reward=[{kind: code, form: asserts, cpu_seconds: 30}]",
        "reward=[{kind: code, form: asserts, sandbox_waived: [netwrk]}]",
    ),
    "Rewards of texts": (
        "reward=[{kind: pattern, pattern: '('}]",
        "reward=[{kind: think_answer, verifier: {kind: pattern, pattern: a, workers: 2}}]",
        "reward=[{kind: think_answer, verifier: {kind: maths, scores: {correct: 0.5}}}]",
    ),
    "Remote rewards": (
        "reward=[{kind: remote, url: 'http://me:mine@host'}]",
        "reward=[{kind: remote, url: 'http://host', token_env: my-token}]",
        "reward=[{kind: remote, url: 'http://host', step_seconds: 60}]",
    ),
    "Losses and updates": (
        "ppo.policy_loss.behaviour_weight=masked",
        "ppo.minibatch_responses=1000",
        "ppo.evaluate_average=true",
        f"ppo.policy_optimizer={EARLY} ppo.guards.max_ratio=5",
        f"ppo.policy_optimizer={EARLY} ppo.ptx.coefficient=1 ptx_data.sources=[{{path: a/b}}]",
        f"ppo.policy_optimizer={EARLY}",
        "ppo.policy_optimizer={learning_rate: 1e-6, in_backward: true, max_gradient_norm: null}",
        "ppo.ptx.coefficient=1",
        "ppo.ptx.coefficient=1 ptx_data={sources: [{path: a/b}], held_out_rows: 5}",
        "ppo.value_loss.coefficient=0.5",
        "value.init_from=trunk ppo.value_optimizer={learning_rate: 1e-4}",
    ),
    "Evaluation": (
        "ppo.evaluate_greedy=true ppo.evaluation_samples_per_prompt=4",
        "ppo.evaluate_reference=true ppo.kl=none",
    ),
    "Models": (
        f"model.config={LLAMA}",
        "model={config: {hidden_size: 64}} tokenizer.path=owner/tokenizer",
        f"model={{config: {LLAMA}}}",
        f"model={{config: {LLAMA}, lora: {{rank: 8}}}} tokenizer.path=owner/tokenizer",
        "model.lora.rank=8 model.frozen_layers=2",
        f"model={{config: {LLAMA}}} tokenizer.path=owner/tokenizer value.lora.rank=8",
        "value={path: owner/a, init_from: policy}",
        "value.init_from=path",
        f"value={{config: {LLAMA}, lora: {{rank: 8}}}}",
        "value.lora.rank=8 value.frozen_layers=2",
        "tokenizer.train_vocab_size=500",
        "value={init_from: trunk, lora: {rank: 8}}",
        "value={init_from: trunk, balancing_coefficient: 0}",
        "value.init_from=trunk devices.value.device=cuda:1",
        "model.quantisation=4bit",
        "model={path: owner/model, quantisation: 8bit, lora: {rank: 8}} value.lora.rank=8",
        "model={path: owner/model, quantisation: 4bit, lora: {rank: 8}}",
        "value={init_from: policy, quantisation: 4bit, lora: {rank: 8}}",
        "reference={config: {model_type: llama}, quantisation: 4bit}",
        "reference={path: owner/model, quantisation: 4bit} ppo.kl.reference_every_steps=10",
        "reward=[{kind: model, path: adapter, share_base: true}]",
        "model.lora.rank=8 reward=[{kind: model, path: a/b, share_base: true, revision: main}]",
        "model.lora.rank=8 reward=[{kind: model, path: adapter, share_base: true}] "
        "value={init_from: reward, lora: {rank: 8}}",
        "pipeline: ppo.model.lora.rank=8 ppo.reward=[{kind: model, path: '@reward', share_base: true}]",
        "pipeline: ppo.model={path: owner/a, lora: {rank: 8}} "
        "ppo.reward=[{kind: model, path: '@reward', share_base: true}] reward.model={path: owner/b, lora: {rank: 8}}",
        "pipeline: ppo.reward=[{kind: prm, path: '@reward'}]",
        "pipeline: prm={model: {path: owner/a, lora: {rank: 8}}, data: {sources: [{path: steps.jsonl}]}} "
        "ppo.reward=[{kind: prm, path: '@prm'}] ppo.value.init_from=policy",
        "pipeline: prm={model: {path: owner/a}, data: {sources: [{path: steps.jsonl}]}} "
        "ppo.reward=[{kind: prm, path: '@prm', step_separator: ';'}] ppo.value.init_from=policy",
        "sft: tokenizer={path: owner/tokenizer, train_vocab_size: 500}",
        "sft: tokenizer.train_vocab_size=500",
        "reward: model={lora: {rank: 8}}",
    ),
    "The run": (
        "run.folder=~/runs/x",
        "run.folder=''",
        "pipeline: sft.run.folder=elsewhere",
        "run.sinks=[{kind: wandb}, {kind: wandb}]",
        "run.push.name=a/b/c",
        "pipeline: run.push.name=me/mine",
    ),
    "Preferences": ("dpo: dpo={loss: ipo, label_smoothing: 0.1}",),
    "Reward models": ("reward: reward.loss=divergence_window reward.score_centring=0.01",),
    "Many devices": (
        "devices.shard=replicate devices.offload=always",
        "devices.num=8 devices.shard_size=3",
        "run.device=gpu",
        "devices.num=2 devices.policy.device=cuda:1",
        "devices.num=2 run.compile=inductor",
        "sft: devices.num=2 sft.optimizer={learning_rate: 1e-5, kind: adamw_8bit}",
        "dpo: devices.num=2 model={path: owner/model, quantisation: 4bit, lora: {rank: 8}}",
        "devices.num=2 ppo.average_decay=0.99 devices.average.shard=replicate",
        "devices.num=2 ppo.kl.reference_every_steps=5 devices.reference.shard=replicate",
        "devices.num=2 ppo.kl.reference_every_steps=5 devices.reference.offload=always",
        "devices.num=2 value.init_from=trunk devices.value.shard=grads",
        "devices.num=2 devices.offload=idle model={path: owner/model, lora: {rank: 8}}",
        "pipeline: sft.devices.num=2",
    ),
    "Data": (
        "data.filter.max_fraction=0.5",
        "data.filter={above: 0.2, below: 0.8}",
        "sft: data.proportions=[2,4,4]",
        "sft: data.proportions=[2,4,4] data.phase=3",
        "sft: data.proportions=[0, 0] data.phase=0",
        "sft: data.held_out_rows=5 data.evaluation_sources=[{path: a/b}]",
        "sft: data.sources=[{path: a/b, weight: 2}, {path: a/c}]",
        "sft: data.sources=[{path: a/b, function: 'm:f'}]",
        "sft: data.sources=[{path: a/b, kwargs: {x: 1}}]",
        "sft: data.sources=[{path: a/b, template: '{question}'}]",
    ),
}
"""Section of the page -> what is changed in a small good recipe of `proximo ppo`, or of the command before a colon."""

ADVICE = re.compile(
    r"[:;] (?:or )?(?:change|give|keep|leave|load|lower|make|merge|move|name|put|raise|remove|set|use|write)\b.*$"
)
"""What a message says of what to do, at its end."""
INTRODUCTION = """\
# Invalid combinations of settings

These settings are refused before anything is loaded. Each line has settings, in an otherwise valid recipe of `proximo
ppo` or of the command that begins the line, and the reason. The error message also says what to do.
"""


def rows() -> Iterator[tuple[str, str]]:
    """Command and changes of each row."""
    for row in chain.from_iterable(ROWS.values()):
        command, is_named, changes = row.partition(": ")
        yield (command, changes) if is_named and command in RECIPES else ("ppo", row)


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
    lines, found = [INTRODUCTION], rows()
    for section, of_section in ROWS.items():
        lines.append(f"## {section}\n")
        for kind, changes in islice(found, len(of_section)):
            command = "" if kind == "ppo" else f"{kind}: "
            reasons = " ".join(ADVICE.sub("", reason) for reason in reasons_of(kind, changes))
            lines.append(f"- {command}`{changes}`: {reasons}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def conflicts() -> Iterator[tuple[str, int, str]]:
    """File, line and the longest constant piece of every sentence by which a schema refuses a combination."""
    for file in sorted(Path(proximo.config.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            refuses = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
            said = node.exc.args[0] if refuses and getattr(node.exc.func, "id", "") == "ValueError" else None
            said = node.value if isinstance(node, ast.Yield) else said
            if isinstance(said, ast.Constant | ast.JoinedStr) and file.name != "ineffective_keys.py":
                pieces = [each.value for each in ast.walk(said) if isinstance(each, ast.Constant)]
                yield file.name, node.lineno, max((str(piece) for piece in pieces), key=len)


if __name__ == "__main__":
    print(page(), end="")
