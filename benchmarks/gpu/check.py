"""Checks Proximo on an accelerator in one short run: what is right first, then whole runs, then speed beside peers.

    python benchmarks/gpu/check.py --device cuda --budget 440 --out FOLDER
    python benchmarks/gpu/check.py --device cpu --smoke --out FOLDER      the same code on a CPU with tiny sizes

It needs a checkout of the project, and of its folders `src`, `tests` and `benchmarks` alone. A copy of this file runs
in the root of a checkout.
Sections run in the order of their value, each within a limit of its own. One that fails is recorded with its traceback,
and the next goes on. FOLDER/gpu.json and FOLDER/gpu.txt are written after each. README.md says how to read them.
Exit status 1: a section that ran has failed. 2: nothing was run.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.extend(str(root / "benchmarks") for root in (Path(__file__).resolve().parents[2], Path.cwd()))
sys.path.extend([f"{folder}/peers" for folder in sys.path[-2:]])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic kernels; read at the first product

import torch
from gpu.bench import Bench
from gpu.beside_peers import peers_generate, peers_training, peers_trl
from gpu.fused_sampler import fused_sampler
from gpu.grouped_attention import attention
from gpu.outcomes import Outcome, Section, run_section, save
from gpu.right import correctness, environment, ppo_steps, sampler_and_learner
from gpu.speed import compiled, decode_profile, options, plan, rollout_speed, table, training_profile, training_speed
from gpu.whole_runs import project_tests, ranks, real_runs

SECTIONS: dict[Section, int] = {
    environment: 45,
    correctness: 45,
    ppo_steps: 60,
    attention: 20,
    fused_sampler: 30,
    sampler_and_learner: 30,
    rollout_speed: 60,
    decode_profile: 25,
    training_speed: 75,
    training_profile: 40,
    plan: 90,
    real_runs: 150,
    project_tests: 90,
    table: 200,
    peers_training: 30,
    peers_generate: 90,
    options: 60,
    ranks: 120,
    peers_trl: 150,
    compiled: 150,
}
"""Seconds that each may take on a GPU, in the order of their value. The last of a run may take what is left."""


def names(text: str) -> list[str]:
    """Sections, separated by commas. Raises ArgumentTypeError for one that there is not."""
    known = [section.__name__ for section in SECTIONS]
    given = [name for name in text.split(",") if name]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no section {', '.join(unknown)}; there are {', '.join(known)}")
    return given


def chosen(*, only: Sequence[str], skip: Sequence[str]) -> list[Section]:
    """`environment` measures what the shares of the others are of, and is left out by `skip` alone."""
    wanted = {*only, environment.__name__} if only else {section.__name__ for section in SECTIONS}
    return [section for section in SECTIONS if section.__name__ in wanted - set(skip)]


def check(bench: Bench, sections: Sequence[Section], *, out: Path) -> dict[str, Outcome]:
    """All of them, whatever fails."""
    outcomes: dict[str, Outcome] = {}
    for number, section in enumerate(sections):
        name, later = section.__name__, sum(SECTIONS[each] for each in sections[number + 1 :])
        print(f"-- {name}", flush=True)
        limit = max(SECTIONS[section], bench.left() - later)
        outcomes[name] = run_section(section, bench, limit_seconds=limit)
        save(outcomes, out)
        try:
            bench.free()
        except RuntimeError as error:
            lost = Outcome(status="skipped", reason=f"the device no longer answers: {error}"[:300])
            outcomes |= {each.__name__: lost for each in sections[number + 1 :]}
            save(outcomes, out)
            break
    return outcomes


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="as run.device of a recipe")
    parser.add_argument("--budget", type=float, default=440, help="seconds for all sections")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for gpu.json and gpu.txt")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, and no limit of time")
    parser.add_argument("--only", type=names, default=[], help="sections, separated by commas")
    parser.add_argument("--skip", type=names, default=[], help="sections to leave out")
    parser.add_argument("--list", action="store_true", help="name the sections, and run none")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{section.__name__}: at most {seconds} s" for section, seconds in SECTIONS.items()))
        return 0
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("the check needs a GPU with CUDA, and torch finds none: nothing was run", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory(prefix="gpu_check", ignore_cleanup_errors=True) as work:
        bench = Bench(device=given.device, work=Path(work), smoke=given.smoke, budget=given.budget)
        outcomes = check(bench, chosen(only=given.only, skip=given.skip), out=given.out)
    print((given.out / "gpu.txt").read_text()[-11_000:])
    return 1 if any(outcome.status == "failed" for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
