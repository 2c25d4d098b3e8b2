"""What a rollout engine is: prompts go in, responses come out. Not how it is done."""

from collections.abc import Callable, Sequence
from typing import Protocol

from proximo.records import Prompt, Response
from proximo.rollout.sampling import RandomKey, SamplingOptions


class Engine(Protocol):
    """Samples responses from the policy."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        policy_version: int = 0,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """`num_samples` responses to each prompt, all of the first prompt first.

        Every draw is a function of `key`, the place of the prompt in `prompts`, the sample's index and the token's
        position: not of the batch it shared, nor of how many samples its neighbours got. So is the length at which it
        is cut, where `options` leave a range (`RandomKey.limit`). `on_finished` is told of each response as soon as it
        has ended, in whatever order they end, and holds up the others for as long as it takes.

        Raises UserError for a prompt that the model cannot hold together with its response.
        """
        ...
