"""Measures the size of the project and prints it beside its limits: `make house`.

    python tests/house/budgets.py            # what, now, limit, target
    python tests/house/budgets.py --lower    # write each limit that today's figures allow to lower

The limits are in limits.json. A limit is what the test holds; a target is what the limit is to become.
"""

import ast
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("limits.json")
PACKAGES = ("proximo", "proximo_verifiers", "proximo_cpu", "proximo_cuda")
TESTS_OF_PACKAGES = ("verifiers", "cpu", "cuda")
FOR_DEVELOPERS = ("architecture.md", "parity.md", "ppo-formulas.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Pages that may name sources and tests."""
PATH = re.compile(r"\b(?:[\w-]+/)+[\w-]+\.py\b|\b(?:src|tests)/[\w/.-]+")
WORD = re.compile(r"\S*[^\W_]\S*")
"""Text between white space with a letter or a digit: no bar of a table, no dash."""
NAMED_KEY = re.compile(r"(\w+)\\?[\"']?\s*[=:]")
"""A keyword argument, a key of a mapping or of an override in the text of a program."""
SLACK = 0.01
"""The part of a figure by which `--lower` leaves it free to grow."""
AT_LEAST = "share of docstring lines (at least)"


def quick_figures() -> dict[str, float]:
    """What -> its figure today, of all that can be counted without a run."""
    sources, tests = python_files(ROOT / "src"), python_files(ROOT / "tests")
    packages = {name: python_files(ROOT / "src" / name) for name in PACKAGES}
    of_packages = [path for name in TESTS_OF_PACKAGES for path in python_files(ROOT / "tests" / name)]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for_users = [path for path in pages if path.name not in FOR_DEVELOPERS]
    return {
        "src: lines": lines(sources),
        "src: files": len(sources),
        **{f"src/{name}: lines": lines(files) for name, files in packages.items()},
        **{f"src/{name}: files": len(files) for name, files in packages.items()},
        "longest file (lines)": max(lines([path]) for path in sources),
        "longest function (lines)": max(length for path in sources for length in function_lengths(path)),
        AT_LEAST: round(sum(map(docstring_lines, sources)) / sum(map(filled_lines, sources)), 3),
        "benchmarks and examples: lines": lines(python_files(ROOT / "benchmarks") + python_files(ROOT / "examples")),
        "tests of the core: lines": lines(tests) - lines(of_packages),
        "tests of the other packages: lines": lines(of_packages),
        "docs: words": sum(words(path) for path in pages),
        "docs for users: paths of sources and tests": sum(len(list(source_paths(path))) for path in for_users),
        "keys set in no recipe, example or benchmark": len(unset_keys()),
    }


def traced_figures() -> dict[str, float]:
    """The figures of a run of the recipe `tiny`, without a plug-in for kernels: about ten seconds.

    "files that get the recipe": those with a function that gets it, or a section of it, until the PPO task is built.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("traced.py"), f"{folder}/run"],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the recipe tiny did not run: {done.stderr}")
    entered = {what: len(files) for what, files in json.loads(done.stdout.splitlines()[-1]).items()}
    return {
        "files that a PPO step runs through": entered["step"],
        "files that make advantages of scores": entered["advantages"],
        "files that get the recipe until its task is built": entered["recipe"],
    }


def python_files(folder: Path) -> list[Path]:
    """The Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def lines(paths: Iterable[Path]) -> int:
    """Lines of the files, blank ones included."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def filled_lines(path: Path) -> int:
    """Lines of a file that are not blank."""
    return sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())


def function_lengths(path: Path) -> Iterator[int]:
    """Lines of each function and method of a file, without decorators. A file without one has a function of 0."""
    yield 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_lines(path: Path) -> int:
    """Lines of a file, blank ones left out, in strings that are statements: docstrings, and those of fields."""
    text = path.read_text(encoding="utf-8")
    held: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    rows = text.splitlines()
    return sum(bool(rows[number - 1].strip()) for number in held)


def words(page: Path) -> int:
    """The words in the text of a page."""
    return len(WORD.findall(page.read_text(encoding="utf-8")))


def source_paths(page: Path) -> Iterator[str]:
    """Paths in the text of a page that are sources or tests of this project, one for each time that it names them."""
    folders = [ROOT / "src", *(ROOT / "src" / name for name in PACKAGES)]
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        if path.startswith(("src/", "tests/")) or any((folder / path).exists() for folder in folders):
            yield path


def unset_keys() -> set[str]:
    """Keys, as `Section.key`, that no shipped recipe and no YAML example sets and no example or benchmark names."""
    import yaml

    import proximo  # noqa: F401 - registers the trainers
    from proximo.config.schema.fields import item_annotation, key_paths, section_for
    from proximo.trainer_kinds import recipe_kinds, recognise

    def named(section: type, key: str) -> str:
        """The key with the section that declares it first: what several kinds inherit is one key."""
        return f"{[base for base in section.__mro__ if key in getattr(base, 'model_fields', ())][-1].__name__}.{key}"

    def set_in(annotation: Any, node: Any) -> Iterator[str]:
        for item in node if isinstance(node, list) else ():
            yield from set_in(item_annotation(annotation), item)
        section = section_for(annotation, node)
        for key, value in node.items() if section and isinstance(node, dict) else ():
            if key in section.model_fields:
                yield named(section, key)
                yield from set_in(section.model_fields[key].annotation, value)

    keys = {named(section, path[-1]) for kind in recipe_kinds() for path, section in key_paths(kind.schema)}
    shown = [path for folder in ("examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.*"))]
    for path in [*sorted((ROOT / "src/proximo/recipes").rglob("*.yaml")), *(p for p in shown if p.suffix == ".yaml")]:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        if kind := recognise(tree):
            keys -= set(set_in(kind.schema, tree))
    programs = [path.read_text(encoding="utf-8") for path in shown if path.suffix in (".py", ".ipynb")]
    named = set(NAMED_KEY.findall("\n".join(programs)))
    return {key for key in keys if key.partition(".")[2] not in named}


def over_limit(figures: Mapping[str, float]) -> list[str]:
    """The figures beyond their limit, in words."""
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    return [
        f"{what}: {now:g}, the limit is {limits[what]['limit']:g}"
        for what, now in figures.items()
        if (limit := limits[what]["limit"]) is not None and is_beyond(what, now, limit)
    ]


def is_beyond(what: str, now: float, limit: float) -> bool:
    """Whether a figure is on the wrong side of another one."""
    return now < limit if what == AT_LEAST else now > limit


def lowered(what: str, now: float, *, limit: float | None, target: float | None) -> float | None:
    """The limit that leaves today's figure a little room, where that is stricter or there was none.

    It never becomes stricter than the target.
    """
    fresh = math.floor(now * (1 - SLACK) * 1000) / 1000 if what == AT_LEAST else math.ceil(now * (1 + SLACK))
    if target is not None and is_beyond(what, target, fresh):
        fresh = target
    if limit is None:
        return fresh if now else None
    return limit if is_beyond(what, fresh, limit) else fresh


def main() -> None:
    """Print the table, and write the limits if asked to."""
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    figures = quick_figures() | traced_figures()
    if "--lower" in sys.argv[1:]:
        limits = {what: limits[what] | {"limit": lowered(what, now, **limits[what])} for what, now in figures.items()}
        rows = [f"  {json.dumps(what)}: {json.dumps(row)}" for what, row in limits.items()]
        LIMITS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(f"{'':52}{'now':>10}{'limit':>10}{'target':>10}")
    for what, now in figures.items():
        cells = [now, limits[what]["limit"], limits[what]["target"]]
        print(f"{what:52}" + "".join(f"{'-' if cell is None else format(cell, ',')!s:>10}" for cell in cells))
    sys.exit("\n".join(over_limit(figures)) or None)


if __name__ == "__main__":
    main()
