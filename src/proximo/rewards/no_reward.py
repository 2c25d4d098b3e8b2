"""The source of a run that learns from its reference alone (docs/distillation.md)."""

from collections.abc import Sequence

from proximo.records import Response, Scored


class NoReward:
    """Gives every response a score of 0, which no metric shows.

    `PPOTrainer(reference=teacher, reward=NoReward())` learns from the KL to the teacher alone.
    """

    name = "none"
    on_all_ranks = True

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """A score of 0 for each response."""
        return [Scored(response=response, score=0.0) for response in responses]
