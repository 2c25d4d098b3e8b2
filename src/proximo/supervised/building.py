"""What all supervised trainers build alike: data and tokenizer, a task's inputs, and without weights a task's plan.

Data come before any weights are loaded, so that a bad file fails early.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.config.run import ModelConfig, ScalarModelConfig
from proximo.data.load_report import LoadReport
from proximo.data.rows import Row
from proximo.data.token_cache import TokenCache
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses
from proximo.models.scalar import ScalarModel
from proximo.models.transformers_model import check_lengths, disable_dropout
from proximo.plan.cost_model import (
    Batches,
    StepCost,
    TrainingPass,
    inference_cost,
    likelihood_loss,
    score_loss,
    sequential_cost,
    training_cost,
)
from proximo.plan.fake_tensor_profiler import PassProfiler, building, to_fake_tensors
from proximo.plan.stages import StageContext, StageCosts, truncated_lengths
from proximo.plan.weightless_models import language_model, make_reference, scalar_model
from proximo.run.make.conversion import check_optimizer
from proximo.run.make.data import SplitRows, evaluation_notes, read_split, token_cache
from proximo.run.make.models import DeviceSpec, build_tokenizer, check_readers, prepare_device
from proximo.run.make.sharding import shard_model
from proximo.run.resumption import inputs_fingerprint
from proximo.supervised.recipes import DropoutSection, ReferenceRecipe, SupervisedConfig, SupervisedRecipe
from proximo.supervised.task import Example, Model, TaskInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run has before any weights are loaded, so that a bad data file fails early."""

    device_spec: DeviceSpec
    cache: TokenCache
    rows: SplitRows
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Split(Generic[Example]):
    """Training examples and held-out examples."""

    training: Sequence[Example]
    held_out: Sequence[Example]
    report: LoadReport
    """What was loaded and dropped among the training rows."""
    held_out_report: LoadReport | None = None
    """The same of the held-out rows; None without any."""

    def __iter__(self) -> Iterator[Example]:
        return chain(self.training, self.held_out)


def start(
    recipe: SupervisedRecipe,
    readers: Mapping[str, ModelConfig | ScalarModelConfig | None],
    *,
    texts_of: Callable[[Sequence[Row]], Iterable[str]] | None = None,
) -> Start:
    """Read the rows, and load or train the tokenizer.

    `readers`: role -> section of a model that reads its tokens. `texts_of`: the texts of rows that a tokenizer may be
    trained on. Raises DataError for malformed rows, and ModelError if a model does not use the tokenizer's ids.
    """
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.training.optimizer, device_spec.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(
        recipe.tokenizer,
        model_path=recipe.model.path,
        revision=recipe.model.revision,
        texts=None if texts_of is None else texts_of(rows.training),
    )
    check_readers(recipe.tokenizer, tokenizer, readers)
    return Start(device_spec=device_spec, cache=cache, rows=rows, tokenizer=tokenizer)


def load_split(load: Callable[..., tuple[Sequence[Example], LoadReport]], begun: Start, options: Any) -> Split[Example]:
    """Tokenise the rows. Raises DataError for a malformed row, and if no example is left.

    `load`: of `data/`, called with rows, tokenizer, `options` and the cache.
    """
    training, report = load(begun.rows.training, begun.tokenizer, options, cache=begun.cache)
    if not begun.rows.held_out:
        return Split(training=training, held_out=[], report=report)
    held_out, held_out_report = load(begun.rows.held_out, begun.tokenizer, options, cache=begun.cache)
    return Split(training=training, held_out=held_out, report=report, held_out_report=held_out_report)


def prepare_model(
    recipe: SupervisedRecipe,
    model: LanguageModel | ScalarModel,
    begun: Start,
    *,
    role: str,
    longest: int,
    dropout: bool,
) -> Mapping[str, Any]:
    """Check that a task's only model can read `longest` tokens, and place it on this rank; returns the fingerprint.

    `dropout`: whether it trains with its own. Raises ConfigError for a model that cannot read so many tokens.
    """
    check_lengths(model.base.config, role=role, max_prompt_tokens=longest, max_response_tokens=0)
    if not dropout:
        disable_dropout(model.model)
    fingerprint = inputs_fingerprint(begun.rows, begun.tokenizer, {"base": model.model} if model.has_adapter else {})
    shard_model(model, recipe.devices, role="model")
    return fingerprint


