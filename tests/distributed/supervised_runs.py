"""Short runs of SFT, reward models, PRMs, DPO and KTO, as they are on one process or as a rank of several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from distributed.paths import plain_paths
from proximo.config.devices import DevicesConfig
from proximo.data.examples import TextExample
from proximo.data.labelled import LabelledResponse
from proximo.data.preferences import PreferencePair
from proximo.data.step_examples import StepExample
from proximo.distributed.world import whole
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.models.sharing import base_alone
from proximo.run.make.sharding import shard_model
from proximo.run.task import Record
from proximo.supervised.dpo_recipe import DPOConfig
from proximo.supervised.dpo_trainer import DPOTask
from proximo.supervised.kto_recipe import KTOConfig
from proximo.supervised.kto_trainer import KTOTask
from proximo.supervised.prm_recipe import PRMConfig
from proximo.supervised.prm_trainer import PRMTask
from proximo.supervised.reward_recipe import RewardTrainingConfig
from proximo.supervised.reward_trainer import RewardTask
from proximo.supervised.sft_recipe import SFTConfig
from proximo.supervised.sft_trainer import SFTTask
from proximo.supervised.task import SupervisedTask, TaskInputs
from proximo.trainer_kinds import recipe_kind
from tiny_runs import changed, recipe_of

Trainer = Literal["sft", "reward", "prm", "dpo", "kto"]
TRAINERS: tuple[Trainer, ...] = ("sft", "reward", "dpo", "kto")
NUM_UPDATES = 20
TIGHT = 1e-9
"""In float64, where norms and rotary positions work in float64 too."""

CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    # About a row and a half, so that ranks have several micro-batches, and not all of them full.
    "accumulation": {"tokens_per_microbatch": 24},
    # Of two or three ranks, some have nothing in every update.
    "few_rows": {"rows": 1},
    "lora": {"lora": True},
    "lora_few_rows": {"lora": True, "rows": 1, "tokens_per_microbatch": 24},
    "frozen": {"frozen": True},
    "checkpointing": {"checkpointing": True},
    "in_backward": {
        "optimizer": {"in_backward": True, "max_gradient_norm": None, "non_finite_gradient": "stop"},
    },
    "divergence_window": {"loss": "divergence_window", "rows": 1},
    "ipo": {"loss": "ipo", "rows": 1},
    "bf16": {"bf16": True, "tokens_per_microbatch": 24},
    "dropout": {"dropout": True, "tokens_per_microbatch": 24},
    "experts": {"experts": True, "tokens_per_microbatch": 24},
    "experts_few_rows": {"experts": True, "rows": 1},
}

EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
"""Balanced, in a mixture."""

FULL, GRADS, REPLICATE = {"shard": "full"}, {"shard": "grads"}, {"shard": "replicate"}
OFFLOADED = FULL | {"offload": "always"}
EACH_MICROBATCH = FULL | {"reduce_gradients": "microbatch"}
EVERY_CASE: list[tuple[Trainer, str]] = [
    *(
        (trainer, case)
        for case in CASES
        if case not in ("divergence_window", "ipo", "bf16", "dropout", "experts", "experts_few_rows")
        for trainer in TRAINERS
    ),
    ("reward", "divergence_window"),
    ("dpo", "ipo"),
    ("prm", "accumulation"),
    ("prm", "few_rows"),
]
EVERY_WAY = [FULL, GRADS, REPLICATE, OFFLOADED, EACH_MICROBATCH]


def draw(generator: torch.Generator, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 60, (length,), generator=generator).tolist())


def texts(count: int = 13) -> list[TextExample]:
    """Of 2 to 20 tokens, of which very different numbers count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        ids = draw(generator, 2 + 5 * index % 19)
        mask = (False, *[position % (index % 3 + 1) == 0 for position in range(len(ids) - 1)])
        made.append(TextExample(id=str(index), token_ids=ids, loss_mask=mask))
    return made


def pairs(count: int = 13) -> list[PreferencePair]:
    generator = torch.Generator().manual_seed(1)
    return [
        PreferencePair(
            id=str(index),
            prompt_token_ids=draw(generator, 1 + index % 4),
            chosen_token_ids=draw(generator, 1 + 3 * index % 7),
            rejected_token_ids=draw(generator, 1 + 5 * index % 9),
            margin=0.1 * index if index % 2 else None,
        )
        for index in range(count)
    ]


