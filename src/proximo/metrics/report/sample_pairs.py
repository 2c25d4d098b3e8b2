"""Pairs the responses to the same prompt before and after training, in a fixed order, without selection."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from proximo.metrics.run_files import Run, Sample

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePair:
    """One prompt with its responses at the first and at the last evaluation."""

    prompt: str
    before: Sample | None
    after: Sample | None


def pair_samples(run: Run) -> tuple[SamplePair, ...]:
    """Held-out responses in the order of the first evaluation, or without evaluations the newest training samples.

    Prompts take turns: the first responses of all prompts come before the second ones. With a single evaluation, or
    training samples, one side of each pair is None.
    """
    samples = run.samples
    if not samples.first_evaluation:
        return tuple(_alone(sample) for sample in _in_turns(reversed(samples.training)))
    if not samples.last_evaluation:
        return tuple(_alone(sample) for sample in _in_turns(samples.first_evaluation))
    unpaired: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(samples.last_evaluation):
        unpaired[sample.prompt_id].append(sample)
    return tuple(
        SamplePair(
            prompt=sample.prompt,
            before=sample,
            after=unpaired[sample.prompt_id].pop() if unpaired[sample.prompt_id] else None,
        )
        for sample in _in_turns(samples.first_evaluation)
    )


def _in_turns(samples: Iterable[Sample]) -> list[Sample]:
    return round_robin(samples, lambda sample: sample.prompt_id)


def round_robin(items: Iterable[T], prompt_of: Callable[[T], str]) -> list[T]:
    """Round robin over prompts: the first items of all prompts, then the second ones, each in their original order."""
    turns: Counter[str] = Counter()
    order = []
    for item in items:
        order.append((turns[prompt_of(item)], item))
        turns[prompt_of(item)] += 1
    return [item for _, item in sorted(order, key=lambda entry: entry[0])]


def _alone(sample: Sample) -> SamplePair:
    if sample.step == 0:
        return SamplePair(prompt=sample.prompt, before=sample, after=None)
    return SamplePair(prompt=sample.prompt, before=None, after=sample)
