"""Settings that a run saved: read back as they were, and refused where they are not taken."""

import pytest
from pydantic import Field, model_validator

from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.loader import load_recipe, read_saved
from proximo.config.schema.base import Section
from proximo.config.shipped import shipped_recipes
from proximo.errors import RunFolderError


class Inner(Section):
    floor: float = Field(0.1, ge=0)
    name: str = "a"


class Outer(Section):
    epochs: int = 1
    inner: Inner = Inner(name="b")
    either: Inner | None = None
    several: tuple[Inner, ...] = ()

    @model_validator(mode="after")
    def _few(self) -> "Outer":
        if self.epochs > 5:
            raise ValueError("more than 5 epochs are refused")
        return self


def read(saved: dict) -> Outer:
    return read_saved(Outer, saved, saved_by="0.1.0")


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        ({"inner": {"flor": 3}}, r"inner\.flor is not a known key"),
        ({"several": [{}, {"old": None}]}, r"several\.1\.old is not a known key"),
        ({"inner": {"floor": -1.0}}, r"inner\.floor must be greater than or equal to 0"),
        ({"epochs": 6}, r"more than 5 epochs are refused"),
    ],
)
def test_what_is_not_taken_is_refused_with_what_to_do(saved, line):
    with pytest.raises(RunFolderError, match=rf"go on with proximo 0\.1\.0, which saved it, or start a run.*{line}"):
        read(saved)


@pytest.mark.parametrize("shipped", shipped_recipes(), ids=lambda shipped: shipped.name)
def test_what_this_version_saves_it_reads_as_it_was(shipped):
    recipe = load_recipe(shipped.command, shipped.name).recipe
    parts = (recipe.sft, recipe.reward, recipe.ppo) if isinstance(recipe, PipelineRecipe) else (recipe,)
    for stage in (part for part in parts if part is not None):
        saved = stage.model_dump(mode="json")
        assert read_saved(type(stage), saved, saved_by=None).model_dump(mode="json") == saved
