"""What a kind of trainer is: one object with all that is particular to it, and the list of those that there are.

A kind is light, since `proximo --help` makes every one of them: its attributes are words, and its methods import what
they need when they are called. `proximo/__init__.py` registers the kinds of Proximo; a trainer of your own is one more
call of `register`, or an entry point (docs/trainers.md). No other file asks of which kind a recipe or a run is.

This file imports nothing, so that code of every layer may read the list; types are named for type checkers only.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proximo.config.recipe import Recipe, TrainerRecipe
    from proximo.metrics.trainer_metrics import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.run.task import Task


class RecipeKind(ABC):
    """A command that runs a recipe."""

    name: ClassVar[str]
    """The command. Of a trainer also the section of its recipe that says how it learns."""
    help: ClassVar[str]
    """What `proximo NAME --help` says; its first line also stands in `proximo --help`."""

    @property
    @abstractmethod
    def schema(self) -> "type[Recipe]":
        """What a recipe of this kind may hold."""

    def recognises(self, tree: "Mapping[str, Any]") -> bool:
        """Whether the first level of keys of a recipe says that it is of this kind. The recipe may have mistakes."""
        return "model" in tree and self.name in tree


class TrainerKind(RecipeKind):
    """A trainer: its recipe, how a task is built from it, what it measures, and what is said about it."""

    title: ClassVar[str]
    """`Supervised fine-tuning`: heads its part of a report and of docs/metrics.md."""
    short_title: ClassVar[str]
    """`SFT`: where there is little room."""
    task: ClassVar[str]
    """`supervised fine-tuning`, within a sentence: what the model went through."""
    card_settings: ClassVar[tuple[str, ...]]
    """Keys of the recipe whose values a model card lists."""
    card_limits: ClassVar[str]
    """What a model card says about what such a training cannot do."""

    @property
    @abstractmethod
    def schema(self) -> "type[TrainerRecipe]":
        """What a recipe of this trainer may hold."""

    @property
    @abstractmethod
    def metrics(self) -> "TrainerMetrics":
        """What it measures, and how that is shown and judged."""

    @abstractmethod
    def build(self, recipe: Any) -> "Task":
        """The task that the loop drives: models, data and everything else loaded."""

    @abstractmethod
    def dry_run(self, recipe: Any) -> "Iterator[tuple[str, str]]":
        """(word, what it is) for each thing that would be loaded, made or counted. Imports no torch."""

    @abstractmethod
    def plan(self, recipe: Any, context: "StageContext") -> "StageCosts":
        """The models and the passes of a step, without weights. Called where tensors have shapes and no numbers."""

    def ineffective_keys(self, recipe: Any, prefix: str) -> "Iterator[str]":
        """One sentence for each key of its own that is given and does nothing. Those of shared sections are found
        without it.
        """
        del recipe, prefix
        return iter(())


_registered: dict[str, RecipeKind] = {}


def register(kind: RecipeKind) -> None:
    """From now on `kind` has its command, and its recipes and runs are known.

    Raises TypeError for another object, and ValueError for a name in use.
    """
    if not isinstance(kind, RecipeKind):
        raise TypeError(f"register takes an object of a class below TrainerKind or RecipeKind, got {kind!r:.60}")
    if kind.name in _registered:
        raise ValueError(f"there is a kind of recipe {kind.name!r} already: give this one another name")
    _registered[kind.name] = kind


def recipe_kinds() -> tuple[RecipeKind, ...]:
    """All that are registered, in that order."""
    return tuple(_registered.values())


def recipe_kind(name: str) -> RecipeKind:
    """The one of that name. Raises KeyError."""
    return _registered[name]


def trainer_kinds() -> tuple[TrainerKind, ...]:
    """Those that train."""
    return tuple(kind for kind in _registered.values() if isinstance(kind, TrainerKind))


def trainer_of(recipe: "TrainerRecipe") -> TrainerKind:
    """The trainer that a recipe is for. Raises LookupError where none is registered."""
    for kind in trainer_kinds():
        if isinstance(recipe, kind.schema):
            return kind
    raise LookupError(f"no registered trainer has the recipe {type(recipe).__name__}")


def recognise(tree: "Mapping[str, Any] | None") -> RecipeKind | None:
    """The kind that a recipe is of, by its first level of keys; None where they do not tell."""
    found = [kind for kind in _registered.values() if tree is not None and kind.recognises(tree)]
    return found[0] if len(found) == 1 else None
