"""Supervised tasks of each kind on made-up data, the two models that some compare, and the gradient of a step."""

from typing import Any

import torch

from builders import tiny_language_model, tiny_tokenizer
from ppo.test_updates import Gathered
from proximo.data.examples import TextExample
from proximo.data.labelled import LabelledResponse
from proximo.data.preferences import PreferencePair
from proximo.data.step_examples import StepExample
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
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

FAST = {"learning_rate": 1e-2}
LORA = LoRAOptions(rank=2, seed=3)
BETA = 0.4


def drawn(length: int, generator: torch.Generator, lowest: int = 30) -> list[int]:
    return torch.randint(lowest, 60, (length,), generator=generator).tolist()


def examples(count: int = 6) -> list[TextExample]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        ids = drawn(index + 3, generator, 3)
        mask = (False, *[position % 3 != 0 for position in range(len(ids) - 1)])
        made.append(TextExample(id=str(index), token_ids=tuple(ids), loss_mask=mask))
    return made


def pairs(count: int = 6) -> list[PreferencePair]:
    """Chosen answers hold token 10, rejected ones token 20."""
    generator = torch.Generator().manual_seed(0)
    return [
        PreferencePair(
            id=str(i),
            prompt_token_ids=tuple(drawn(2, generator)),
            chosen_token_ids=(*drawn(i % 4 + 1, generator), 10, 2),
            rejected_token_ids=(*drawn(i % 3 + 1, generator), 20, 2),
            margin=0.1 * i,
        )
        for i in range(count)
    ]


def solutions(count: int = 6) -> list[StepExample]:
    """Of 1 to 3 steps and different lengths; a step is right if its last token is even."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        ends = tuple(3 + 3 * step + index % 2 for step in range(index % 3 + 1))
        ids = drawn(ends[-1] + 1, generator, 3)
        labels = tuple(float(ids[end] % 2 == 0) for end in ends)
        made.append(StepExample(id=str(index), token_ids=tuple(ids), ends=ends, labels=labels, num_prompt_tokens=2))
    return made


def labelled(count: int = 7, longest: int = 5) -> list[LabelledResponse]:
    """Answers of 2 to `longest` tokens. Desirable ones begin with token 10, the others with token 20."""
    generator = torch.Generator().manual_seed(0)
    return [
        LabelledResponse(
            id=str(i),
            prompt_token_ids=tuple(drawn(i % 3 + 2, generator)),
            response_token_ids=(10 if i % 3 else 20, *drawn(i % (longest - 1), generator), 2),
            desirable=i % 3 > 0,
        )
        for i in range(count)
    ]


def task_inputs(model: Any, data: list[Any], held_out: list[Any] | None, config: Any) -> TaskInputs[Any, Any, Any]:
    """What a supervised task is made of. It evaluates on its own data, if no other are given."""
    return TaskInputs(
        model=model,
        tokenizer=tiny_tokenizer(),
        examples=data,
        held_out=data if held_out is None else held_out,
        config=config,
        seed=0,
        fingerprint={},
    )


def scorer(dtype: torch.dtype = torch.float32, *, adapters: bool = False) -> ScalarModel:
    model = scalar_from_language_model(LanguageModel(tiny_language_model(dtype=dtype)), HeadStart.NORMAL, seed=1)
    return model.with_adapter(LORA) if adapters else model


def sft_task(dtype: torch.dtype = torch.float32, *, adapters: bool = False, **config: Any) -> SFTTask:
    model = LanguageModel(tiny_language_model(dtype=dtype))
    model = model.with_adapter(LORA) if adapters else model
    options = SFTConfig(**({"examples_per_step": 6, "optimizer": FAST, "num_epochs": 20} | config))
    return SFTTask(task_inputs(model, examples(), None, options), held_out_characters=10)


def reward_task(dtype: torch.dtype = torch.float32, *, adapters: bool = False, **config: Any) -> RewardTask:
    options = RewardTrainingConfig(**({"pairs_per_step": 6, "optimizer": FAST, "num_epochs": 20} | config))
    return RewardTask(task_inputs(scorer(dtype, adapters=adapters), pairs(), None, options))


def prm_task(dtype: torch.dtype = torch.float32, *, adapters: bool = False, **config: Any) -> PRMTask:
    options = PRMConfig(**({"solutions_per_step": 6, "optimizer": FAST, "num_epochs": 40} | config))
    return PRMTask(task_inputs(scorer(dtype, adapters=adapters), solutions(), None, options))


def dpo_task(
    model: LanguageModel,
    reference: LanguageModel,
    data: list[PreferencePair] | None = None,
    held_out: list[PreferencePair] | None = None,
    **config: Any,
) -> DPOTask:
    options = {"pairs_per_step": 6, "beta": BETA, "optimizer": FAST, "num_epochs": 40} | config
    return DPOTask(task_inputs(model, data or pairs(), held_out, DPOConfig(**options)), reference=reference)


def kto_task(
    model: LanguageModel,
    reference: LanguageModel,
    data: list[LabelledResponse] | None = None,
    held_out: list[LabelledResponse] | None = None,
    max_tokens: int = 64,
    **config: Any,
) -> KTOTask:
    data = data or labelled()
    options = {"examples_per_step": len(data), "beta": BETA, "optimizer": FAST, "num_epochs": 40} | config
    return KTOTask(task_inputs(model, data, held_out, KTOConfig(**options)), reference=reference, max_tokens=max_tokens)


def two_models(dtype: torch.dtype = torch.float64) -> tuple[LanguageModel, LanguageModel]:
    """A policy that has left its reference."""
    return (
        LanguageModel(tiny_language_model(seed=1, dtype=dtype)),
        LanguageModel(tiny_language_model(seed=2, dtype=dtype).requires_grad_(False)),
    )


def first_update(task: SupervisedTask[Any, Any, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metrics and gradient of the first step."""
    task.learners[task.role] = gathered = Gathered(task.model.model)
    metrics = {name: metric.value for name, metric in task.step(1).metrics.items()}
    return metrics, gathered.gradients[0]
