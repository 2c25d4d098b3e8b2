"""Verifications per second of processor time: in this process, and through a pool of one worker.

    PROXIMO_TEST_DATA=FOLDER python benchmarks/verifiers.py

`FOLDER` holds gsm8k/labelled_solutions_dev.jsonl, math/math_cot_labelled_dev.jsonl and countdown/countdown_dev.jsonl.
Every response is graded once. The last column is by the clock, and depends on what else the machine does.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proximo.config.rewards.verifiers import CountdownRewardConfig, MathsRewardConfig, VerifierRewardConfig
from proximo.records import Finish, Prompt, Response
from proximo.rewards.verifier_reward import VerifierReward
from proximo_verifiers.maths.countdown import CountdownVerifier
from proximo_verifiers.maths.verifier import MathsVerifier
from proximo_verifiers.verifier import Answer, Verifier

WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@dataclass(frozen=True)
class Case:
    """Answers of one kind, and the verifier that grades them."""

    name: str
    config: VerifierRewardConfig
    verifier: Verifier
    answers: Sequence[Answer]


def rows(*parts: str) -> list[dict[str, Any]]:
    """A file of the real data."""
    path = Path(os.environ["PROXIMO_TEST_DATA"], *parts)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def maths_cases() -> list[Case]:
    """Numbers behind a label, LaTeX in boxes, and countdown."""
    label = MathsRewardConfig(kind="maths", answer_from=("label",), symbolic="never")
    boxed = MathsRewardConfig(kind="maths", symbolic="never")
    countdown = CountdownRewardConfig(kind="countdown")
    gsm8k = rows("gsm8k", "labelled_solutions_dev.jsonl")
    latex = rows("math", "math_cot_labelled_dev.jsonl")
    problems = rows("countdown", "countdown_dev.jsonl")
    return [
        Case(
            "gsm8k, `A: N`",
            label,
            MathsVerifier(**label.verifier_options()),
            [Answer(text=row["solution"], prompt="", reference=row["gold"]) for row in gsm8k],
        ),
        Case(
            "MATH, boxed LaTeX",
            boxed,
            MathsVerifier(**boxed.verifier_options()),
            [Answer(text=row["response"], prompt="", reference=row["gold"]) for row in latex],
        ),
        Case(
            "countdown",
            countdown,
            CountdownVerifier(**countdown.verifier_options()),
            [Answer(text=row["solution"], prompt="", metadata=row) for row in problems],
        ),
    ]


def in_process(case: Case) -> float:
    """Verifications per second of processor time."""
    start = time.process_time()
    for answer in case.answers:
        case.verifier.grade(answer)
    return len(case.answers) / (time.process_time() - start)


def through_the_pool(case: Case) -> tuple[float, float]:
    """Verifications with one worker per second of processor time, its own and the trainer's; and per second."""
    responses = [response_of(answer, index) for index, answer in enumerate(case.answers)]
    start_and_one, _ = seconds(case, responses[:1])
    processor, clock = seconds(case, responses)
    return (len(responses) - 1) / (processor - start_and_one), (len(responses) - 1) / clock


def seconds(case: Case, responses: Sequence[Response]) -> tuple[float, float]:
    """Processor time of a source with one worker, from start to end; and time by the clock of all answers but one."""
    before = used()
    options = case.config.verifier_options()
    source = VerifierReward(case.config.verifier_path(), name="graded", options=options, num_workers=1)
    source.score(responses[:1])
    start = time.perf_counter()
    source.score(responses[1:])
    clock = time.perf_counter() - start
    source.close()
    return used() - before, clock


def used() -> float:
    """Seconds of processor time of this process and of those that it has waited for."""
    return sum(times.ru_utime + times.ru_stime for times in map(resource.getrusage, WHOSE))


def response_of(answer: Answer, index: int) -> Response:
    """As the engine would hand it over."""
    metadata = {**answer.metadata, "row": index}  # so that no two are one and the same question
    return Response(
        prompt=Prompt(id=f"{index}", token_ids=(1,), text="", answer=answer.reference, metadata=metadata),
        sample_index=0,
        token_ids=(2,),
        logprobs=torch.zeros(1),
        response_mask=torch.ones(1, dtype=torch.bool),
        finish=Finish.EOS,
        policy_version=0,
        text=answer.text,
    )


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| answers | number | in this process | one worker | one worker, by the clock |")
    print("|---|---|---|---|---|")
    for case in maths_cases():
        figures = (in_process(case), *through_the_pool(case))
        print(f"| {case.name} | {len(case.answers)} |", " | ".join(f"{each:,.0f}" for each in figures), "|")


if __name__ == "__main__":
    main()
