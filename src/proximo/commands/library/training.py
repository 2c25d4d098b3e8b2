"""Runs a recipe from a Python program, as `proximo sft`, `reward`, `dpo`, `kto`, `ppo` and `pipeline` do."""

import json
import re
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from proximo import session_functions
from proximo.commands.checked_recipe import check_start, checked
from proximo.commands.library.objects import GivenObjects
from proximo.commands.library.saved_run import SavedRun
from proximo.errors import ConfigError, ProximoError
from proximo.run.options import RunOptions
from proximo.trainer_kinds import recipe_kinds
from proximo.user_code import functions_of_the_working_directory
from proximo_verifiers.callables import calling_problem

if TYPE_CHECKING:
    from proximo.config.recipe import Recipe
    from proximo.config.schema.positioned_yaml import Document
    from proximo.plan.record import Plans


OPTION = re.compile(r"(?<![\w-])--(resume=auto|resume|overwrite|allow-different-environment|allow-changed-rewards)\b")
"""An option of the commands that is an argument of `Training.fit`."""


class Training:
    """A recipe that is ready to run. The commands run the same code, so a run has the same bits as theirs.

    Training("ppo.yaml", {"run.seed": 1, "reward.0.function": score}).fit()
    """

    def __init__(
        self, recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, quiet: bool = False
    ) -> None:
        """Check the recipe as the commands do: everything that needs no model and no data set.

        `recipe`: a YAML file, the name of a shipped recipe, or a mapping of the same form. `overrides`: dotted key ->
        value. In the mapping and in the values, objects may replace text: a function where a recipe names one
        by its import path; rows (a list of dicts, a `datasets.Dataset`, any iterable that can be read again) where it
        has a data source; as `reward` a function, a source, or a list of them and of pairs (weight, source); as an item
        of `run.sinks` a `Sink`, or a function that makes one.
        `quiet`: print no notes about keys without effect.

        Raises ConfigError with all mistakes.
        """
        if not isinstance(recipe, str | Path | Mapping):
            raise ConfigError(f"a recipe is a file, the name of a shipped one, or a mapping, got {recipe!r:.60}")
        if not isinstance(overrides or {}, Mapping) or not all(isinstance(key, str) for key in overrides or {}):
            raise ConfigError(
                f"overrides are a mapping from dotted keys to values, such as {{'run.seed': 1}}, got {overrides!r:.60}"
            )
        self._objects = GivenObjects()
        values = {key: self._objects.plain(value, key) for key, value in (overrides or {}).items()}
        texts = [f"{key}={_override_text(key, value)}" for key, value in values.items()]
        from proximo.config.loader import kind_of, read_document

        document = read_document(str(recipe)) if isinstance(recipe, str | Path) else self._document(recipe)
        with self._ready():
            loaded = checked(kind_of(document), document, texts, quiet=quiet)
        self.recipe: Recipe = loaded.recipe
        self._text = loaded.text

    def __repr__(self) -> str:
        kind = next((each.name for each in recipe_kinds() if each.schema is type(self.recipe)), "own")
        return f"Training({kind}, run.folder={self.recipe.run.folder!r})"

    def fit(
        self,
        *,
        resume: Literal["never", "must", "auto"] = "never",
        overwrite: bool = False,
        allow_different_environment: bool = False,
        allow_changed_rewards: bool = False,
        quiet: bool = False,
        on_step: Callable[[int, Mapping[str, float]], Any] | None = None,
    ) -> SavedRun:
        """Train to the end in the run folder, and return the run.

        `resume="must"` continues the run in the folder; `"auto"`, best for notebooks, also starts one, and does nothing
        if it is finished. `allow_changed_rewards` continues with a reward that has changed, and
        `allow_different_environment` on another machine (docs/checkpoint.md). `on_step` gets the number and the metrics
        of each step. An exception in it ends the run; a resume continues from the last checkpoint.

        Raises KeyboardInterrupt after an interrupt, which ended the step and saved, or after a second one, which did
        not; SystemExit after another signal.
        """
        if on_step is not None and (problem := calling_problem(on_step, [1, {}], names=("number", "metrics"))):
            raise ConfigError(f"on_step is called as on_step(number, metrics) after each step, but {problem}")
        options = RunOptions(
            resume=resume,
            overwrite=overwrite,
            allow_different_environment=allow_different_environment,
            allow_changed_rewards=allow_changed_rewards,
            quiet=quiet,
            recipe_text=self._text,
            on_step=on_step,
            keeps_process=True,
        )
        with self._ready():
            self._check_ranks()
            check_start(self.recipe, options)
            from proximo.commands.pipeline.run import run_recipe

            status = run_recipe(self.recipe, options)
        if status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(f"saved in {self.recipe.run.folder}: continue with fit(resume='auto')")
        if status:
            raise SystemExit(status)
        return self.run

    @property
    def run(self) -> SavedRun:
        """The run in the folder of the recipe, which may be unfinished. Raises RunFolderError if there is none."""
        return SavedRun(self.recipe.run.folder, functions=self._objects.functions)

    def plan(self) -> "Plans":
        """Memory and compute of a step of each stage, on this kind of device, as a list that prints as a table."""
        from proximo.plan.machine import device_kind
        from proximo.plan.profiling import make_plans
        from proximo.plan.record import Plans

        device = device_kind(self.recipe.run)
        return Plans(make_plans(self.recipe, device=device, num_ranks=self.recipe.num_ranks))

    def dry_run(self) -> str:
        """What `--dry-run` prints: what would be loaded, created and counted."""
        from proximo.commands.dry_run import describe

        with self._ready():
            return _in_python(describe(self.recipe))

    @contextmanager
    def _ready(self) -> Generator[None]:
        session_functions.publish(self._objects.functions)
        with functions_of_the_working_directory():
            try:
                yield
            except ProximoError as error:
                error.args = tuple(_in_python(each) if isinstance(each, str) else each for each in error.args)
                raise

    def _check_ranks(self) -> None:
        from proximo.distributed.world import current

        wanted, size = self.recipe.num_ranks, current().size
        if wanted not in (1, size):
            raise ConfigError(
                f"devices.num is {wanted}, but this program runs on {size}: start it with torchrun "
                f"--nproc-per-node={wanted} and call fit inside `with proximo.join():`, or use the command"
            )

    def _document(self, tree: Mapping[str, Any]) -> "Document":
        from proximo.config.schema.positioned_yaml import as_yaml, parse_document

        return parse_document(as_yaml(self._objects.plain(tree)), "the recipe")


def _in_python(text: str) -> str:
    """A text for the command line, with its options as arguments of `fit`."""

    def argument(option: re.Match[str]) -> str:
        name, _, value = option[1].replace("-", "_").partition("=")
        return f'fit(resume="{value or "must"}")' if name == "resume" else f"fit({name}=True)"

    return OPTION.sub(argument, text)


def _override_text(key: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the override of {key} is not a plain value: {error}") from error
