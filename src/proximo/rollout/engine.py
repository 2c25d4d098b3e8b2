"""The interface of a rollout engine: it takes weights and prompts, and returns responses. The push of the weights."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from proximo.distributed.world import local
from proximo.errors import ModelError, TrainingError
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response
from proximo.rollout.sampling import RandomKey, SamplingOptions

if TYPE_CHECKING:  # transformers takes seconds to import
    from proximo.models.language import LanguageModel

_SAMPLED = 64
"""Entries of each tensor that enter its fingerprint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Identifies the weights that an engine holds."""

    version: int
    """Number of policy updates that produced these weights."""
    fingerprint: str
    """`fingerprint` of the tensors as they were given, not as the engine may have cast them."""


class Engine(Protocol):
    """Samples responses from the policy, with the most recently loaded weights."""

    @property
    def logprobs_are_the_learners(self) -> bool:
        """True if the log-probs of its responses equal those of the learner's own forward pass, within 1e-5.

        They can then be used as PPO's old log-probs. Otherwise the learner computes the old log-probs itself.
        """
        ...

    @property
    def max_logprob_error(self) -> float | None:
        """Largest difference between its log-probs and the learner's that rounding explains; None: not compared.

        After each push a few fixed prompts are sampled to compare them.
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
        """Sample `num_samples` responses to each prompt, ordered by prompt. Each records its policy version.

        Every draw is a function of `key`, the index of the prompt in `prompts`, the sample's index and the token's
        position. It depends neither on the rest of the batch nor on the number of samples of other prompts. The same
        holds for a randomly drawn length limit (`RandomKey.limit`). `on_finished` is called with each response when it
        ends, in the order in which they end. Sampling waits until the callback returns.

        Raises UserError if a prompt and its response together are too long for the model.
        """
        ...

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Sample with these weights from now on. `tensors`: name -> trained tensor; all other tensors are kept.

        On several ranks a tensor may be gathered from them when it is asked for: ask for each once, in the order of
        `tensors`; `shapes_of` gathers none. An engine that shares the learner's tensors copies nothing. Raises
        ModelError if the engine's model has no tensor of that name and shape; nothing is loaded then.
        """
        ...

    def holds(self) -> Holding | None:
        """The weights that the engine would sample with now; None before the first load."""
        ...


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine with its own metrics."""

    def statistics(self) -> Mapping[str, MetricValue]:
        """The metrics since the last call."""
        ...


@runtime_checkable
class SharingEngine(Engine, Protocol):
    """An engine that may be on every rank of a run, each of which then samples a share of the prompts."""

    @property
    def samples_a_share(self) -> bool:
        """Whether it is on every rank; else rank 0 alone samples."""
        ...

    def samples_from(self, model: "LanguageModel") -> bool:
        """Whether this model's own tensors are those that it samples with."""
        ...


def statistics_of(engine: Engine) -> dict[str, MetricValue]:
    """The metrics of an engine since the last call; empty for an engine without metrics."""
    return dict(engine.statistics()) if isinstance(engine, MeasuredEngine) else {}


def versions_of_tokens(starts: Sequence[tuple[int, int]], num_tokens: int) -> tuple[int, ...]:
    """The version of each token. `starts`: versions, each with the index of its first token, in order."""
    ends = [start for _, start in starts[1:]] + [num_tokens]
    return tuple(
        version for (version, start), end in zip(starts, ends, strict=True) for _ in range(start, min(end, num_tokens))
    )


def fingerprint(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Hex digest of the names, shapes, dtypes and at most 64 evenly spaced entries of each tensor.

    `dtype`: of the tensors as if they were of this type.
    It is cheap enough to compute in every step, and an optimizer step changes it. A change of a few single entries may
    go unnoticed. Of a sharded tensor it reads this rank's part.
    """
    found = Fingerprint(dtype)
    for name, tensor in tensors.items():
        found.add(name, tensor)
    return found.hexdigest()


class Fingerprint:
    """See `fingerprint`, for tensors that come one by one, in any order."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._found: dict[str, tuple[tuple[int, ...], torch.dtype, Tensor]] = {}

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Note the entries of a tensor."""
        flat = local(tensor).reshape(-1)
        self.add_entries(name, tensor, flat[:: distance_of_entries(len(flat))])

    def add_entries(self, name: str, tensor: Tensor, entries: Tensor) -> None:
        """Note a tensor with known entries."""
        given = self._dtype or tensor.dtype
        # A copy, since a view would keep the whole tensor.
        self._found[name] = tuple(tensor.shape), given, entries.to(given, copy=True)

    def hexdigest(self) -> str:
        """The digest of what was added."""
        digest, sampled = hashlib.sha256(), dict[torch.dtype, list[Tensor]]()
        for name, (shape, dtype, entries) in sorted(self._found.items()):
            digest.update(f"{name} {shape} {dtype};".encode())
            sampled.setdefault(dtype, []).append(entries)
        for numbers in sampled.values():
            digest.update(torch.cat(numbers).cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def distance_of_entries(num_entries: int) -> int:
    """Between two entries of a tensor that enter its fingerprint."""
    return -(-num_entries // _SAMPLED) or 1


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, without a tensor that would be gathered from the ranks."""
    known: dict[str, tuple[int, ...]] | None = getattr(tensors, "shapes", None)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()} if known is None else known


def check_places(wanted: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError for a tensor of which an engine's own model has none of that name and shape."""
    for name, shape in wanted.items():
        if own.get(name) != shape:
            there = f"shape {own[name]}" if name in own else "no tensor of that name"
            raise ModelError(f"{name} has shape {shape}, and in the engine's model {there}")


def push_weights(
    engine: Engine, version: int, tensors: Mapping[str, Tensor], *, fingerprint_of_all: str | None = None
) -> bool:
    """Load the weights unless the engine holds them already; False then.

    `fingerprint_of_all`: that of the tensors, if it is known. Raises TrainingError if it then holds other weights.
    """
    wanted = Holding(version=version, fingerprint=fingerprint_of_all or fingerprint(tensors))
    if engine.holds() == wanted:
        return False
    engine.load_weights(version, tensors)
    if (held := engine.holds()) != wanted:
        actual = "nothing" if held is None else f"version {held.version} with other numbers or names"
        if held is not None and held.version != version:
            actual = f"version {held.version}"
        raise TrainingError(
            f"the engine was given the policy's weights of version {version}, but holds {actual}: its samples would be "
            "those of another policy"
        )
    return True


class EngineOfRanks(ABC):
    """An engine that all ranks call (ranks_engine.py)."""

    @abstractmethod
    def push(self, version: int, model: "LanguageModel") -> bool:
        """See `push_weights`, with the trained tensors of a model that may be sharded."""

    @abstractmethod
    def sampling_with(self, model: "LanguageModel") -> AbstractContextManager[None]:
        """See the function `sampling_with` of this module."""


def push_to(engine: Engine, model: "LanguageModel", *, version: int) -> bool:
    """Load the whole trained weights of `model` into its engine. Every rank has to call it. See `push_weights`."""
    if isinstance(engine, EngineOfRanks):
        return engine.push(version, model)
    with model.backbone.gathered():
        return push_weights(engine, version, dict(model.trainable_parameters()))


def sampling_with(engine: Engine, model: "LanguageModel") -> AbstractContextManager[None]:
    """Inside, the engine may sample: the weights of `model` are whole where it reads them."""
    return engine.sampling_with(model) if isinstance(engine, EngineOfRanks) else model.backbone.gathered()
