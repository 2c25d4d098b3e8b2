"""Builds the task of `proximo sft` from its recipe. The steps: task.py."""

from collections.abc import Iterator, Sequence
from itertools import chain

from proximo.data.examples import TextExample, load_text_examples
from proximo.data.load_report import LoadReport
from proximo.data.rows import Row
from proximo.models.context_length import check_lengths
from proximo.models.dropout import disable_dropout
from proximo.run.build.conversion import check_optimizer, example_options
from proximo.run.build.data import evaluation_notes, read_split, token_cache
from proximo.run.build.models import build_language_model, build_tokenizer, check_readers, prepare_device
from proximo.run.build.sharding import shard_model
from proximo.run.resume_fingerprint import inputs_fingerprint
from proximo.supervised.sft.recipe import SFTRecipe
from proximo.supervised.sft.task import SFTTask
from proximo.supervised.task import TaskInputs


def build_task(recipe: SFTRecipe) -> SFTTask:
    """Load data, then the model, so that a bad data file fails before any weights are loaded."""
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.sft.optimizer, device_spec.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(
        recipe.tokenizer, model_path=recipe.model.path, revision=recipe.model.revision, texts=texts_of(rows.training)
    )
    check_readers(recipe.tokenizer, tokenizer, {"policy": recipe.model})
    options = example_options(recipe.data)
    examples, report = load_text_examples(rows.training, tokenizer, options, cache=cache)
    held_out: Sequence[TextExample] = []
    held_out_report: LoadReport | None = None
    if rows.held_out:
        held_out, held_out_report = load_text_examples(rows.held_out, tokenizer, options, cache=cache)
    model = build_language_model(recipe.model, tokenizer, device_spec=device_spec)
    longest = max(len(example.token_ids) for example in chain(examples, held_out))
    check_lengths(model.base.config, role="policy", max_prompt_tokens=longest, max_response_tokens=0)
    if not recipe.sft.dropout:
        disable_dropout(model.model)
    fingerprint = inputs_fingerprint(rows, tokenizer, {"base": model.model} if model.has_adapter else {})
    shard_model(model, recipe.devices, role="model")
    inputs = TaskInputs(
        model=model,
        tokenizer=tokenizer,
        examples=examples,
        held_out=held_out,
        config=recipe.sft,
        seed=recipe.run.seed,
        fingerprint=fingerprint,
        notes=(
            *(f"data: {rows.description}", f"training examples: {report}"),
            *(*evaluation_notes(recipe.data, held_out_report), *cache.notes),
        ),
    )
    return SFTTask(inputs, held_out_characters=held_out_report.num_characters if held_out_report else 0)


def texts_of(rows: Sequence[Row]) -> Iterator[str]:
    """All text of the rows, for training a tokenizer."""
    for row in rows:
        for value in row.values.values():
            yield from _texts(value)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))
