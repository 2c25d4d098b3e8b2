"""What one trainer is stands in its own files: nobody else asks of which kind a recipe, a task or a run is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import proximo
from proximo import trainer_kinds as registry
from proximo.trainer_kinds import RecipeKind, recipe_kind, recipe_kinds, recognise, trainer_kinds, trainer_of

SOURCE = Path(proximo.__file__).parent
NAMES = {kind.name for kind in recipe_kinds()}
CLASSES = {name for kind in recipe_kinds() for name in (kind.schema.__name__, type(kind).__name__)}
OBJECTS = (
    CLASSES
    | {kind.name.upper() for kind in recipe_kinds()}
    | {"SFTTask", "RewardTask", "DPOTask", "KTOTask", "PPOTask"}
)
OWN = ("ppo", "supervised", "commands/pipeline", "__init__.py")
"""The files of the trainers, and the one that registers them."""


def test_no_other_file_switches_on_the_kind_of_a_trainer() -> None:
    switches = [
        f"{path}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not str(path.relative_to(SOURCE)).startswith(OWN)
        for line in switches_in(path.read_text(encoding="utf-8"))
    ]
    assert not switches


def switches_in(text: str) -> Iterator[int]:
    """The lines of comparisons, matches, unions, tables and lists of kinds, of their names or of their classes."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
                found = any(is_kind(part) for part in ast.walk(classes))
            case ast.Match():
                patterns = [part for case in node.cases for part in ast.walk(case.pattern)]
                found = any(isinstance(part, ast.MatchClass) and is_kind(part.cls) for part in patterns)
                found |= several([part.value for part in patterns if isinstance(part, ast.MatchValue)])
            case ast.Compare():
                found = any(is_kind(part) for part in (node.left, *node.comparators))
            case ast.BinOp(op=ast.BitOr()):
                found = is_kind(node.left) and is_kind(node.right)
            case ast.Dict():
                found = several([key for key in node.keys if key]) or several(node.values)
            case ast.Tuple() | ast.List() | ast.Set():
                found = several(node.elts)
            case _:
                found = False
        if found:
            yield node.lineno  # ty: ignore[unresolved-attribute]


def is_kind(node: ast.AST) -> bool:
    """An object or a class that only one kind of recipe has."""
    return (isinstance(node, ast.Name) and node.id in OBJECTS) or (
        isinstance(node, ast.Attribute) and node.attr in CLASSES
    )


def several(nodes: list[ast.expr]) -> bool:
    """Two kinds or more, by name or themselves."""
    return sum(is_kind(node) or (isinstance(node, ast.Constant) and node.value in NAMES) for node in nodes) > 1


@pytest.mark.parametrize(
    "switch",
    [
        "isinstance(recipe, PPORecipe)",
        "isinstance(recipe, recipes.SFTRecipe | recipes.DPORecipe)",
        "match recipe:\n    case SFTRecipe(): pass",
        "match kind:\n    case 'sft': pass\n    case 'dpo': pass",
        "run.trainer is PPO",
        "Stage = SFTRecipe | RewardRecipe",
        "TITLES = {SFT: 'SFT', PPO: 'PPO'}",
        "STAGES = ('sft', 'reward', 'ppo')",
    ],
)
def test_a_switch_is_found(switch: str) -> None:
    assert list(switches_in(switch))


LATE = (
    "proximo.distributed",
    "proximo.metrics.report.plots",
    "proximo.models.attention.cache",
    "proximo.models.backbone",
    "proximo.models.fast_path",
)
"""What files above import late, since it imports torch.distributed, matplotlib or the models of transformers."""


def test_types_are_named_upwards_in_the_declaration_of_kinds_alone() -> None:
    """import-linter passes over imports for type checkers, which only few files have of the package itself."""
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for part in node.body
        if isinstance(part, ast.ImportFrom) and (part.module or "").startswith("proximo")
        if not (part.module or "").startswith(LATE)
    }
    allowed = {"trainer_kinds.py", "__init__.py"}
    # Rows are read without torch, which the records import.
    allowed |= {f"data/formats/{name}.py" for name in ("typed_columns", "prompt_response", "transcripts", "messages")}
    allowed.add("data/templates/ignored_content.py")
    # These name what is below them, which loads torch or transformers.
    allowed |= {"config/ppo/advantage.py", "rollout/engine.py", "environments/tool_calls.py"}
    # A session is made of what its engine has, and imported with the first one.
    allowed.add("rollout/local.py")
    # Of what is above commands/, cli/ is arguments alone and api.py lists names: neither has a type to name.
    may, kinds = ("cli/", "commands/"), ("/kind.py", "/kinds.py")
    assert not {path for path in found - allowed if not path.startswith(may) and not path.endswith(kinds)}


def test_a_kind_is_found_by_its_name_its_recipe_and_the_keys_of_one() -> None:
    for kind in trainer_kinds():
        assert recipe_kind(kind.name) is kind
        assert trainer_of(kind.schema.model_construct()) is kind
        own = type("Own", (kind.schema,), {})
        assert trainer_of(own.model_construct()) is kind
    assert recognise({"model": {}, "sft": {}}) is recipe_kind("sft")
    assert recognise({"model": {}, "reward": []}) is recipe_kind("ppo")
    assert recognise({"ppo": {"model": {}}, "sft": {"model": {}}}) is recipe_kind("pipeline")
    assert recognise({"model": {}, "sft": {}, "dpo": {}}) is None
    assert recognise({"run": {}}) is None
    assert recognise(None) is None


def test_of_kinds_that_claim_a_recipe_the_one_whose_section_is_in_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(RecipeKind):
        name = "other"
        help = "A trainer of somebody else, whose recipe lists rewards as that of PPO."
        schema = recipe_kind("ppo").schema

        def recognises(self, tree):
            return "reward" in tree

    other = Other()
    monkeypatch.setitem(registry._registered, "other", other)
    tree = {"model": {}, "reward": []}
    assert recognise(tree | {"other": {}}) is other
    assert recognise(tree | {"ppo": {}}) is recipe_kind("ppo")
    assert recognise(tree) is None
