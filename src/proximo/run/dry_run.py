"""Lines of a dry run that several trainers share: models, data, passes over data. Imports no torch.

A line is a word and its description; a line without a word continues the one before.
"""

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from proximo.checkpoint.run_folder import TENSORBOARD, described_run, is_run_folder
from proximo.config.data import DataConfig
from proximo.config.recipe import TrainerRecipe
from proximo.config.run import ModelConfig, RunConfig, ScalarModelConfig, TokenizerConfig
from proximo.data.formats.prompt_response import Exchange, in_form, no_template
from proximo.data.load_report import Remark, remark_lines
from proximo.data.rows import Row, check_row_ids
from proximo.errors import ModelError
from proximo.hub import UNNAMED_TOKENIZER
from proximo.message_text import count_of
from proximo.models.pretrained.folders import lacks_chat_template, tokenizer_place
from proximo.run.make.data import SplitRows, read_split
from proximo.run.preflight import data_inputs, model_input
from proximo_verifiers.grader import num_cores

MOST_BYTES = 256 * 2**20
MOST_ROWS = 100_000
"""Rows of larger data, in files or given in Python, are not read."""
RowReader = Callable[[Iterable[Row], Counter[Remark]], Iterator[Any]]
"""Reads rows as a trainer does, without tokens, and counts in remarks what it does not use. Raises DataError for rows
that it cannot read."""
Line = tuple[str, str]


def stage_warnings(stage: TrainerRecipe) -> Iterator[str]:
    """Warnings about more threads than cores, and about adapters that train no rows of added tokens."""
    if (stage.run.num_threads or 0) > num_cores():
        yield (
            f"run.num_threads is {stage.run.num_threads}, more than the {num_cores()} cores that this process may use: "
            "threads that wait for each other slow a run down many times; lower it, or leave it out"
        )
    tokenizers = [section for section in stage.sections().values() if isinstance(section, TokenizerConfig)]
    added = [token for section in tokenizers for token in section.added_tokens]
    for key, model in stage.models().items():
        if added and model.lora is not None:
            yield (
                f"{key}.lora trains no embedding: the rows of {', '.join(added[:3])} stay as they start, nearly equal, "
                "so that the model cannot distinguish new tokens; train the whole model, or start from one that knows "
                "them"
            )


def run_lines(run: RunConfig) -> Iterator[Line]:
    """The run folder, the device, the checkpoints, the sinks and the push."""
    yield "run", f"{run.folder} ({_state(Path(run.folder))}), seed {run.seed}, {run.device}, {run.precision}"
    minutes = f"every {count_of(run.save_every_minutes, 'minute')}" if run.save_every_minutes is not None else None
    regular = ", ".join(filter(None, [_every(run.save_every_steps), minutes]))
    yield "saves", f"{regular} and after the last" if regular else "after the last step"
    if run.tensorboard:
        yield "sink", f"TensorBoard, in {Path(run.folder) / TENSORBOARD}"
    for sink in run.sinks:
        yield "sink", f"{sink.label}, run {sink.name or run.folder}"
    if run.push is not None:
        yield "push", f"to {run.push.name} on the Hub, private if it is new, at each {run.push.when}"


def rank_lines(recipe: TrainerRecipe) -> Iterator[Line]:
    """The ranks that the command starts, and how each model is placed on them."""
    devices = recipe.devices
    if (devices.num or 1) == 1:
        return
    roles = dict.fromkeys(placed.role for placed in recipe.placed_roles())
    shards = ", ".join(f"{role} {devices.shard_of(role)}" for role in roles)
    yield "ranks", f"{devices.num} on this machine; {shards}"


def _every(steps: int | None) -> str | None:
    return None if steps is None else "every step" if steps == 1 else f"every {steps:,} steps"


def _state(folder: Path) -> str:
    if not is_run_folder(folder):
        return "new" if not folder.exists() else "exists"
    return described_run(folder)


def describe_model(model: ModelConfig | ScalarModelConfig) -> str:
    """The path or architecture that the model starts from."""
    return str(model_input(model, "model"))


def text_config(model: ModelConfig | ScalarModelConfig) -> Mapping[str, Any]:
    """The model's config.json, of text alone; empty if it is on the Hub, unreadable, or beside an adapter."""
    config: Any = model.config or {}
    if model.path is not None:
        folder = Path(model.path).expanduser()
        if (folder / "adapter_config.json").exists():  # the run reads that of its base
            return {}
        try:
            config = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError):
            return {}
    return (config.get("text_config") or config) if isinstance(config, Mapping) else {}


def trained_part(model: ModelConfig | ScalarModelConfig) -> str:
    """Which part of a model is trained: all of it, its upper layers, or an adapter."""
    lora = model.lora
    if lora is None:
        return f"all but its first {model.frozen_layers} layers trained" if model.frozen_layers else "trained whole"
    targets = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    stored = "" if model.quantisation == "none" else f", its base in {model.quantisation}"
    return f"LoRA of rank {lora.rank} on {targets}{stored}"


