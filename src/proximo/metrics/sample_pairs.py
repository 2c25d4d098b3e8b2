"""Puts the answers to the same prompt before and after training side by side. Not a choice of the nice ones."""

from collections import defaultdict
from dataclasses import dataclass

from proximo.metrics.run_files import Run, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePair:
    """One prompt, with its answer at the first evaluation and at the last."""

    prompt: str
    before: Sample | None
    after: Sample | None


def pair_samples(run: Run) -> tuple[SamplePair, ...]:
    """The held-out answers, in the order of the first evaluation; several answers to a prompt keep their order.

    With one evaluation the answers stand alone; with none, the newest training samples do.
    """
    samples = run.samples
    if not samples.first_evaluation:
        return tuple(_alone(sample) for sample in reversed(samples.training))
    if not samples.last_evaluation:
        return tuple(_alone(sample) for sample in samples.first_evaluation)
    waiting: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(samples.last_evaluation):
        waiting[sample.prompt_id].append(sample)
    return tuple(
        SamplePair(
            prompt=sample.prompt,
            before=sample,
            after=waiting[sample.prompt_id].pop() if waiting[sample.prompt_id] else None,
        )
        for sample in samples.first_evaluation
    )


def _alone(sample: Sample) -> SamplePair:
    if sample.step == 0:
        return SamplePair(prompt=sample.prompt, before=sample, after=None)
    return SamplePair(prompt=sample.prompt, before=None, after=sample)
