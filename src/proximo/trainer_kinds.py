"""Defines a kind of trainer: one object with everything that is particular to it. Keeps the list of registered kinds.

A kind must be cheap to create, because `proximo --help` creates all of them: its attributes are text, and its methods
import what they need when they are called. `proximo/__init__.py` registers the kinds of Proximo. A trainer of your own
needs one call of `register`, or an entry point (docs/trainers.md). No other file asks which kind a recipe or a run is.

This file imports nothing of Proximo, so code of every layer may use the list. Types are named for type checkers only.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proximo.config.recipe import Recipe, TrainerRecipe
    from proximo.metrics.shared_declarations import TrainerMetrics
    from proximo.plan.stages import StageContext, StageCosts
    from proximo.run.task import Task


RecipeType = TypeVar("RecipeType", bound="TrainerRecipe")


class RecipeKind(ABC):
    """A command that runs a recipe."""

    name: ClassVar[str]
    """The command; for a trainer also the section of its recipe with its training settings."""
    help: ClassVar[str]
    """The text of `proximo NAME --help`; its first line also appears in `proximo --help`."""

    @property
    @abstractmethod
    def schema(self) -> "type[Recipe]":
        """The class of its recipes."""

    def recognises(self, tree: "Mapping[str, Any]") -> bool:
        """Whether the top-level keys of a recipe, which may be invalid, show that it is of this kind."""
        return "model" in tree and self.name in tree


class TrainerKind(RecipeKind, Generic[RecipeType]):
    """A trainer: its recipe, how a task is built from it, its metrics, and the texts about it."""

    title: ClassVar[str]
    """A heading in reports and in docs/metrics.md: `Supervised fine-tuning`."""
    short_title: ClassVar[str]
    """A name for narrow places: `SFT`."""
    task: ClassVar[str]
    """The training as part of a sentence: `supervised fine-tuning`."""
    card_settings: ClassVar[tuple[str, ...]]
    """Keys of the recipe whose values are listed on model cards."""

    @property
    @abstractmethod
    def schema(self) -> type[RecipeType]:
        """The class of its recipes."""

    @property
    @abstractmethod
    def metrics(self) -> "TrainerMetrics":
        """Its metrics, and how they are shown and checked."""

    @abstractmethod
    def build(self, recipe: RecipeType) -> "Task":
        """The task that the run loop drives, with models and data loaded."""

    @abstractmethod
    def dry_run(self, recipe: RecipeType) -> "Iterator[tuple[str, str]]":
        """Lines of `--dry-run` as (label, text), for what would be loaded, created or counted. Imports no torch."""

    @abstractmethod
    def plan(self, recipe: RecipeType, context: "StageContext") -> "StageCosts":
        """Memory and compute of a step. Called under fake tensors, which have shapes but no data."""

    def ineffective_keys(self, recipe: RecipeType, prefix: str) -> "Iterator[str]":
        """One sentence for each key that has no effect, except those of sections that several trainers share."""
        del recipe, prefix
        return iter(())


_registered: dict[str, RecipeKind] = {}


def register(kind: RecipeKind) -> None:
    """Add a kind: it gets its command, and its recipes and runs are recognised.

    Raises TypeError for another object, and ValueError for a name in use.
    """
    if not isinstance(kind, RecipeKind):
        raise TypeError(f"register takes an object of a class below TrainerKind or RecipeKind, got {kind!r:.60}")
    if kind.name in _registered:
        raise ValueError(f"there is a kind of recipe {kind.name!r} already: give this one another name")
    _registered[kind.name] = kind


def recipe_kinds() -> tuple[RecipeKind, ...]:
    """All registered kinds, in the order of registration."""
    return tuple(_registered.values())


def recipe_kind(name: str) -> RecipeKind:
    """The kind with that name. Raises KeyError."""
    return _registered[name]


def trainer_kinds() -> "tuple[TrainerKind[Any], ...]":
    """The registered kinds that train a model."""
    return tuple(kind for kind in _registered.values() if isinstance(kind, TrainerKind))


def trainer_of(recipe: "TrainerRecipe") -> TrainerKind[Any]:
    """The trainer of a recipe: its schema is the recipe's class or else the nearest base of that class.

    Raises LookupError if there is none.
    """
    kinds = {kind.schema: kind for kind in trainer_kinds()}
    for schema in type(recipe).__mro__:
        if schema in kinds:
            return kinds[schema]
    raise LookupError(f"no registered trainer has the recipe {type(recipe).__name__}")


def recognise(tree: "Mapping[str, Any] | None") -> RecipeKind | None:
    """The kind of a recipe, by its top-level keys; None if none or several kinds match.

    Of several matching kinds, one whose own section is in the recipe wins.
    """
    found = [kind for kind in _registered.values() if tree is not None and kind.recognises(tree)]
    named = [kind for kind in found if tree is not None and kind.name in tree]
    matching = named if len(named) == 1 else found
    return matching[0] if len(matching) == 1 else None
