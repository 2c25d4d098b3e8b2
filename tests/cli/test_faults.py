"""Files that are damaged and disks that refuse, met by every command: one message each, and never a traceback."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from faults import errors_in, recipe_file, refused
from safetensors.torch import save_file

from proximo.cli import main
from proximo.models.pretrained.folders import damage_in
from proximo.run.options import RunOptions
from tiny_runs import changed, make_inputs, recipe_of, run

START = RunOptions(quiet=True)
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a list": lambda content: b"[1, 2]",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, the run of an adapter in `lora`, and that of a whole model in `run`."""
    inputs = make_inputs(tmp_path_factory.mktemp("faults"))
    assert run("sft", recipe_of("sft", inputs), START) == 0
    adapter = {"run.folder": str(inputs / "lora"), "model.lora": {"rank": 2}}
    assert run("sft", changed(recipe_of("sft", inputs), adapter), START) == 0
    return inputs


def files_of(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["language_model", "adapter"])
def test_a_model_with_a_damaged_file_is_refused_by_name_or_does_without_it(
    kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = place / "language_model" if kind != "adapter" else place / "lora/checkpoints/step-000005/policy"
    needed = {"config.json", "model.safetensors", "tokenizer.json", "adapter_config.json", "adapter_model.safetensors"}
    for file in files_of(whole):
        for name, damage in {**DAMAGES, "missing": None}.items():
            model = shutil.copytree(whole, tmp_path / f"{file.name}-{name}")
            if damage is None:
                (model / file).unlink()
            else:
                (model / file).write_bytes(damage((model / file).read_bytes()))
            arguments = ["generate", str(model), "ab", "--max-new-tokens=2", "--greedy"]
            if file.name in needed:
                refused(capsys, arguments)
            else:
                assert main(arguments) in (0, 1, 2)
                assert "Traceback" not in capsys.readouterr().err


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


OVERLOOKED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "what ends an answer, cut": (
        "generation_config.json",
        lambda file: file.write_bytes(b'{"eos_'),
        "is not complete JSON",
    ),
    "what ends an answer, misspelt": (
        "generation_config.json",
        lambda file: file.write_text('{"eos_token_if": [2, 5]}'),
        "has the key 'eos_token_if' where 'eos_token_id' is meant",
    ),
    "the shape, misspelt": (
        "config.json",
        lambda file: file.write_text(file.read_text().replace('"rms_norm_eps"', '"rms_norm_epq"')),
        "has the key 'rms_norm_epq' where 'rms_norm_eps' is meant",
    ),
    "the special tokens, a folder": ("tokenizer_config.json", as_folder, "is a folder"),
    "the template, a folder": ("chat_template.jinja", as_folder, "is a folder"),
}


@pytest.mark.parametrize("fault", OVERLOOKED)
def test_a_damaged_file_that_libraries_pass_over_is_refused_by_every_reader(
    fault: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word they would take their defaults, and the numbers would be others."""
    model = shutil.copytree(place / "language_model", tmp_path / "model")
    name, damage, told = OVERLOOKED[fault]
    damage(model / name)
    changes = {"model": {"path": str(model)}, "tokenizer.path": str(model), "run.folder": str(tmp_path / "run")}
    recipe = recipe_file(changed(recipe_of("ppo", place), changes), tmp_path / "ppo.yaml")
    for arguments in (["generate", str(model), "ab"], ["plan", recipe], ["ppo", recipe]):
        assert f"{model / name} {told}" in refused(capsys, arguments)
    assert not (tmp_path / "run").exists()


def test_an_adapter_whose_setting_is_misspelt_is_refused_and_not_scaled_otherwise(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(place / "lora/checkpoints/step-000005/policy", tmp_path / "adapter")
    file = model / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha"', '"lora_alphi"'))
    said = refused(capsys, ["generate", str(model), "ab"])
    assert f"{file} has the key 'lora_alphi' where 'lora_alpha' is meant" in said


def test_an_adapter_with_a_tensor_of_another_name_is_refused_and_not_half_loaded(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a flipped bit in the header of its weights."""
    model = shutil.copytree(place / "lora/checkpoints/step-000005/policy", tmp_path / "adapter")
    file = model / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"q_proj.lora_B", b"q_proj.lora_R"))
    said = refused(capsys, ["generate", str(model), "ab"])
    assert f"{file} lacks 1 of the adapter's tensors, such as " in said
    assert "q_proj.lora_B" in said


