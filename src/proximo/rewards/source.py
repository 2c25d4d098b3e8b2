"""What every source of scores looks like. Not the shaping of scores into rewards: that is algorithms/shaping.py."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from proximo.records import Response, Scored


@runtime_checkable
class RewardSource(Protocol):
    """Gives each response one score, with the named parts that it was made of."""

    name: str
    """Names this source's component in metrics and samples."""

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One `Scored` per response, in order. What could not be scored is said so, never given a number."""
        ...
