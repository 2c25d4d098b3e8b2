"""Lays the pages of the site out below one folder: those of docs/, those beside it, the public names, and llms.txt.

`make docs` runs it before the generator. Pages stay as they are but for links: a link that leaves docs/ is led to where
its target lies on the site, and one that shows the name of a file shows the title of the page. Nothing of Proximo is
imported, so that no torch is needed.
"""

import ast
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.txt",
    "benchmarks/README.md": "benchmarks.md",
    "examples": "examples.md",
}
"""Files of the project, by where they go on the site; what lies below docs/ keeps its place."""
COPIED = (
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/**/*.webp",
    "docs/theme/*.css",
    "docs/theme/*.js",
    "benchmarks/results/*.svg",
    "examples/*",
    "examples/notebooks/*.ipynb",
)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
SEARCH_BOOST = {
    "faq.md": 2.0,
    "getting-started.md": 2.0,
    "rewards.md": 2.0,
    "healthy-runs.md": 2.0,
    "adapters.md": 2.0,
    "scale.md": 2.0,
    "pages.md": 0.2,
    "changelog.md": 0.2,
    "parity.md": 0.2,
    "presets.md": 0.2,
    "examples.md": 0.3,
    "formulas.md": 0.2,
    "api.md": 0.3,
    "refused.md": 0.3,
    "benchmarks.md": 0.3,
}
"""Factors of pages in the search: pages that teach come before lists of names, which have every word."""
GROUPS = {
    "Training": ("commands", "ppo", "learner", "distributed"),
    "Settings": ("config",),
    "Models": ("models",),
    "Rewards": ("rewards",),
    "Environments": ("environments", "run"),
    "Sampling": ("rollout",),
    "Records": ("records",),
    "KL controllers": ("algorithms",),
    "Logging": ("metrics",),
    "Errors": ("errors",),
}
"""Sections of the page of public names, by the folder or module of proximo that defines the name."""


FORMULAS = "src/proximo/algorithms"
FORMULAS_HEAD = (
    "The functions of `proximo.algorithms`: what PPO and its relatives compute, on tensors alone, each with the "
    "source of its formula. [PPO in formulas](ppo-formulas.md) shows how they follow each other in a step."
)
API_HEAD = "Everything that `import proximo` offers. [As a library](library.md) shows how the parts work together."
VERIFIERS_HEAD = "What `import proximo_verifiers` offers; [how to use it elsewhere](verifiers-elsewhere.md)."
INDEX_ROW = re.compile(r"^- \[[^]]*\]\(([^)]+)\): (.+)$", re.MULTILINE)


def main(folder: Path) -> None:
    """Write everything that the generator reads into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    places = {path: place(path) for path in sources()}
    for path, target in places.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            continue
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            (folder / target).write_text(with_moved_links(text, PurePosixPath(path), places), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / path, folder / target)
    (folder / "api.md").write_text(api_page(), encoding="utf-8")
    (folder / "formulas.md").write_text(formulas_page(), encoding="utf-8")
    (folder / "examples.md").write_text(examples_page(), encoding="utf-8")
    for page, factor in SEARCH_BOOST.items():
        text = (folder / page).read_text(encoding="utf-8")
        (folder / page).write_text(f"---\nsearch: {{boost: {factor}}}\n---\n\n{text}", encoding="utf-8")
    (folder / "llms.txt").write_text(llms_index(), encoding="utf-8")
    (folder / "llms-full.txt").write_text(llms_full(places), encoding="utf-8")


def sources() -> Iterator[str]:
    """Paths of what is on the site, from the top of the project."""
    yield from MOVED
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and name not in MOVED:
                yield name


def place(path: str) -> str:
    """Where a file of the project goes on the site."""
    return MOVED.get(path) or path.removeprefix("docs/")


def with_moved_links(text: str, page: PurePosixPath, places: dict[str, str]) -> str:
    """A page whose relative links lead to where their targets are now."""

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(page.parent / match["target"])
        if (ROOT / target).is_dir() and f"{target}/README.md" in places:
            target = f"{target}/README.md"
        if target not in places:
            raise SystemExit(f"{page}: {match['target']} is not on the site; see COPIED in docs/theme/stage.py")
        words = title(target) if re.fullmatch(r"[\w/-]+\.md", match["text"]) else match["text"]
        to = os.path.relpath(places[target], PurePosixPath(places[str(page)]).parent)
        return f"[{words}]({to}{match['anchor'] or ''})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def title(path: str) -> str:
    """The first heading of a page."""
    return (ROOT / path).read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def public_names() -> dict[str, str]:
    """The names of `import proximo`, by the top folder or module that defines each."""
    return {name: module.split(".")[1] for name, module in imported_names("src/proximo/api.py").items()}


def imported_names(path: str) -> dict[str, str]:
    """The names that a file takes from modules of the project, by their modules."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    known = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("proximo")]
    return {alias.name: str(node.module) for node in known for alias in node.names}


