"""The commands of docs/results.md, run one after the other with a tiny model in place of the real one."""

import io
import json
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks

from builders import tiny_language_model, tiny_tokenizer
from proximo.cli import main
from real_data import real_data

SMALL = {
    "examples/real/sentiment-reward.yaml": [
        *[
            "model.frozen_layers=0",
            "data.sources.0.kwargs.num_pairs=16",
            "data.evaluation_sources.0.kwargs.num_pairs=4",
        ],
        *["reward.optimizer.warmup_updates=0", "data.max_tokens=400"],
    ],
    "examples/real/sentiment-sft.yaml": [
        *["model.frozen_layers=0", "data.sources.0.max_rows=16", "data.held_out_rows=2", "data.max_tokens=400"],
        *["sft.num_epochs=1", "sft.optimizer.warmup_updates=0"],
    ],
    "examples/real/sentiment-ppo.yaml": [
        *["model.frozen_layers=0", "value.frozen_layers=0", "data.max_prompt_tokens=200", "ppo.num_steps=1"],
        *["data.evaluation_sources.0.max_rows=12", "ppo.prompts_per_step=4", "ppo.rollout.max_new_tokens=4"],
        *["ppo.policy_optimizer.warmup_updates=0"],
    ],
}
"""By recipe: what makes it run in a second."""


@pytest.mark.soak
def test_the_way_to_the_sentiment_curve_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXIMO_TEST_DATA", str(real_data()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.nice", lambda increment: increment)
    shutil.copytree(ROOT / "examples" / "real", tmp_path / "examples" / "real")
    tiny_language_model().save_pretrained(tmp_path / "models" / "smollm2")
    tiny_tokenizer().save_pretrained(tmp_path / "models" / "smollm2")
    lines = [line for block in blocks(ROOT / "docs" / "results.md", "sh") for line in block.text.splitlines()]
    for line in lines:
        command, _, source = line.partition("<")
        run(shlex.split(command, comments=True), source.strip(), monkeypatch)
    found = json.loads((tmp_path / "runs" / "sentiment.json").read_text())
    (trained, *baselines) = found["written"]
    assert trained["before"]["continuations"] == 12, "the held-out openings"
    assert [sample["prompt_id"] for sample in trained["samples"]] == trained["prompt_ids"].split()[:10]
    assert {"positive by reviews", "positive by sentences"} <= trained["after"].keys()
    assert [each["continuations"] for each in baselines] == [200] * len(baselines)
    assert len(found["story_loss"]) == 2


def run(words: list[str], source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command: ours with its small overrides, a program in this process; the model is made already."""
    if words[0] == "pip" or words[1] == "examples/real/smollm2.py":
        return
    if source:
        monkeypatch.setattr("sys.stdin", io.StringIO(Path(source).read_text()))
    if words[0] == "proximo":
        small = [{"20": "4", "$\\n": "\n"}.get(word, word) for word in words[1:]]  # the line end as a shell writes it
        assert main([*small, *SMALL.get(words[2], [])]) == 0, words
    else:
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
