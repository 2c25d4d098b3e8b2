"""Makes `kept/format-N.tar.gz`: runs that ended between two steps, in today's format, for later versions to resume.

    python tests/resume/keep_runs.py

To be run where the number of the format (`proximo.checkpoint.manifest.FORMAT`) was raised, and then only: an archive of
a format is not made anew, since it stands for the runs of that time. It holds a PPO run with much of what a state can
hold, an SFT run, and their inputs; both have two of four steps behind them, and the lines of all four in metrics.jsonl.
"""

import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from builders import tiny_language_model, tiny_tokenizer
from proximo.checkpoint.manifest import FORMAT
from proximo.checkpoint.versions import installed_version
from proximo.models.language import LanguageModel
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.run.options import RunOptions
from tiny_runs import run

KEPT = Path(__file__).parent / "kept"
SAVED_STEP, NUM_STEPS = 2, 4
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 32}
SCORING = """\
def vowels(prompts, responses, metadata):
    return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in responses]
"""


def main() -> None:
    archive = KEPT / f"format-{FORMAT}.tar.gz"
    if archive.exists():
        sys.exit(f"{archive} is there, and stays as it is")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        make_inputs()
        # Where it was made is nobody's business: whoever resumes it allows for another environment anyway.
        environment = {"proximo": installed_version("proximo"), "device": "cpu"}
        with patch("proximo.run.loop.describe_environment", lambda **_: dict(environment)):
            for kind, recipe in (("sft", sft()), ("ppo", ppo())):
                assert run(kind, recipe, RunOptions(quiet=True)) == 0
                end_early(Path(kind))
        pack(Path(folder), archive)
    print(f"{archive}: {archive.stat().st_size:,} bytes")


def make_inputs() -> None:
    start = tiny_language_model(seed=1, **SIZES)
    scalar = scalar_from_language_model(LanguageModel(tiny_language_model(seed=2, **SIZES)), HeadStart.NORMAL, seed=3)
    for model, place in ((start, "start"), (scalar.model, "scorer")):
        save_pretrained(model, Path(place))
        tiny_tokenizer().save_pretrained(place)
    Path("kept_scoring.py").write_text(SCORING)
    rows = [{"prompt": f"{'abcdefghijkl'[number]}b ", "response": "ae" * (1 + number % 3)} for number in range(12)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def common(kind: str) -> dict[str, Any]:
    every = {"save_every_steps": SAVED_STEP, "evaluate_every_steps": 1, "tensorboard": False}
    return {
        "run": {"folder": kind, "seed": 5, "device": "cpu", "num_threads": 1, **every},
        "data": {"sources": [{"path": "rows.jsonl"}], "held_out_rows": 2},
    }


def optimizer() -> dict[str, Any]:
    return {"learning_rate": 1e-2, "schedule": "cosine", "warmup_updates": 2}


def sft() -> dict[str, Any]:
    return {
        **common("sft"),
        "model": {"path": "start"},
        "sft": {"num_epochs": 2, "examples_per_step": 5, "tokens_per_microbatch": 40, "optimizer": optimizer()},
    }


def ppo() -> dict[str, Any]:
    recipe = common("ppo")
    recipe["data"]["filter"] = {"below": 0.05, "max_fraction": 0.2}
    return {
        **recipe,
        "model": {"path": "start"},
        "value": {"init_from": "reward"},
        "reward": [
            {"kind": "model", "path": "scorer"},
            {"kind": "function", "function": "kept_scoring:vowels", "weight": 4.0},
        ],
        "ppo": {
            "num_steps": NUM_STEPS,
            "prompts_per_step": 3,
            "tokens_per_microbatch": 40,
            "kl": {"coefficient": 0.1, "target": 0.5, "horizon": 20},
            "score": {"normalise": "standardise"},
            "value_loss": {"normalise": "exponential"},
            "rollout": {"max_new_tokens": 3},
            "policy_optimizer": optimizer(),
            "value_optimizer": optimizer(),
        },
    }


def end_early(folder: Path) -> None:
    """Leave what a run has that was killed after the first save, but for the lines of the log."""
    checkpoints, first = folder / "checkpoints", f"step-{SAVED_STEP:06d}"
    shutil.rmtree(checkpoints / f"step-{NUM_STEPS:06d}")
    for pointer in ("latest", "best"):
        (checkpoints / pointer).write_text(f"{first}\n")
    for name in ("report.html", "log.txt", "outcome.json"):
        (folder / name).unlink()
    (folder / ".proximo-run").write_text("")


def pack(folder: Path, archive: Path) -> None:
    """The files in order, without owners and times."""
    with tarfile.open(archive, "w:gz") as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                entry.size = path.stat().st_size
                packed.addfile(entry, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    main()