def task_inputs(
    recipe: SupervisedRecipe,
    model: Model,
    begun: Start,
    split: Split[Example],
    *,
    fingerprint: Mapping[str, Any],
    rows: str,
    notes: Sequence[str] = (),
) -> TaskInputs[Model, Example, Any]:
    """What a task is given. `rows`: the word for its rows in the notes, `pairs`. `notes`: further lines for the log."""
    return TaskInputs(
        model=model,
        tokenizer=begun.tokenizer,
        examples=split.training,
        held_out=split.held_out,
        config=recipe.training,
        seed=recipe.run.seed,
        fingerprint=fingerprint,
        notes=(
            *(f"data: {begun.rows.description}", f"training {rows}: {split.report}", *notes),
            *(*evaluation_notes(recipe.data, split.held_out_report), *begun.cache.notes),
        ),
    )


def plan_update(
    models: Mapping[str, LanguageModel | ScalarModel],
    config: SupervisedConfig,
    loss: Callable[[PassProfiler, PackedResponses], Tensor],
    *,
    max_tokens: int,
    sequences_per_row: int,
    context: StageContext,
    readings: Mapping[str, int] | None = None,
) -> StageCosts:
    """Costs of one update, on a rank. The first model is trained.

    `sequences_per_row`: 2 for preference pairs, else 1. `readings`: role -> how often its model reads as many rows
    before the update; None for once, by each model that is not trained.
    """
    to_fake_tensors(*(model.model for model in models.values()))
    layout = context.lay_out(models, lambda role: "reference" if role == "reference" else "model")
    lengths = truncated_lengths(models, prompt=1, response=max_tokens - 1)
    count, budget = config.rows_per_update, config.tokens_per_microbatch
    optimizer = config.optimizer
    update = Batches.of(
        lengths, count, token_budget=budget, sequences_per_row=sequences_per_row, num_ranks=context.ranks.num
    )
    (trained, learner), *others = models.items()
    readings = dict.fromkeys((role for role, _ in others), 1) if readings is None else readings
    readings = {} if context.updates_only else readings
    tokens = sequences_per_row * context.ranks.share(count) * lengths.total
    training_pass = TrainingPass(loss=loss, batches=update, tokens=tokens)
    reduced = layout.reduced([learner.model], rounds=len(update.groups), in_backward=optimizer.in_backward)
    costs: dict[str, StepCost] = {
        f"{role}_logprobs": sequential_cost([inference_cost(models[role], update)] * times)
        for role, times in readings.items()
    }
    costs["train"] = training_cost([learner.model], [training_pass], in_backward=optimizer.in_backward, reduced=reduced)
    return StageCosts(
        models=models,
        optimized={trained: ([learner.model], optimizer)},
        costs=costs,
        update=update,
        token_budget=budget,
        layout=layout,
    )


def plan(recipe: SupervisedRecipe, context: StageContext) -> StageCosts:
    """Models and costs of a step, without weights: of the model that trains, and of its reference if it has one."""
    config, configs = recipe.training, context.configs
    num_tokens = configs.num_tokens(recipe.tokenizer, recipe.model)
    sized, precision = configs.sized(recipe.model, num_tokens), context.precision
    dropout = isinstance(config, DropoutSection) and config.dropout
    readings = recipe.readings if isinstance(recipe, ReferenceRecipe) else None
    models: dict[str, LanguageModel | ScalarModel] = {}
    with building():
        if isinstance(recipe.model, ScalarModelConfig):
            models["reward"] = scorer = scalar_model(sized, recipe.model, precision=precision, dropout=dropout)
            loss = score_loss(scorer)
        else:
            models["policy"] = policy = language_model(sized, recipe.model, precision=precision, dropout=dropout)
            loss = likelihood_loss(policy)
            if isinstance(recipe, ReferenceRecipe):
                models["reference"] = make_reference(recipe.reference, policy, configs, num_tokens)
                models["reference"].narrow_frozen(beside=[policy.model])
    return plan_update(
        models,
        config,
        loss,
        max_tokens=recipe.data.max_tokens,
        sequences_per_row=recipe.sequences_per_row,
        context=context,
        readings=readings,
    )
