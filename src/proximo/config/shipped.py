"""Looks up the recipes that come with the package, which are the YAML files in recipes/."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from proximo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShippedRecipe:
    """A recipe of the package."""

    name: str
    text: str

    @property
    def summary(self) -> str:
        """The text of its first line, a comment `# COMMAND: what it is for`."""
        return self.text.partition("\n")[0].lstrip("# ")

    @property
    def command(self) -> str:
        """The command that the recipe is for."""
        return self.summary.partition(":")[0]


def shipped_recipes() -> tuple[ShippedRecipe, ...]:
    """All shipped recipes, sorted by name."""
    folder = files("proximo") / "recipes"
    places = (folder, *(folder / name for name in ("games", "presets", "pretrained", "process", "verifiable", "vllm")))
    entries = [entry for place in places for entry in place.iterdir()]
    entries = sorted((entry for entry in entries if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return tuple(
        ShippedRecipe(name=entry.name.removesuffix(".yaml"), text=entry.read_text(encoding="utf-8"))
        for entry in entries
    )


def shipped_recipe(name: str) -> ShippedRecipe:
    """The shipped recipe of that name. Raises ConfigError with the known names if there is none."""
    recipes = {recipe.name: recipe for recipe in shipped_recipes()}
    if name not in recipes:
        raise ConfigError(
            f"no recipe {name}. Shipped recipes: {', '.join(recipes)}. A recipe of your own goes by its path, which "
            "ends in .yaml"
        )
    return recipes[name]


def is_shipped_name(path_or_name: str) -> bool:
    """Whether the text is a recipe name: it has no folder and no file extension, and is no file of this folder."""
    if "/" in path_or_name or path_or_name.endswith((".yaml", ".yml", ".json")):
        return False
    return path_or_name in {recipe.name for recipe in shipped_recipes()} or not Path(path_or_name).is_file()
