"""Learning over several turns: games whose best and random play are computed, with a critic and in groups, over seeds.

    python benchmarks/environments.py --folder runs/environments --seeds 0 1 2

For each game and seed a small model is fine-tuned on random play, and all runs start from it; its seconds are part of
the run with a critic. One thread; a finished run is not repeated. The curves are kept in results/environments.json,
where the folder has no run of a game by a method, those that were there stay.

The method `unmasked` is an experiment, not an option of the product: the tokens of the environment are trained on as if
the policy had written them.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from proximo import Training
from proximo.environments.trajectory import Trajectory
from proximo.recipes.games.rules import Solver

GAMES: dict[str, dict[str, Any]] = {
    "guess:Guess": {},
    "nim:Nim": {},
    # Hands differ more than players do: of 500 the standard error would be 0.13 of the way.
    "kuhn:Kuhn": {"ppo.data.held_out_rows": 8000, "ppo.environment.num_rows": 30000},
    # Paid at the end alone, for one random walk in 92.
    "frozen_lake:FrozenLake": {"ppo.ppo.num_steps": 20, "ppo.ppo.kl.coefficient": 0.02},
    # At 0.3 it is still at its beginning when the steps are over.
    "tic_tac_toe:TicTacToe": {"ppo.ppo.kl.coefficient": 0.05},
    # It has to repeat numbers to the last digit before anything else can be learned; one move is right, and soon found.
    "calculator:Calculator": {"sft.sft.num_epochs": 3},
    "python_tool:PythonTool": {
        **{"sft.data.sources.0.kwargs.num_rows": 6000, "sft.sft.num_epochs": 3},  # each program is run
        **{"ppo.ppo.num_steps": 40, "ppo.ppo.rollout.max_new_tokens": 40},
    },
    "search:Search": {"ppo.ppo.num_steps": 40},
}
"""Game -> overrides of the shipped recipes beside the game itself."""
MORE_STEPS = {("guess:Guess", "groups"): 160, ("tic_tac_toe:TicTacToe", "groups"): 160}
"""Where the 120 steps of the recipe are over before the goal is reached."""
METHODS = {"critic": "games", "groups": "games-groups", "unmasked": "games"}  # -> recipe
ENOUGH = 0.9
RESULTS = Path(__file__).parent / "results" / "environments.json"


def main() -> None:
    """Run what is missing; print and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/environments"), help="where the runs go")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="which seeds")
    parser.add_argument("--games", nargs="+", choices=list(GAMES), default=list(GAMES)[:6], help="which games")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["critic", "groups"], help="which")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for game in options.games:
            for method in options.methods:
                run(options.folder.resolve(), game, method, seed)
    kept = json.loads(RESULTS.read_text())["games"]
    found = {game: found_of(options.folder.resolve(), game) for game in GAMES}
    for game, each in found.items():
        each["runs"] = {method: curves or kept[game]["runs"][method] for method, curves in each["runs"].items()}
    known = {"processor": processor(), "torch": torch.__version__, "games": found}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    print_table(found)


def run(folder: Path, game: str, method: str, seed: int) -> None:
    """One run. That with a critic comes first and is the whole pipeline; the others start from its fine-tuned model."""
    path, name = f"proximo.recipes.games.{game}", f"{game.partition(':')[0]}-{seed}"
    first, last = folder / f"{name}-critic", folder / f"{name}-{method}"
    own = {"sft.data.sources.0.kwargs.game": path, "ppo.environment.path": path, "run.seed": seed, **GAMES[game]}
    fit(first, "games", own)
    if method != "critic":
        if (game, method) in MORE_STEPS:
            own["ppo.ppo.num_steps"] = MORE_STEPS[game, method]
        if method == "unmasked":  # no engine sampled the tokens of the environment
            own["ppo.ppo.guards.max_mismatch"] = None
        with everything_learned() if method == "unmasked" else nullcontext():
            fit(last, METHODS[method], {**own, "sft": None, "ppo.model.path": str(fine_tuned(first))})


