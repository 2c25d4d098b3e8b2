"""The tree of the sources: no folder is a hall. Which way imports go is held by import-linter (pyproject.toml)."""

from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "proximo"
FOLDERS = [path for path in (SOURCE, *SOURCE.rglob("*")) if path.is_dir() and path.name != "__pycache__"]


def test_no_folder_holds_more_than_twenty_files() -> None:
    full = {path: sum(entry.is_file() for entry in path.iterdir()) for path in FOLDERS}
    assert not {str(path.relative_to(SOURCE)): count for path, count in full.items() if count > 20}


def test_every_folder_at_the_top_has_its_row_on_the_page() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    tops = [path.name for path in FOLDERS if path.parent == SOURCE and path.name != "recipes"]
    assert not [name for name in tops if f"| `src/proximo/{name}/` |" not in page]
