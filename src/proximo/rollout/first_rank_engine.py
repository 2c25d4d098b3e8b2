"""A user's engine on several ranks."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from proximo.distributed.world import current
from proximo.errors import TrainingError
from proximo.metrics.values import MetricValue
from proximo.models.language import LanguageModel
from proximo.records import Prompt, Response
from proximo.rollout.engine import Engine, Holding, push_weights, statistics_of
from proximo.rollout.response_bytes import as_sent, from_bytes, to_bytes
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.streamed_weights import StreamedWeights


class FirstRankEngine:
    """A user's engine on several ranks: only rank 0 calls it, and all ranks get its responses."""

    def __init__(self, own: Engine) -> None:
        self.own = own
        self._exact, self._error = current().once(
            lambda: (bool(own.logprobs_are_the_learners), own.max_logprob_error), what="the engine's precision"
        )

    @property
    def logprobs_are_the_learners(self) -> bool:
        """See `Engine.logprobs_are_the_learners`; read once on rank 0."""
        return self._exact

    @property
    def max_logprob_error(self) -> float | None:
        """See `Engine.max_logprob_error`; read once on rank 0."""
        return self._error

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`. Rank 0 loads its tensors, which must be whole."""
        current().once(lambda: self.own.load_weights(version, tensors), what="loading weights into the engine")

    def push(self, version: int, model: LanguageModel) -> bool:
        """See `push_weights`. Sharded tensors are gathered layer by layer, and only for an engine that lacks them."""
        weights = StreamedWeights(dict(model.trainable_parameters()))
        whole = weights.fingerprint()
        return weights.give(lambda: push_weights(self.own, version, weights, fingerprint_of_all=whole))

    def holds(self) -> Holding | None:
        """The weights that the engine of rank 0 holds; every rank has to ask."""
        return current().once(self.own.holds, what="the weights that the engine holds")

    def statistics(self) -> dict[str, MetricValue]:
        """See `statistics_of`: those of rank 0."""
        return current().once(lambda: statistics_of(self.own), what="statistics of the engine")

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """See `Engine.generate`. Every rank gets the responses of rank 0."""
        kept: list[Response] = []

        def run() -> bytes:
            kept[:] = self.own.generate(
                prompts, num_samples=num_samples, options=options, key=key, on_finished=on_finished
            )
            return to_bytes(_numbered(kept, prompts, num_samples))

        message = current().once(run, what="responses of the engine")
        sent = [response for _, response in from_bytes(message, prompts)]
        return as_sent(kept, sent) if kept else sent


def _numbered(responses: Sequence[Response], prompts: Sequence[Prompt], num_samples: int) -> list[tuple[int, Response]]:
    """Each response with the index of its prompt. Raises TrainingError unless they are ordered by prompt."""
    if len(responses) != len(prompts) * num_samples:
        raise TrainingError(
            f"the engine must give {num_samples} responses to each of {len(prompts)} prompts, it gave {len(responses)}"
        )
    for number, response in enumerate(responses):
        asked = prompts[number // num_samples]
        if response.prompt.id != asked.id:
            raise TrainingError(
                f"the engine must order its responses by prompt: response {number} is to prompt "
                f"{response.prompt.id!r}, not {asked.id!r}"
            )
    return [(number // num_samples, response) for number, response in enumerate(responses)]
