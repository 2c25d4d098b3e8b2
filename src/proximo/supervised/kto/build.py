"""Builds the task of `proximo kto` from its recipe. The steps: task.py."""

from collections.abc import Sequence
from itertools import chain

from proximo.config.data import LabelledDataConfig
from proximo.data.labelled import LabelledOptions, LabelledResponse, load_labelled_responses
from proximo.data.load_report import LoadReport
from proximo.errors import DataError
from proximo.run.build.conversion import check_optimizer
from proximo.run.build.data import evaluation_notes, read_split, token_cache
from proximo.run.build.models import build_tokenizer, check_readers, prepare_device
from proximo.supervised.kto.label_balance import ADVISED, label_balance
from proximo.supervised.kto.recipe import KTOConfig, KTORecipe
from proximo.supervised.kto.task import KTOTask
from proximo.supervised.reference_models import build_policy_and_reference, check_prompts
from proximo.supervised.task import TaskInputs


def build_task(recipe: KTORecipe) -> KTOTask:
    """Load data, then models, so that a bad data file fails before any weights are loaded."""
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    check_optimizer(recipe.kto.optimizer, device_spec.device)
    rows = read_split(recipe.data, seed=recipe.run.seed)
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=recipe.model.path, revision=recipe.model.revision)
    check_readers(recipe.tokenizer, tokenizer, {"policy": recipe.model, "reference": recipe.reference})
    options = labelled_options(recipe.data)
    training, report = load_labelled_responses(rows.training, tokenizer, options, cache=cache)
    held_out: Sequence[LabelledResponse] = []
    held_out_report: LoadReport | None = None
    if rows.held_out:
        held_out, held_out_report = load_labelled_responses(rows.held_out, tokenizer, options, cache=cache)
    check_prompts(chain(training, held_out), "answers")
    balance = _balance_note(training, recipe.kto)
    longest = max(row.num_tokens for row in chain(training, held_out))
    if recipe.kto.reference_point == "kl":  # a prompt also meets the answer to another one
        prompt = max(len(row.prompt_token_ids) for row in chain(training, held_out))
        answer = max(len(row.response_token_ids) for row in chain(training, held_out))
        longest = min(recipe.data.max_tokens, prompt + answer)
    models = build_policy_and_reference(recipe, tokenizer, rows, longest=longest, device_spec=device_spec)
    inputs = TaskInputs(
        model=models.policy,
        tokenizer=tokenizer,
        examples=training,
        held_out=held_out,
        config=recipe.kto,
        seed=recipe.run.seed,
        fingerprint=models.fingerprint,
        notes=(
            *(f"data: {rows.description}", f"training answers: {report}", balance),
            *(*evaluation_notes(recipe.data, held_out_report), *cache.notes),
        ),
    )
    return KTOTask(inputs, reference=models.reference, max_tokens=recipe.data.max_tokens)


def labelled_options(data: LabelledDataConfig) -> LabelledOptions:
    """How rows become labelled answers."""
    return LabelledOptions(
        form=data.form,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        as_messages=data.as_messages,
        system=data.system,
    )


def _balance_note(training: Sequence[LabelledResponse], config: KTOConfig) -> str:
    """How many answers have which label, and advice if one weighs too much.

    Raises DataError if all have the same label.
    """
    num_desirable = sum(example.desirable for example in training)
    num_undesirable = len(training) - num_desirable
    if not num_desirable or not num_undesirable:
        label, other = ("true", "false") if num_desirable else ("false", "true")
        raise DataError(
            f"all {len(training):,} training answers are labelled {label}, and KTO learns from both labels: add "
            f"answers labelled {other}, or fine-tune on good answers with `proximo sft`"
        )
    ratio = label_balance(num_desirable, num_undesirable, config.desirable_weight, config.undesirable_weight)
    note = f"labels: {num_desirable:,} desirable, {num_undesirable:,} undesirable; by weight {ratio:.3g} to 1"
    low, high = ADVISED
    if low <= ratio <= high:
        return note
    weight = "undesirable_weight" if ratio > high else "desirable_weight"
    factor = ratio / high if ratio > high else low / ratio
    return (
        f"{note}. {low:g} to {high:.2f} is advised: set kto.{weight} to "
        f"{getattr(config, weight) * factor:.3g} or so (docs/kto.md)"
    )
