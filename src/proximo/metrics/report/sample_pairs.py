"""Puts the answers to the same prompt before and after training side by side. Not a choice of the nice ones."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from proximo.metrics.run_files import Run, Sample

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePair:
    """One prompt, with its answer at the first evaluation and at the last."""

    prompt: str
    before: Sample | None
    after: Sample | None


def pair_samples(run: Run) -> tuple[SamplePair, ...]:
    """The held-out answers, in the order of the first evaluation; with none, the newest training samples.

    A second answer to a prompt comes after the first ones to all others. With one evaluation answers stand alone.
    """
    samples = run.samples
    if not samples.first_evaluation:
        return tuple(_alone(sample) for sample in _in_turns(reversed(samples.training)))
    if not samples.last_evaluation:
        return tuple(_alone(sample) for sample in _in_turns(samples.first_evaluation))
    waiting: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(samples.last_evaluation):
        waiting[sample.prompt_id].append(sample)
    return tuple(
        SamplePair(
            prompt=sample.prompt,
            before=sample,
            after=waiting[sample.prompt_id].pop() if waiting[sample.prompt_id] else None,
        )
        for sample in _in_turns(samples.first_evaluation)
    )


def _in_turns(samples: Iterable[Sample]) -> list[Sample]:
    return by_turns(samples, lambda sample: sample.prompt_id)


def by_turns(items: Iterable[T], prompt_of: Callable[[T], str]) -> list[T]:
    """The first items of all prompts, then the second ones, each in their order."""
    turns: Counter[str] = Counter()
    order = []
    for item in items:
        order.append((turns[prompt_of(item)], item))
        turns[prompt_of(item)] += 1
    return [item for _, item in sorted(order, key=lambda each: each[0])]


def _alone(sample: Sample) -> SamplePair:
    if sample.step == 0:
        return SamplePair(prompt=sample.prompt, before=sample, after=None)
    return SamplePair(prompt=sample.prompt, before=None, after=sample)
