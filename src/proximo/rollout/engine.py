"""What a rollout engine is: weights go in, prompts go in, responses come out. Not how it is done."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from proximo.errors import TrainingError
from proximo.records import Prompt, Response
from proximo.rollout.sampling import RandomKey, SamplingOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Which weights an engine has."""

    version: int
    """Updates of the policy that they come from."""
    fingerprint: str
    """`fingerprint` of the tensors that were loaded, as the engine has them now; before it casts them, if it does."""


class Engine(Protocol):
    """Samples responses from the policy, with the weights that were loaded last."""

    @property
    def logprobs_are_the_learners(self) -> bool:
        """True where the log-probs of its responses are those of the learner's own pass, within 1e-5.

        They may then serve as the old ones. Else the learner computes the old ones itself.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """`num_samples` responses to each prompt, all of the first prompt first, each with the version that wrote it.

        Every draw is a function of `key`, the place of the prompt in `prompts`, the sample's index and the token's
        position: not of the batch it shared, nor of how many samples its neighbours got. So is the length at which it
        is cut, where `options` leave a range (`RandomKey.limit`). `on_finished` is told of each response as soon as it
        has ended, in whatever order they end, and holds up the others for as long as it takes.

        Raises UserError for a prompt that the model cannot hold together with its response.
        """
        ...

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Sample with these from now on. `tensors`: by name, those that train; the others stay as they are.

        An engine that shares the learner's tensors copies nothing. Raises ModelError for a tensor that has no place in
        its model, before any is loaded.
        """
        ...

    def holds(self) -> Holding | None:
        """What it would sample with now; None before anything was loaded."""
        ...


_SAMPLED = 64
"""Numbers of each tensor that its fingerprint is made of."""


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, types and at most 64 evenly spaced numbers of each tensor, bit for bit.

    It is cheap enough to be asked for in every step, and an optimizer step changes it. It does not see a change of
    single numbers.
    """
    digest, sampled = hashlib.sha256(), dict[torch.dtype, list[Tensor]]()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.reshape(-1)
        sampled.setdefault(tensor.dtype, []).append(flat[:: -(-len(flat) // _SAMPLED) or 1])
    for numbers in sampled.values():
        digest.update(torch.cat(numbers).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def push_weights(engine: Engine, version: int, tensors: Mapping[str, Tensor]) -> None:
    """Load what the engine does not hold yet. Raises TrainingError where it holds something else afterwards."""
    wanted = Holding(version=version, fingerprint=fingerprint(tensors))
    if engine.holds() == wanted:
        return
    engine.load_weights(version, tensors)
    if (held := engine.holds()) != wanted:
        came = "nothing" if held is None else f"version {held.version} with other numbers or names"
        if held is not None and held.version != version:
            came = f"version {held.version}"
        raise TrainingError(
            f"the engine was given the policy's weights of version {version}, but holds {came}: its samples would be "
            "those of another policy"
        )
