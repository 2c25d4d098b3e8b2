"""Grades on honest, sleeping, flooding, forking and greedy programs, mixed, in two passes: what they should be, and
whether both passes say the same.

    python benchmarks/mixed_programs.py --programs 10000

Exit status 1 where an honest program loses, another one wins, a grade is missing, or the passes differ. How long it
takes depends on what else the machine does; the grades must not.
"""

import argparse
import collections
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proximo.config.rewards.verifiers import CodeRewardConfig
from proximo.records import Finish, Prompt, Response
from proximo.rewards.verifier_reward import VerifierReward
from proximo_verifiers.verifier import ScoreState

RIGHT = "def double(x):\n    return 2 * x\n"
COMPARED = {"test_list": ["assert double(1) == 2", "assert double(-3) == -6", "assert double(0) == 0"]}
RUN = COMPARED | {"test_setup_code": "len('')"}
"""What says nothing, but has the tests run in a process of their own."""
STEP = 500
"""Programs that are graded at once, as in a step of a run."""


@dataclass(frozen=True)
class Kind:
    """Programs of one kind."""

    name: str
    share: float
    """Of all."""
    source: str
    wins: bool
    body: str = RIGHT


KINDS = (
    Kind("honest", 0.70, "", wins=True),
    Kind("honest, computes", 0.03, "total = sum(i * i for i in range(2_000_000))\n", wins=True),
    Kind("honest, sleeps a little", 0.005, "import time\ntime.sleep(0.6)\n", wins=True),
    Kind("honest, 1 MiB of output", 0.02, "import sys\nsys.stdout.write('x' * 2**20)\nsys.stdout.flush()\n", wins=True),
    Kind("honest, 100 MiB of memory", 0.02, "held = bytearray(100 * 2**20)\n", wins=True),
    Kind("honest, threads", 0.02, "import threading\nfor _ in '1234': threading.Thread(target=len, args='x').start()\n",
         wins=True),
    Kind("wrong", 0.06, "", wins=False, body="def double(x):\n    return 2\n"),
    Kind("sleeps", 0.01, "import time\ntime.sleep(1000)\n", wins=False),
    Kind("sleeps in a test", 0.005, "import time\n", wins=False, body="def double(x):\n    time.sleep(1000)\n"),
    Kind("floods by a byte", 0.03, "import sys\nsys.stdout.write('x' * (2**20 + 1))\nsys.stdout.flush()\n", wins=False),
    Kind("floods without end", 0.02, "import os\nwhile True: os.write(2, b'x' * 65536)\n", wins=False),
    Kind("too much memory", 0.03, "held = []\nwhile True: held.append(bytearray(2**24))\n", wins=False),
    Kind("forks", 0.03, "import os\nwhile True: os.fork()\n", wins=False),
    Kind("too many files", 0.01, "import os\nwhile True: os.dup(1)\n", wins=False),
    Kind("loops", 0.01, "while True: pass\n", wins=False),
)  # fmt: skip


def mixture(count: int, seed: int) -> list[tuple[Kind, Response]]:
    """Programs of all kinds in an order by chance, each with a text of its own so that none is remembered."""
    draw = random.Random(seed)
    kinds = [kind for kind in KINDS for _ in range(max(1, round(kind.share * count)))]
    draw.shuffle(kinds)
    return [(kind, _response(number, kind, draw.choice((COMPARED, RUN)))) for number, kind in enumerate(kinds)]


def grade(responses: Sequence[Response], config: CodeRewardConfig) -> list[tuple[float, ScoreState, str | None]]:
    """Score, state and reason of each, in steps, by workers that are made for it."""
    source = VerifierReward(
        config.verifier_path(),
        name=config.name,
        options=config.verifier_options(),
        num_workers=config.workers or 1,
        answer_seconds=config.answer_seconds,
        step_seconds=config.step_seconds,
    )
    grades = []
    try:
        for start in range(0, len(responses), STEP):
            scored = source.score(responses[start : start + STEP])
            grades += [(each.score, each.state, each.reason) for each in scored]
    finally:
        source.close()
    return grades


def misgraded(kinds: Sequence[Kind], grades: Sequence[tuple[float, ScoreState, str | None]]) -> list[str]:
    """What each grade that is not as it must be is about."""
    return [
        f"{kind.name}: {score} ({state.value}, {reason})"
        for kind, (score, state, reason) in zip(kinds, grades, strict=True)
        if score != float(kind.wins)
    ]


def _response(number: int, kind: Kind, row: dict[str, object]) -> Response:
    prompt = Prompt(id=f"p{number}", token_ids=(1,), text="", metadata=row)
    return Response(
        prompt=prompt,
        sample_index=0,
        token_ids=(2,),
        logprobs=torch.zeros(1),
        response_mask=torch.ones(1, dtype=torch.bool),
        finish=Finish.EOS,
        policy_version=0,
        text=f"{kind.source}{kind.body}# {number}\n",
    )


def main() -> int:
    """Prints a table, and what was misgraded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-seconds", type=float, default=2.0)
    parser.add_argument("--idle-seconds", type=float, default=2.0)
    given = parser.parse_args()
    config = CodeRewardConfig(
        kind="code",
        form="asserts",
        program="response",
        workers=given.workers,
        cpu_seconds=given.cpu_seconds,
        idle_seconds=given.idle_seconds,
    )
    pairs = mixture(given.programs, given.seed)
    kinds, responses = [kind for kind, _ in pairs], [response for _, response in pairs]
    passes = []
    for number in (1, 2):
        start = time.monotonic()
        passes.append(grade(responses, config))
        seconds = time.monotonic() - start
        print(f"pass {number}: {len(responses)} programs in {seconds:.0f} s, {len(responses) / seconds:.1f} a second",
              flush=True)  # fmt: skip
    wrong = [f"pass {number}: {line}" for number, done in enumerate(passes, 1) for line in misgraded(kinds, done)]
    differ = [
        f"{kind.name}: {first[:2]} and {second[:2]}"
        for kind, first, second in zip(kinds, *passes, strict=True)
        if first[:2] != second[:2]
    ]
    missing = sum(state is ScoreState.INFRASTRUCTURE_FAULT for done in passes for _, state, _ in done)
    print(f"{len(wrong)} misgraded, {missing} without a grade, {len(differ)} that differ between the passes")
    print("| programs | how many | won in pass 1 | won in pass 2 | reasons in pass 2 |\n|---|---|---|---|---|")
    for kind in KINDS:
        mine = [number for number, each in enumerate(kinds) if each is kind]
        won = [sum(done[number][0] == 1 for number in mine) for done in passes]
        reasons = collections.Counter((passes[1][number][2] or "none").split(" in test")[0][:60] for number in mine)
        said = "; ".join(f"{reason} ({times})" for reason, times in reasons.most_common(3))
        print(f"| {kind.name} | {len(mine)} | {won[0]} | {won[1]} | {said} |")
    print(*wrong[:20], *differ[:20], sep="\n")
    return 1 if wrong or missing or differ else 0


if __name__ == "__main__":
    sys.exit(main())