def api_page() -> str:
    """A page of directives, from which mkdocstrings makes the reference."""
    names = public_names()
    lines = ["# API reference", "", API_HEAD, ""]
    for heading, tops in GROUPS.items():
        lines += [f"## {heading}", ""]
        for name in sorted(name for name, top in names.items() if top in tops):
            lines += [f"::: proximo.api.{name}", ""]
    if unplaced := set(names.values()) - {top for tops in GROUPS.values() for top in tops}:
        raise SystemExit(f"no section of the page of public names has {unplaced}; see GROUPS in docs/theme/stage.py")
    lines += ["## Verifiers in other trainers", "", VERIFIERS_HEAD, ""]
    for name, module in sorted(imported_names("src/proximo_verifiers/__init__.py").items()):
        lines += [f"::: {module}.{name}", ""] if name not in names else []
    return "\n".join(lines)


def formulas_page() -> str:
    """A page of directives for the modules of pure functions, each under the first sentence of its docstring."""
    lines = ["# Formulas as functions", "", FORMULAS_HEAD, ""]
    for path in sorted((ROOT / FORMULAS).glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        summary = (ast.get_docstring(tree) or "").split("\n\n")[0]
        lines += [f"## {path.stem.replace('_', ' ').capitalize()}", "", summary, ""]
        lines += [line for name in public for line in (f"::: proximo.algorithms.{path.stem}.{name}", "")]
    return "\n".join(lines)


def examples_page() -> str:
    """A page with every file of examples/."""
    lines = ["# Examples", "", "The files of `examples/`.", ""]
    for path in sorted((ROOT / "examples").glob("*.*")):
        lines += [f"## {path.name}", "", f"```{path.suffix[1:]}", path.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(lines)


def questions() -> dict[str, str]:
    """The question that each page answers, from the index of docs/, by the name of the page's file there."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    return dict(INDEX_ROW.findall(text))


def llms_index() -> str:
    """llms.txt: each page with one line, for programs that read documentation."""
    lines = [
        "# Proximo",
        "",
        f"> {described()}",
        "",
        "All pages in one file: [llms-full.txt](llms-full.txt)",
        "",
        "## Pages",
        "",
    ]
    for path, question in questions().items():
        lines.append(f"- [{title(f'docs/{path}')}]({path.removesuffix('.md')}.html): {question}")
    lines += ["- [API reference](api.html): " + API_HEAD.partition("[")[0].strip()]
    lines += ["- [Formulas as functions](formulas.html): " + FORMULAS_HEAD.partition("[")[0].strip()]
    return "\n".join(lines) + "\n"


def llms_full(places: dict[str, str]) -> str:
    """llms-full.txt: the README and the pages that the index of docs/ lists, one after the other."""
    wanted = ["README.md", *(f"docs/{path}" for path in questions())]
    return "\n".join(f"<!-- {places[path]} -->\n\n{(ROOT / path).read_text(encoding='utf-8')}" for path in wanted)


def described() -> str:
    """What Proximo is, in the words of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["description"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