def solutions(count: int = 13) -> list[StepExample]:
    """Of 1 to 4 steps of different lengths."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for index in range(count):
        ends = tuple(range(2 + index % 3, 12, 3))[: 1 + index % 4]
        labels = tuple(float((index + step) % 3 > 0) for step in range(len(ends)))
        made.append(StepExample(id=str(index), token_ids=draw(generator, ends[-1] + 1), ends=ends, labels=labels))
    return made


def labelled(count: int = 13) -> list[LabelledResponse]:
    """Some answers do not fit behind the longer prompts."""
    return [
        LabelledResponse(
            id=pair.id,
            prompt_token_ids=pair.prompt_token_ids,
            response_token_ids=pair.rejected_token_ids,
            desirable=index % 3 > 0,
        )
        for index, pair in enumerate(pairs(count))
    ]


def made_task(trainer: Trainer, case: str, devices: dict[str, Any], dtype: torch.dtype) -> SupervisedTask:
    options = dict(CASES[case])
    lora, rows = options.pop("lora", False), options.pop("rows", 4)
    frozen, checkpointing = options.pop("frozen", False), options.pop("checkpointing", False)
    experts = options.pop("experts", False)
    precision = Precision.BF16 if options.pop("bf16", False) else Precision.FLOAT32
    shared = {
        "optimizer": {"learning_rate": 1e-2, "warmup_updates": 2},
        "num_epochs": rows * NUM_UPDATES / 11,
    } | options
    sizes: dict[str, Any] = {"hidden_size": 32, "attention_dropout": 0.5 if "dropout" in options else 0.0}
    sizes |= EXPERTS if experts else {}
    plain = tiny_language_model("mixtral" if experts else "llama", dtype=dtype, seed=3, **sizes)
    if experts:
        plain.set_experts_implementation("eager")  # others have no float64
    language = LanguageModel(plain, precision=precision)
    model: Any = language
    if trainer in ("reward", "prm"):
        model = scalar_from_language_model(language, HeadStart.NORMAL, seed=1)
    if lora:
        model = model.with_adapter(LoRAOptions(rank=2, alpha=4.0, seed=1))
    if frozen:
        model.base.get_input_embeddings().requires_grad_(False)
        model.base.base_model.layers[0].requires_grad_(False)
    if checkpointing:
        model.use_activation_checkpointing()
    reference = None
    if trainer in ("dpo", "kto"):
        reference = base_alone(model) if lora else model.frozen_copy()
        reference.narrow_frozen(beside=[model.model])
    lies = DevicesConfig(**devices)
    shard_model(model, lies, role="model", beside=[] if reference is None else [reference.model])
    if reference is not None:
        shard_model(reference, lies, role="reference", beside=[model.model])
    data: Sequence[Any] = {"sft": texts, "prm": solutions, "kto": labelled}.get(trainer, pairs)()
    inputs: dict[str, Any] = {
        "model": model,
        "tokenizer": tiny_tokenizer(),
        "examples": data[:11],
        "held_out": data[8:],
        "seed": 0,
        "fingerprint": {},
    }
    return task_of(trainer, rows, inputs, shared, reference)


def task_of(
    trainer: Trainer, rows: int, inputs: dict[str, Any], shared: dict[str, Any], reference: Any
) -> SupervisedTask:
    """`rows` of an update; `shared` are the settings that all trainers have."""
    if trainer == "sft":
        return SFTTask(TaskInputs(config=SFTConfig(examples_per_step=rows, **shared), **inputs))
    if trainer == "prm":
        return PRMTask(TaskInputs(config=PRMConfig(solutions_per_step=rows, **shared), **inputs))
    if trainer == "reward":
        centring = {} if "loss" in shared else {"score_centring": 0.1}
        config = RewardTrainingConfig(pairs_per_step=rows, **shared, **centring)
        return RewardTask(TaskInputs(config=config, **inputs))
    assert reference is not None
    if trainer == "kto":
        config = KTOConfig(examples_per_step=max(2, rows), **shared)
        return KTOTask(TaskInputs(config=config, **inputs), reference=reference, max_tokens=10)
    return DPOTask(TaskInputs(config=DPOConfig(pairs_per_step=rows, **shared), **inputs), reference=reference)


def numbers(record: Record) -> dict[str, float]:
    timed = ("time/", "throughput/", "memory/")
    values = {name: metric.value for name, metric in record.metrics.items() if not name.startswith(timed)}
    return {name: value for name, value in values.items() if value is not None}


@plain_paths()
def run_case(
    trainer: Trainer,
    case: str,
    devices: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    num_updates: int = NUM_UPDATES,
) -> dict[str, Any]:
    """What every step and two evaluations said, and the weights at the end, on this rank."""
    task = made_task(trainer, case, devices, dtype)
    lines = [numbers(task.step(step)) for step in range(1, num_updates + 1)]
    evaluations = [record for num_rows in (None, 1) if (record := task.evaluate(num_rows)) is not None]
    return {
        "lines": lines + [numbers(record) for record in evaluations],
        "samples": [sample for record in evaluations for sample in record.samples],
        "weights": {name: whole(weight).detach().clone() for name, weight in task.model.model.named_parameters()},
    }


@plain_paths()
def gradients(trainer: Trainer, case: str, devices: dict[str, Any]) -> dict[str, Tensor]:
    """Of the first update, in float32."""
    task = made_task(trainer, case, devices, torch.float32)
    learner = task.learners[task.role]
    found: dict[str, Tensor] = {}

    def keep() -> None:
        found.update({name: whole(p.grad).clone() for name, p in learner.parameters.items() if p.grad is not None})

    learner.optimizer.step = keep
    task.step(1)
    return found


def built(trainer: Trainer, place: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The task of a recipe: digests of what it read, how its models lie, an evaluation and the first step."""
    kind = recipe_kind(trainer)
    recipe = kind.schema.model_validate(changed(recipe_of(trainer, Path(place)), changes))
    task = kind.build(recipe)
    models = [task.model, *([task.reference] if trainer in ("dpo", "kto") else [])]
    evaluated = task.evaluate()
    assert evaluated is not None
    return {
        "fingerprint": task.inputs_fingerprint,
        "sharded": [model.backbone.sharding is not None for model in models],
        "lines": [numbers(evaluated), numbers(task.step(1))],
    }
