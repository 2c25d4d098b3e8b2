"""Import paths are checked without importing anything, also below folders without __init__.py."""

import sys
from pathlib import Path

import pytest

from proximo.config.functions import function_problem


def test_a_function_below_folders_without_init_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "outer_folder" / "inner"
    place.mkdir(parents=True)
    (place / "mine.py").write_text("def rows():\n    yield {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert function_problem("outer_folder.inner.mine:rows") is None
    assert function_problem("outer_folder.inner.mine:others") == f"{place / 'mine.py'} defines no others"
    assert "there is no module outer_folder.inner.none" in str(function_problem("outer_folder.inner.none:rows"))
    assert not {"outer_folder", "outer_folder.inner"} & {*sys.modules}


@pytest.mark.parametrize(
    "text",
    [
        "for i in range(2):\n    globals()[f'reward_{i}'] = len\n",
        "import sys\nsetattr(sys.modules[__name__], 'reward_' + '0', len)\n",
        "def __getattr__(name):\n    return len\n",
        "from elsewhere import *\n",
        "vars()['reward_' + '0'] = len\n",
    ],
)
def test_a_name_that_a_module_makes_when_it_runs_is_not_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert function_problem("made:reward_0") is None
