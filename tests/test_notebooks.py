"""The notebooks of examples/ run from a clean kernel; a training is interrupted in one and goes on with equal bits."""

import hashlib
import json
import os
import queue
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from proximo import Training
from tiny_runs import make_inputs, recipe_of

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
SMALL = {
    "ppo_in_ten_minutes": {"NUM_EXAMPLES": 48, "NUM_STEPS": 2, "PROMPTS_PER_STEP": 8},
    "own_reward_with_groups": {"NUM_EXAMPLES": 100, "NUM_STEPS": 2, "PROMPTS_PER_STEP": 4},
    "preferences_to_aligned_model": {
        "NUM_EXAMPLES": 100,
        "NUM_PAIRS": 100,
        "NUM_STEPS": 2,
        "PROMPTS_PER_STEP": 8,
        "NUM_HELD_OUT": 4,
    },
}
"""Settings with which each notebook takes seconds."""
DEADLINE_SECONDS = 900


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch) -> None:
    """No files of Jupyter and IPython outside of the test, one thread, and the modules of tests in the kernels."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALL)


FIRST, *OTHERS = SMALL


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS)])
def test_a_notebook_runs_from_a_clean_kernel(name, tmp_path):
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        assert not cell.get("outputs"), "outputs are stripped"
        assert cell.get("execution_count") is None
    (settings,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", []))
    assert set(SMALL[name]) == {line.split(" = ")[0] for line in settings.source.splitlines() if " = " in line}
    settings.source = "\n".join(f"{key} = {value}" for key, value in SMALL[name].items())
    NotebookClient(book, timeout=DEADLINE_SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    texts = [output.data.get("text/plain", "") for output in outputs if "data" in output]
    lasts = [text for text in texts if re.search(r"step (\d+)/\1\b", text)]
    assert len(lasts) == len({path.parent for path in tmp_path.glob("runs/**/metrics.jsonl")})
    assert all(
        book.cells[index]["outputs"][-1].data["text/plain"].startswith("SavedRun(")
        for index in cells_that_end_with_a_run(book)
    )
    assert not [output for output in outputs if output.output_type == "stream" and "step 1/" in output.text]


def cells_that_end_with_a_run(book: nbformat.NotebookNode) -> list[int]:
    return [index for index, cell in enumerate(book.cells) if ".fit(" in cell.source and cell.cell_type == "code"]


SCORE = '''
import time
from pathlib import Path


def score(prompts, responses, metadata):
    """The length of a response. In training steps, which score four, it is given once the gate is open."""
    if len(responses) == 4:
        print("scoring", flush=True)
        deadline = time.monotonic() + 600
        while not Path("gate").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return [float(len(response)) for response in responses]
'''
FIT = """
from proximo import Training

training = Training("recipe.yaml", {"run.folder": "cut", "reward": [{"kind": "function", "function": score}]})
run = training.fit(resume="auto", quiet=True)
print(run)
"""


@pytest.mark.soak
def test_a_training_is_interrupted_in_a_notebook_and_goes_on_with_equal_bits_there_and_in_a_new_kernel(
    tmp_path, monkeypatch
):
    recipe = {**recipe_of("ppo", make_inputs(tmp_path / "inputs")), "value": {"init_from": "policy"}}
    del recipe["reward"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    gate = tmp_path / "gate"
    with kernel(tmp_path) as (manager, ask):
        interrupt = [manager.interrupt_kernel]
        said = ask(SCORE + FIT, {"scoring": interrupt, "ending this step": [gate.touch]})
        assert "KeyboardInterrupt: saved in cut: continue with fit(resume='auto')" in said
        assert [line["step"] for line in lines_of(tmp_path / "cut")][-1] == 1

        gate.unlink()
        said = ask(FIT, {"scoring": interrupt, "ending this step": interrupt})
        assert "KeyboardInterrupt: a second interrupt" in said
        assert "step 1 of 5" in ask("print(training.run)", {})
    gate.touch()
    with kernel(tmp_path) as (_, ask):
        assert "step 5 of 5, finished" in ask(SCORE + FIT, {})

    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {}
    exec(SCORE, named)
    whole = Training(
        "recipe.yaml", {"run.folder": "whole", "reward": [{"kind": "function", "function": named["score"]}]}
    ).fit(quiet=True)
    assert weights_of(tmp_path / "cut") == weights_of(whole.folder)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> dict[str, str]:
    """File of the last checkpoint, of weights and optimizers -> hash of its bytes."""
    files = sorted((folder / "checkpoints" / "step-000005").rglob("*.safetensors"))
    assert len(files) >= 4
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


Ask = Callable[[str, Mapping[str, list[Callable[[], Any]]]], str]


@contextmanager
def kernel(folder: Path) -> Iterator[tuple[KernelManager, Ask]]:
    # Where pytest's variable is set, a kernel does not show what is written straight to standard error.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    manager, client = start_new_kernel(startup_timeout=DEADLINE_SECONDS, cwd=str(folder), env=environment)
    try:
        yield manager, lambda code, actions: answer(manager, client, code, actions)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def answer(
    manager: KernelManager, client: BlockingKernelClient, code: str, actions: Mapping[str, list[Callable[[], Any]]]
) -> str:
    """What a cell prints, with its error. When the text of an action is printed, the action is called, once."""
    asked, said, waiting = client.execute(code), "", dict(actions)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=5)
        except queue.Empty:
            assert manager.is_alive(), said
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":  # what is written straight to standard error belongs to no cell
            said += content["text"]
        elif kind == "error":
            said += f"{content['ename']}: {content['evalue']}"
        elif kind == "status" and content["execution_state"] == "idle" and message["parent_header"]["msg_id"] == asked:
            assert not waiting, said
            return said
        for text in [text for text in waiting if text in said]:
            for act in waiting.pop(text):
                act()
    raise TimeoutError(said)
