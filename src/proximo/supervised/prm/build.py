"""Builds the task of `proximo prm` from its recipe. The steps: task.py."""

from collections.abc import Sequence
from itertools import chain

from proximo.data.load_report import LoadReport
from proximo.data.stepwise.examples import StepExample, load_step_examples
from proximo.models.context_length import check_lengths
from proximo.models.dropout import disable_dropout
from proximo.models.scalar import HeadStart, mark_steps
from proximo.run.build.conversion import check_optimizer, step_options
from proximo.run.build.data import evaluation_notes, read_split, token_cache
from proximo.run.build.models import build_scalar_model, build_tokenizer, check_readers, prepare_device
from proximo.run.build.sharding import shard_model
from proximo.run.resume_fingerprint import inputs_fingerprint
from proximo.supervised.prm.recipe import PRMRecipe
from proximo.supervised.prm.task import PRMTask
from proximo.supervised.task import TaskInputs


def build_task(recipe: PRMRecipe) -> PRMTask:
    """Load data, then the model, so that a bad data file fails before any weights are loaded."""
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.prm.optimizer, device_spec.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=recipe.model.path, revision=recipe.model.revision)
    check_readers(recipe.tokenizer, tokenizer, {"reward": recipe.model})
    options = step_options(recipe.data)
    examples, report = load_step_examples(rows.training, tokenizer, options, cache=cache)
    held_out: Sequence[StepExample] = []
    held_out_report: LoadReport | None = None
    if rows.held_out:
        held_out, held_out_report = load_step_examples(rows.held_out, tokenizer, options, cache=cache)
    model = build_scalar_model(recipe.model, tokenizer, fresh_head=HeadStart.NORMAL, device_spec=device_spec)
    longest = max(len(example.token_ids) for example in chain(examples, held_out))
    check_lengths(model.base.config, role="reward", max_prompt_tokens=longest, max_response_tokens=0)
    mark_steps(model, recipe.data.step_separator)
    if not recipe.prm.dropout:
        disable_dropout(model.model)
    fingerprint = inputs_fingerprint(rows, tokenizer, {"base": model.model} if model.has_adapter else {})
    shard_model(model, recipe.devices, role="model")
    inputs = TaskInputs(
        model=model,
        tokenizer=tokenizer,
        examples=examples,
        held_out=held_out,
        config=recipe.prm,
        seed=recipe.run.seed,
        fingerprint=fingerprint,
        notes=(
            *(f"data: {rows.description}", f"training solutions: {report}"),
            *(*evaluation_notes(recipe.data, held_out_report), *cache.notes),
        ),
    )
    return PRMTask(inputs)
