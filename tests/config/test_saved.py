"""Settings of a run that an earlier version saved: what was not there yet, and what is not there any more."""

from typing import Annotated

import pytest
from pydantic import Field, model_validator

from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.loader import load_recipe
from proximo.config.saved import read_saved
from proximo.config.schema.base import AbsentMeans, Section
from proximo.config.shipped import shipped_recipes
from proximo.errors import RunFolderError


class Inner(Section):
    floor: Annotated[float, AbsentMeans(0.0)] = Field(0.1, ge=0)
    name: str = "a"


class Later(Section):
    epochs: int = 1
    inner: Inner = Inner(name="b")
    either: Inner | None = None
    several: tuple[Inner, ...] = ()

    @model_validator(mode="after")
    def _few(self) -> "Later":
        if self.epochs > 5:
            raise ValueError("more than 5 epochs are refused now")
        return self


def read(saved: dict) -> Later:
    return read_saved(Later, saved, saved_by="0.1.0")


def test_what_was_not_there_yet_has_its_default_or_what_its_absence_meant():
    assert read({"inner": {"name": "c"}}) == Later(inner=Inner(floor=0.0, name="c"))
    assert read({"inner": {"name": "c"}}).epochs == 1


def test_a_section_that_was_not_there_at_all_likewise_and_keeps_the_defaults_of_its_place():
    assert read({}) == Later(inner=Inner(floor=0.0, name="b"))


def test_sections_in_lists_and_beside_null_likewise():
    found = read({"either": {}, "several": [{"name": "c"}, {"floor": 0.5}]})
    assert found.either == Inner(floor=0.0)
    assert found.several == (Inner(floor=0.0, name="c"), Inner(floor=0.5))
    assert read({}).either is None


def test_a_value_that_was_saved_stays():
    assert read({"inner": {"floor": 0.3}}).inner.floor == 0.3


def test_a_recipe_has_its_default_and_not_what_absence_meant():
    assert Later.model_validate({"inner": {"name": "c"}}).inner.floor == 0.1


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        ({"inner": {"flor": 3}}, r"  inner\.flor \(saved as 3\): there is no such setting any more"),
        ({"several": [{}, {"old": None}]}, r"  several\.1\.old \(saved as null\): there is no such setting any more"),
        ({"inner": {"floor": -1.0}}, r"  inner\.floor: Input should be greater than or equal to 0"),
        ({"epochs": 6}, r"  more than 5 epochs are refused now"),
    ],
)
def test_what_is_no_longer_taken_is_refused_with_what_to_do(saved, line):
    with pytest.raises(
        RunFolderError, match=rf"\n{line}\n  go on with proximo 0\.1\.0, which saved it, or start a run"
    ):
        read(saved)


@pytest.mark.parametrize("shipped", shipped_recipes(), ids=lambda shipped: shipped.name)
def test_what_this_version_saves_it_reads_as_it_was(shipped):
    recipe = load_recipe(shipped.command, shipped.name).recipe
    parts = (recipe.sft, recipe.reward, recipe.ppo) if isinstance(recipe, PipelineRecipe) else (recipe,)
    for stage in (part for part in parts if part is not None):
        saved = stage.model_dump(mode="json")
        assert read_saved(type(stage), saved, saved_by=None).model_dump(mode="json") == saved