def test_what_a_folder_of_a_model_lacks_is_said(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(place / "language_model", tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert f"the tokenizer of {model} cannot be read: there is no tokenizer.json" in refused(
        capsys, ["generate", str(model), "ab"]
    )
    (model / "config.json").unlink()
    assert f"{model} holds no run and no model: there is no file config.json" in refused(
        capsys, ["generate", str(model), "ab"]
    )


@pytest.mark.parametrize("name", ["config.resolved.json", "metrics.jsonl", "samples.jsonl", "environment.json"])
def test_a_record_that_is_a_folder_hinders_no_export(name: str, place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place / "run", tmp_path / "run")
    as_folder(folder / name)
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert main(["report", str(folder)]) == (2 if name == "metrics.jsonl" else 0)


NAMED = {
    "empty": (lambda content: b"", "is empty"),
    "cut": (lambda content: content[: len(content) // 2], "is not complete JSON|is not a complete safetensors"),
    "another kind": (lambda content: b"[1, 2]", "holds a JSON list|is not a complete safetensors"),
    "binary": (lambda content: bytes(range(256)), "is not text in UTF-8|is not a complete safetensors"),
    "a flipped bit": (
        lambda content: bytes([content[0] ^ 64]) + content[1:],
        "is not complete JSON|is not a complete safetensors",
    ),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("model.safetensors", damage) for damage in NAMED),
        *zip(("config.json", "tokenizer.json", "tokenizer_config.json") * 2, [*NAMED, "cut"], strict=True),
    ],
)
def test_the_file_that_is_damaged_is_named_with_what_is_wrong(
    name: str, damage: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(place / "language_model", tmp_path / "model")
    change, told = NAMED[damage]
    (model / name).write_bytes(change((model / name).read_bytes()))
    changes = {"model": {"path": str(model)}, "tokenizer": {"path": str(model)}, "run.folder": str(tmp_path / "run")}
    recipe = recipe_file(changed(recipe_of("sft", place), changes), tmp_path / "sft.yaml")
    for arguments in (["generate", str(model), "ab"], ["sft", recipe]):
        said = refused(capsys, arguments)
        assert re.search(f"{model / name} ({told})", said), said
    assert not (tmp_path / "run").exists()


def test_weights_of_another_size_than_their_header_says_are_told_so(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, file)
    whole = file.read_bytes()
    assert damage_in(tmp_path) is None
    for damaged in (whole[:-1], whole + b"x", whole.replace(b"[4,3]", b"[4,4]")):
        file.write_bytes(damaged)
        told = f"{file} is not a complete safetensors file of {len(damaged)} bytes (Error"
        assert str(damage_in(tmp_path)).startswith(told)
    file.unlink()
    file.symlink_to("/nowhere")
    assert damage_in(tmp_path) == f"{file} cannot be opened: No such file or directory"
    file.unlink()
    file.mkdir()
    assert "is a folder" in str(damage_in(tmp_path))


def test_a_template_that_is_no_jinja_is_named_with_its_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for message in messages %}\n{{ message['content'] }}\n{% end %}\n"
    changes = {"tokenizer.chat_template": template, "run.folder": str(tmp_path / "run")}
    recipe = recipe_file(changed(recipe_of("sft", place), changes), tmp_path / "sft.yaml")
    said = refused(capsys, ["sft", recipe])
    assert "tokenizer.chat_template is not valid Jinja" in said
    assert "line 3: '{% end %}'" in said
    model = shutil.copytree(place / "language_model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    changes = {"data": {"sources": [{"path": str(rows)}]}, "tokenizer.path": str(model), "run.folder": "none"}
    recipe = recipe_file(changed(recipe_of("sft", place), changes), tmp_path / "own.yaml")
    said = refused(capsys, ["sft", recipe])
    assert f"{model / 'chat_template.jinja'}, line 3: the chat template is not valid Jinja" in said


def test_data_that_is_a_pipe_is_refused_and_not_waited_for(place: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    recipe = recipe_file(changed(recipe_of("sft", place), {"data": {"sources": [{"path": str(pipe)}]}}), tmp_path / "r")
    command = [sys.executable, "-m", "proximo", "sft", recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2
    assert f"{pipe} is not a regular file, and data is read more than once" in done.stderr


def test_a_function_where_a_path_is_wanted_gets_the_key(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"data": {"sources": [{"path": "mine:rows"}]}, "run.folder": str(tmp_path / "run")}
    recipe = recipe_file(changed(recipe_of("sft", place), data), tmp_path / "r")
    assert "write function: mine:rows" in refused(capsys, ["sft", recipe])


def test_weights_that_are_no_weights_but_a_pickle_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pickle that would run a program when it is read."""
    model = shutil.copytree(place / "language_model", tmp_path / "pickled")
    (model / "model.safetensors").unlink()
    ran = tmp_path / "ran"
    (model / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {ran}'\ntR.".encode())
    assert "cannot be read" in refused(capsys, ["generate", str(model), "ab"])
    assert not ran.exists()


def test_a_run_with_a_damaged_record_is_reported_as_far_as_it_goes(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, damage in DAMAGES.items():
        folder = shutil.copytree(place / "run", tmp_path / name)
        for file in ("metrics.jsonl", "samples.jsonl", "config.resolved.json", "environment.json"):
            (folder / file).write_bytes(damage((folder / file).read_bytes()))
        assert main(["report", str(folder)]) == 0, name
        assert "config.resolved.json" in refused(capsys, ["evaluate", str(folder)]), name


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a disk that is full: no file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1_000, 6_000, 40_000])
def test_a_full_disk_is_one_message_wherever_it_strikes(
    size: int, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written in full before that, such as a small adapter, may well end."""
    settings = {"run.folder": str(tmp_path / "run"), "run.tensorboard": True, "run.save_every_steps": 1}
    recipe = recipe_file(changed(recipe_of("sft", place), settings), tmp_path / "sft.yaml")
    for arguments in (
        ["sft", recipe],
        ["export", str(place / "run"), str(tmp_path / "exported")],
        ["export", str(place / "lora"), str(tmp_path / "adapter")],
        ["export", str(place / "lora"), str(tmp_path / "merged"), "--merge"],
    ):
        with largest_file(size):
            status = main(arguments)
        said = capsys.readouterr().err
        if arguments[0] == "export":
            assert (status == 0) is Path(arguments[2]).exists(), "nothing is left of what could not be finished"
        assert status == 0 or (len(errors_in(said)) == 1 and "File too large" in said), said
        assert status != 0 or size > 1_000


@pytest.mark.parametrize("size", [0, 30])
def test_a_full_disk_is_one_message_where_little_is_written(
    size: int, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = shutil.copytree(place / "run", tmp_path / "run")
    judge = tmp_path / "judge"
    assert (
        run("reward", changed(recipe_of("reward", place), {"run.folder": str(judge), "reward.num_epochs": 1}), START)
        == 0
    )
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for arguments, file in (
        (["report", str(run_folder)], "report.html"),
        (["generate", str(place / "language_model"), "ab", "--output", str(tmp_path / "generated.jsonl")], "generated"),
        (["evaluate", str(judge), "--output", str(tmp_path / "evaluated.jsonl")], "evaluated.jsonl"),
        (["recipes", "copy", "sft", str(tmp_path / "copied.yaml")], "copied.yaml"),
    ):
        with largest_file(size):
            said = refused(capsys, arguments)
        assert "File too large" in said
        assert file in said, "it says which file"
        after = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert after == before, (arguments, "nothing is lost, and nothing unfinished is left")


def test_a_place_without_permissions_is_refused_before_the_work_is_done(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, whom no mode refuses."""
    closed, model, access = tmp_path / "closed", place / "language_model", os.access
    closed.mkdir()
    changes = {"run.folder": str(tmp_path / "new"), "model": {"path": str(model)}}
    recipe = recipe_file(changed(recipe_of("sft", place), changes), tmp_path / "sft.yaml")
    refusing = {closed: os.W_OK, place / "run": os.W_OK}
    refusing |= {model / "config.json": os.R_OK, place / "reward_model": os.X_OK}
    monkeypatch.setattr(os, "access", lambda path, mode: not refusing.get(Path(path), 0) & mode and access(path, mode))
    for arguments, refuses in (
        (["report", str(place / "run")], place / "run"),
        (["report", str(place / "run"), "--out", str(closed / "page.html")], closed),
        (["export", str(place / "run"), str(closed / "deep/model")], closed),
        (["sft", recipe], model / "config.json"),
        (["sft", recipe, f"model.path={place / 'reward_model'}"], f"the folder {place / 'reward_model'}"),
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        (error,) = errors_in(capsys.readouterr().err)
        assert f"the permissions of {refuses} refuse" in error
    assert not list(closed.iterdir())


def test_a_tracker_whose_own_file_cannot_be_written_costs_its_lines_and_not_the_run(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sink keeps is on another disk, which is full."""

    def refuse(path: Path, data: bytes) -> None:
        if "trackers" in path.parts:
            raise OSError(116, "Stale file handle", str(path))
        write(path, data)

    from proximo.checkpoint import atomic

    write = atomic.write_bytes_atomically
    monkeypatch.setattr(atomic, "write_bytes_atomically", refuse)
    sink = {"kind": "function", "function": "test_faults:quiet_sink"}
    recipe = changed(recipe_of("sft", place), {"run.folder": str(tmp_path / "run"), "run.sinks": [sink]})
    assert main(["sft", recipe_file(recipe, tmp_path / "sft.yaml"), "--quiet"]) == 0
    assert "Stale file handle" in " ".join(capsys.readouterr().err.split())
    assert len((tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 6


def test_a_tracker_whose_memory_is_damaged_begins_anew(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = {"kind": "function", "function": "test_faults:quiet_sink"}
    recipe = changed(recipe_of("sft", place), {"run.folder": str(tmp_path / "run"), "run.sinks": [sink]})
    file = recipe_file(recipe, tmp_path / "sft.yaml")
    assert main(["sft", file, "--quiet"]) == 0
    memory = tmp_path / "run/trackers/test_faults-quiet_sink.json"
    before = json.loads(memory.read_bytes())["id"]
    memory.write_bytes(b'{"id": ')
    (tmp_path / "run/checkpoints/latest").write_text("step-000004\n", encoding="utf-8")
    assert main(["sft", file, "--quiet", "--resume"]) == 0
    assert "begins a new run, with every step" in " ".join(capsys.readouterr().err.split())
    assert json.loads(memory.read_bytes())["id"] != before


class QuietSink:
    def write(self, step: int, metrics: object) -> None: ...

    def close(self) -> None: ...


def quiet_sink(run: object) -> QuietSink:
    return QuietSink()
