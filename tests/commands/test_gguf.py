"""GGUF files: by a program in the place of llama.cpp's converter, and by that itself, which PROXIMO_TEST_GGUF names."""

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from builders import tiny_language_model, tiny_tokenizer
from proximo.checkpoint.run_folder import open_run
from proximo.checkpoint.store import CheckpointStore
from proximo.cli import main
from proximo.commands.gguf import VARIABLE, write_gguf
from proximo.models.pretrained.saving import save_pretrained

STANDS_IN = """
import sys
folder, _, out, _, kind = sys.argv[1:]
if kind == "q8_0":
    sys.exit("BPE pre-tokenizer was not recognized")
open(out, "w").write(f"GGUF {kind} of {folder}")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "convert_hf_to_gguf.py").write_text(STANDS_IN)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "convert_hf_to_gguf.py"))

    def write(path: Path) -> None:
        save_pretrained(tiny_language_model(), path)
        tiny_tokenizer().save_pretrained(path)

    with open_run(tmp_path / "run") as run:
        CheckpointStore(run.checkpoints).save(1, {"policy": write, "reward": write}, {})
    return tmp_path / "run"


@pytest.mark.usefixtures("run")
def test_an_export_gets_a_file_of_the_type_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "out", "--gguf", "f16"]) == 0
    assert Path("out/out-f16.gguf").read_text() == "GGUF f16 of out"
    assert capsys.readouterr().out.endswith("out/out-f16.gguf\n")


@pytest.mark.usefixtures("run")
def test_what_the_converter_refuses_is_said_and_the_folder_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "out", "--gguf", "q8_0"]) == 1
    assert "could not convert it to GGUF: BPE pre-tokenizer was not recognized" in capsys.readouterr().err
    assert Path("out/model.safetensors").is_file()
    assert not list(Path("out").glob("*.partial"))


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("more", "named", "said"),
    [
        ("", "", "get it with `git clone"),
        ("", "nowhere.py", "PROXIMO_GGUF_CONVERTER is nowhere.py, and there is no such file"),
        ("--role=reward", "convert_hf_to_gguf.py", "is for language models"),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(
    more: str, named: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, named)
    assert main(["export", "run", "out", "--gguf", "f16", *filter(None, [more])]) == 2
    assert said in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.skipif(
    not {"PROXIMO_TEST_GGUF", "PROXIMO_TEST_DATA"} <= os.environ.keys(),
    reason="PROXIMO_TEST_GGUF names no converter of llama.cpp, or PROXIMO_TEST_DATA no tokenizers",
)
def test_the_converter_itself_takes_a_folder_of_ours(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(os.environ["PROXIMO_TEST_DATA"]) / "tokenizers" / "qwen2.5")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    save_pretrained(model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made = write_gguf(tmp_path / "model", "f16", Path(os.environ["PROXIMO_TEST_GGUF"]))
    assert made.read_bytes().startswith(b"GGUF")
    assert made.stat().st_size > 2 * model.num_parameters() * 0.9