def describe_reference(policy: ModelConfig, reference: ModelConfig | None) -> str:
    """The model that the KL divergence is measured against."""
    if reference is not None:
        return f"{describe_model(reference)}, frozen"
    return "a frozen copy of the policy" if policy.lora is None else "the policy's base, no second copy"


def data_lines(
    recipe: TrainerRecipe, data: DataConfig, reader: RowReader | None = None
) -> Generator[Line, None, int | None]:
    """The sources, the split that this stage uses, and when it is evaluated. Returns the rows to learn from, if known.

    `reader`: the reader of the run. The rows of small local files are then read, without torch.
    """
    for each in data_inputs(data, "data"):
        yield "evaluation" if ".evaluation_sources." in f".{each.key}" else "data", str(each)
    if data.proportions is not None and data.phase is not None:
        part = data.proportions[data.phase] / sum(data.proportions)
        yield "", f"part {data.phase} of {len(data.proportions)}: {part:.0%} of the rows"
    rows = _rows_of(data, seed=recipe.run.seed)
    if rows is not None:
        learned = count_of(len(rows.training), "row")
        yield "", f"{learned} to learn from, {len(rows.held_out):,} to evaluate on{rows.bounded}"
        yield from (("", line) for line in _remarks(rows, recipe, data, reader))
    elif data.held_out_rows:
        yield "", f"at most {count_of(data.held_out_rows, 'row')} held out for evaluation"
    if data.held_out_rows or data.evaluation_sources is not None:
        regular = _every(recipe.run.evaluate_every_steps)
        yield "evaluates", f"before the first step{f', {regular}' if regular else ''} and after the last"
    return None if rows is None else len(rows.training)


def _rows_of(data: DataConfig, *, seed: int) -> SplitRows | None:
    """The rows of small local files or given in Python, otherwise None. Raises DataError as the run would."""
    inputs = [each for each in data_inputs(data, "data") if not each.problem]
    files = [Path(each.name).expanduser() for each in inputs if each.kind == "file"]
    given = [each.num_rows for each in inputs if each.num_rows is not None]
    sources = (*data.sources, *(data.evaluation_sources or ()))
    if len(files) + len(given) < len(sources) or sum(given) > MOST_ROWS:
        return None
    if sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None
    return read_split(data, seed=seed)


def _remarks(rows: SplitRows, recipe: TrainerRecipe, data: DataConfig, reader: RowReader | None) -> Iterator[str]:
    """The remarks of the run on its rows. Raises the error of a row that it would refuse."""
    if reader is None:
        return
    without = _without_template(recipe)
    learned, held_out = (_read_as_the_run(each, data, reader, without) for each in (rows.training, rows.held_out))
    yield from learned
    if data.evaluation_sources is not None:  # otherwise held-out rows come from the same sources
        yield from (f"evaluation rows: {line}" for line in held_out)


def _read_as_the_run(rows: Sequence[Row], data: DataConfig, reader: RowReader, without: str | None) -> list[str]:
    """`without`: the name of a tokenizer that has no chat template."""
    check_row_ids(rows)
    remarks: Counter[Remark] = Counter()
    for made in reader(rows, remarks):
        for exchange in in_form(_exchanges_of(made), to_messages=data.as_messages, system=data.system):
            if without is not None and not isinstance(exchange.prompt, str):
                raise ModelError(no_template(exchange.origin, without))
    return [*remark_lines(remarks)]


def _without_template(recipe: TrainerRecipe) -> str | None:
    """The tokenizer, if it is known to have no chat template without being loaded; else None."""
    config, model = recipe.sections().get("tokenizer"), recipe.models().get("model")
    if not isinstance(config, TokenizerConfig) or config.chat_template is not None:
        return None
    if config.train_vocab_size is not None:
        return UNNAMED_TOKENIZER
    path = config.path or (model.path if model is not None else None)
    if path is None or not Path(path).is_dir():
        return None
    place, _ = tokenizer_place(path)
    return place if lacks_chat_template(Path(place)) else None


def _exchanges_of(made: Any) -> list[Exchange]:
    """The exchanges in a reader's result for a row: one, a mapping, a tuple with other values, or none."""
    parts = made.values() if isinstance(made, Mapping) else made if isinstance(made, tuple) else (made,)
    return [part for part in parts if isinstance(part, Exchange)]


def epoch_lines(batch: str, num_epochs: float, what: str, max_tokens: int) -> Iterator[Line]:
    """The batch, epochs and lengths of a trainer that takes one update per step."""
    yield "one step", f"{batch}, one update"
    passes = count_of(num_epochs, "pass", "passes")
    yield "whole run", f"{passes} over the data, {what} of at most {max_tokens:,} tokens"