def fit(folder: Path, recipe: str, overrides: dict[str, Any]) -> None:
    """A run, unless it is finished; its seconds of the processor, those of the environments included, go beside it."""
    costs = folder.with_suffix(".seconds.json")
    if costs.exists():
        return
    begun, used = time.monotonic(), processor_seconds()
    Training(recipe, {"run.folder": str(folder), "run.tensorboard": False, **overrides}, quiet=True).fit(
        overwrite=True, quiet=True
    )
    seconds = {"processor": processor_seconds() - used, "wall": time.monotonic() - begun}
    costs.write_text(json.dumps({name: round(value, 1) for name, value in seconds.items()}))


def processor_seconds() -> float:
    """Of this process, and of its children that have ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(each.ru_utime + each.ru_stime for each in map(resource.getrusage, who))


@contextmanager
def everything_learned() -> Iterator[None]:
    """Every token of a trajectory counts as the policy's."""
    response = Trajectory.response

    def unmasked(self: Trajectory, *arguments: Any, **options: Any) -> Any:
        self.mask = [True] * len(self.mask)
        return response(self, *arguments, **options)

    with mock.patch.object(Trajectory, "response", unmasked):
        yield


def fine_tuned(folder: Path) -> Path:
    """The model of the first stage, as the pipeline itself takes it."""
    checkpoints = folder / "sft" / "checkpoints"
    pointer = checkpoints / "best" if (checkpoints / "best").exists() else checkpoints / "latest"
    return checkpoints / pointer.read_text().strip() / "policy"


def found_of(folder: Path, game: str) -> dict[str, Any]:
    """What random and the best play score, and the finished runs by method."""
    module, name = game.split(":")
    exact = Solver(getattr(import_module(f"proximo.recipes.games.{module}"), name)()).scores()
    runs = {
        method: [
            curve(file.with_suffix("").with_suffix(""), exact.normalised)
            for file in sorted(folder.glob(f"{module}-[0-9]-{method}.seconds.json"))
        ]
        for method in METHODS
    }
    return {"random": exact.random, "optimum": exact.optimum, "runs": runs}


def curve(run: Path, normalised: Callable[[float], float]) -> dict[str, Any]:
    """The held-out scores of a run, how far it went from random play and how it was held there, and what it cost."""
    kl = json.loads((run / "ppo" / "config.resolved.json").read_text())["ppo"]["kl"]
    lines = map(json.loads, (run / "ppo" / "metrics.jsonl").read_text().splitlines())
    seen = [line for line in lines if "evaluation/score" in line]
    return {
        "seed": int(run.name.split("-")[1]),
        "step": [line["step"] for line in seen],
        "score": [round(line["evaluation/score"], 4) for line in seen],
        "normalised": [round(normalised(line["evaluation/score"]), 3) for line in seen],
        "kl": [round(line["evaluation/kl"], 2) for line in seen],
        "kl_settings": {name: kl[name] for name in ("kind", "coefficient", "adaptive")},
        "seconds": json.loads(run.with_suffix(".seconds.json").read_text()),
    }


def print_table(found: dict[str, dict[str, Any]]) -> None:
    """A row for each game and method: what was reached by each seed."""
    print("| game | random, optimum | method | (score - random) / (optimum - random), by seed | steps | KL | seconds |")
    print("|---|---|---|---|---|---|---|")
    for game, each in found.items():
        for method, curves in each["runs"].items():
            if curves:
                ends = ", ".join(f"{one['normalised'][-1]:.2f}" for one in curves)
                missed = "" if all(one["normalised"][-1] >= ENOUGH for one in curves) else f" (below {ENOUGH})"
                kls = ", ".join(f"{one['kl'][-1]:.1f}" for one in curves)
                seconds = ", ".join(f"{one['seconds']['processor']:.0f}" for one in curves)
                print(
                    f"| {game.partition(':')[2]} | {each['random']:.3f}, {each['optimum']:.3f} | {method} | "
                    f"{ends}{missed} | {curves[0]['step'][-1]} | {kls} | {seconds} |"
                )


def processor() -> str:
    """Its name, where the system says it."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0].partition(': ')[2]}" if names else "unknown"


if __name__ == "__main__":
    main()
