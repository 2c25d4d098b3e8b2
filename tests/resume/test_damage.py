"""Damage to any file of a checkpoint is found before the file is used, and the way on ends with the same bits."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proximo.checkpoint.reading import MANIFEST, STATE, read_manifest
from proximo.checkpoint.run_folder import CHECKPOINTS
from proximo.checkpoint.store import CheckpointStore
from proximo.cli import main
from proximo.errors import CheckpointError
from proximo.run import journal
from proximo.run.checkpoint_lookup import find_checkpoint, find_model, language_model_path
from proximo.run.options import RunOptions
from run_outcomes import assert_same_outcome, outcome
from tiny_runs import changed, make_inputs, recipe_of, run

READERS: dict[str, Callable[[Path], object]] = {
    "resume": lambda folder: CheckpointStore(folder / CHECKPOINTS).load(),
    "evaluate": find_checkpoint,
    "export": find_model,
    "generate": lambda folder: language_model_path(str(folder)),
}
"""The commands that read a checkpoint, as far as they go before they read weights."""
ONLY_THE_POLICY = ("export", "generate")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs and the run of PPO, of which the fourth and the fifth step are kept."""
    place = make_inputs(tmp_path_factory.mktemp("damage"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "write_report", lambda folder: folder / "report.html")
        assert run("ppo", recipe(place), RunOptions(quiet=True)) == 0
    return place


def recipe(place: Path) -> dict[str, Any]:
    return changed(recipe_of("ppo", place), {"run.evaluate_every_steps": None})


def damages(content: bytes, *, num_flips: int, draw: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """What a file may become: single bits flipped, cut, emptied, deleted (None)."""
    for bit in draw.sample(range(8 * len(content)), min(num_flips, 8 * len(content))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)
    yield "cut", content[: len(content) // 2]
    yield "emptied", b""
    yield "deleted", None


@contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def check_every_file(place: Path, *, num_flips: int) -> int:
    """Raises AssertionError where a reader uses a damaged file or does not name it; returns the number of readings."""
    draw, checkpoint = random.Random(7), find_checkpoint(place / "run").folder
    readings = 0
    for name in (MANIFEST, *read_manifest(checkpoint).files):
        path = checkpoint / name
        for what, content in damages(path.read_bytes(), num_flips=num_flips, draw=draw):
            with damaged(path, content):
                for command, read in READERS.items():
                    readings += 1
                    needs = command not in ONLY_THE_POLICY or name in (MANIFEST, STATE) or name.startswith("policy/")
                    if not needs and what.startswith("bit"):
                        read(place / "run")
                        continue
                    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}.*write its name into"):
                        read(place / "run")
    return readings


def test_damage_to_any_file_is_found_before_it_is_used(finished: Path) -> None:
    assert check_every_file(finished, num_flips=2) > 4 * 12 * 5


@pytest.mark.parametrize("name", ["policy/model.safetensors", MANIFEST, STATE])
def test_the_commands_refuse_and_following_their_advice_gives_the_same_bits(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    folder = finished / "run"
    expected = outcome(folder)
    kept = shutil.copytree(folder, tmp_path / "kept")
    path = find_checkpoint(folder).folder / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40  # of the weights the exponent of the last one
    path.write_bytes(content)
    try:
        for command in (["export", str(folder), str(tmp_path / "out")], ["evaluate", str(folder)]):
            assert main(command) == 1
            assert f"{path} " in capsys.readouterr().err
        assert main(["generate", str(folder), "abc"]) == 1
        said = capsys.readouterr()
        assert not said.out
        assert not (tmp_path / "out").exists()
        with pytest.raises(CheckpointError, match="To continue from another one") as refused:
            run("ppo", recipe(finished), RunOptions(quiet=True, resume="must"))
        pointer = re.search(r"write its name into (\S+) and resume", str(refused.value))
        assert pointer is not None
        Path(pointer[1]).write_text("step-000004\n")
        assert main(["generate", str(folder), "abc", "--max-new-tokens", "2"]) == 0
        assert run("ppo", recipe(finished), RunOptions(quiet=True, resume="must")) == 0
        assert_same_outcome(folder, expected, after=f"a flipped bit in {name}")
    finally:
        shutil.rmtree(folder)
        shutil.move(kept, folder)


@pytest.mark.parametrize(
    ("name", "what"), [("policy/model.safetensors", "flipped"), (MANIFEST, "cut"), (MANIFEST, "gone")]
)
def test_a_resume_that_nobody_may_look_at_goes_back_to_the_newest_whole_checkpoint(
    name: str, what: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun --max-restarts` and a requeued job would else fail with the same damage each time."""
    monkeypatch.setattr(journal, "write_report", lambda folder: folder / "report.html")
    folder = finished / "run"
    expected = outcome(folder)
    kept = shutil.copytree(folder, tmp_path / "kept")
    path = find_checkpoint(folder).folder / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40
    path.write_bytes(content if what == "flipped" else content[:-3])
    if what == "gone":
        shutil.rmtree(path.parent)
    try:
        assert run("ppo", recipe(finished), RunOptions(quiet=True, resume="auto")) == 0
        assert_same_outcome(folder, expected, after=f"damage to {name}")
        aside = folder / CHECKPOINTS / "damaged-step-000005"
        assert (aside / name).is_file() is (what != "gone")
        found = "it is missing" if what == "gone" else f"{path} "
        said = f"step 5 is passed over, and what there is of it is now in {aside.name}: {found}"
        assert said in (folder / "log.txt").read_text()
    finally:
        shutil.rmtree(folder)
        shutil.move(kept, folder)


def test_a_stage_of_a_pipeline_that_is_resumed_by_hand_passes_over_no_damage(finished: Path) -> None:
    """There `auto` only starts the stages that have not begun."""
    fifth = finished / "run" / CHECKPOINTS / "step-000005" / STATE
    options = RunOptions(quiet=True, resume="auto", passes_over_damage=False)
    with damaged(fifth, None), pytest.raises(CheckpointError, match=f"{fifth} is missing"):
        run("ppo", recipe(finished), options)


def test_where_no_checkpoint_is_whole_a_resume_says_what_is_wrong_with_the_latest(finished: Path) -> None:
    fourth, fifth = (finished / "run" / CHECKPOINTS / f"step-00000{step}" / STATE for step in (4, 5))
    refused = pytest.raises(CheckpointError, match=rf"checkpoint of step 5 is not complete: {fifth} is missing")
    with damaged(fourth, None), damaged(fifth, None), refused:
        run("ppo", recipe(finished), RunOptions(quiet=True, resume="auto"))


@pytest.mark.soak
def test_two_hundred_flips_of_every_file_are_found_before_it_is_used(finished: Path) -> None:
    print(f"{check_every_file(finished, num_flips=200):,} readings of a damaged checkpoint")
