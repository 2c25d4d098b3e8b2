"""Packed sequences: laid end to end without padding, in balanced batches under a token budget.

Tokens with which several sequences begin are stored once, as a prefix. They are computed once, forwards and backwards,
since causal layers give the same results for every sequence. So sequences that share a prefix stay in one batch if the
budget allows it. Loads and budgets count computed tokens. A unit is the indices of such sequences, or of one that
shares nothing.

T counts the tokens of a batch, S its segments, N the response tokens among T.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import add
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from proximo.distributed.world import current
from proximo.records import Continuation, SamplingMask


@dataclass(frozen=True, kw_only=True)
class Packed:
    """S segments, concatenated to one row of T tokens.

    A segment is a whole sequence, a prefix that several sequences share, or the rest of one sequence after a prefix.
    """

    token_ids: Int64[Tensor, "tokens"]
    position_ids: Int64[Tensor, "tokens"]
    """0, 1, 2, ... within each sequence: the segment after a prefix continues the prefix's count."""
    lengths: tuple[int, ...]
    """[S] tokens of each segment, each at least 1; their sum is T."""
    prefixes: tuple[int | None, ...] = ()
    """[S] the prefix that a segment follows, by index; None for a segment that begins a sequence. A prefix follows no
    other segment. Empty if no sequences share a prefix."""
    is_filler: bool = False
    """True if the row is one filler token without any sequence."""

    @property
    def num_uses(self) -> Tensor:
        """[T] int64: the number of sequences that each token is part of."""
        followers = Counter(self.prefixes)
        uses = [0 if self.is_filler else followers[segment] or 1 for segment in range(len(self.lengths))]
        return send(torch.from_numpy(np.repeat(uses, self.lengths)), self.token_ids.device)

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, T."""
        return self.token_ids.shape[0]

    @property
    def cu_seqlens(self) -> Tensor:
        """[S + 1] int32: the index at which each segment begins, and T."""
        return cumulative_lengths(self.lengths, self.token_ids.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with its prefix."""
        return max(map(add, self.lengths, prefix_lengths(self.lengths, self.prefixes)))

    @property
    def last_indices(self) -> Tensor:
        """[sequences] int64: the flat index of each sequence's last token."""
        return send(torch.from_numpy(_ends(self) - 1), self.token_ids.device)

    def to(self, device: torch.device | str) -> "Packed":
        """The same batch on another device."""
        return replace(self, token_ids=send(self.token_ids, device), position_ids=send(self.position_ids, device))


@dataclass(frozen=True, kw_only=True)
class PackedResponses:
    """Prompts with their responses, packed, and the hidden states that predict and value each response token.

    The hidden state before response token t predicts it and carries V_t; the one after the last token carries V_T.
    """

    packed: Packed
    predictors: Int64[Tensor, "responded"]
    """Flat index of the hidden state before each response token."""
    targets: Int64[Tensor, "responded"]
    """The response tokens, in the order of `predictors`."""
    value_positions: Int64[Tensor, "states"]
    """For each response, its predictors and then its last token."""
    response_lengths: tuple[int, ...]
    """[R] tokens of each response or trajectory; 0 is allowed and leaves a response with its V_T alone."""
    sampling_mask: SamplingMask | None = None
    """What each response token was drawn from, in the order of `predictors`; None if nothing was left out."""

    @property
    def tokens(self) -> Packed:
        """All of its tokens."""
        return self.packed

    def to(self, device: torch.device | str) -> "PackedResponses":
        """The same batch on another device."""
        mask = self.sampling_mask
        return replace(
            self,
            sampling_mask=None if mask is None else replace(mask, token_ids=send(mask.token_ids, device)),
            packed=self.packed.to(device),
            predictors=send(self.predictors, device),
            targets=send(self.targets, device),
            value_positions=send(self.value_positions, device),
        )


def prefix_lengths(lengths: Sequence[int], prefixes: Sequence[int | None]) -> list[int]:
    """[S] tokens of the prefix that each segment follows, 0 for none."""
    return [0 if prefix is None else lengths[prefix] for prefix in prefixes or [None] * len(lengths)]


def cumulative_lengths(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """[S + 1] int32: 0 and the cumulative sums of `lengths`, as varlen kernels expect them."""
    return send(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def pack(
    sequences: Sequence[Sequence[int]], *, shareable: Sequence[int] = (), device: torch.device | str = "cpu"
) -> Packed:
    """Pack token ids. Raises ValueError if there is no sequence or one is empty.

    `shareable`: how many of the first tokens of each sequence may be shared, fewer than it has; empty for none.
    Sequences with equal such tokens share them.
    """
    return _on_host(sequences, shareable).to(device)


def pack_responses(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, device: torch.device | str = "cpu"
) -> PackedResponses:
    """Pack each prompt with its response. Raises ValueError for an empty prompt.

    Responses to equal prompts share them, except for the last prompt token: each response has its own, because its
    hidden state predicts the first token of this response.
    """
    return pack_trajectories([[part] for part in zip(prompts, responses, strict=True)], device=device)


def pack_trajectories(
    trajectories: Sequence[Sequence[Continuation]],
    *,
    sampling_mask: SamplingMask | None = None,
    device: torch.device | str = "cpu",
) -> PackedResponses:
    """Pack all sequences of each trajectory (`Response.sequences`); each trajectory counts as one response.

    They share the first prompt as responses to equal prompts do, where they begin with it. A trajectory has one value
    after its end: after the last token of its last sequence. Raises ValueError for an empty context.
    """
    parts = [part for trajectory in trajectories for part in trajectory]
    if any(len(context) == 0 for context, _ in parts):
        raise ValueError("every prompt needs at least one token, because a hidden state must predict the first one")
    shareable = [length for trajectory in trajectories for length in _shared_lengths(trajectory)]
    packed = _on_host([(*context, *tokens) for context, tokens in parts], shareable)
    answers = np.array([len(tokens) for _, tokens in parts], dtype=np.int64)
    before = _ends(packed) - answers - 1  # index of the hidden state that predicts each first token
    predictors = torch.from_numpy(_runs(before, answers))
    ends = np.zeros_like(answers)
    ends[np.cumsum([len(trajectory) for trajectory in trajectories]) - 1] = 1
    batch = PackedResponses(
        packed=packed,
        predictors=predictors,
        targets=packed.token_ids[predictors + 1],
        value_positions=torch.from_numpy(_runs(before, answers + ends)),
        response_lengths=tuple(sum(len(tokens) for _, tokens in trajectory) for trajectory in trajectories),
        sampling_mask=sampling_mask,
    )
    return batch.to(device)


def shareable_prefixes(prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The prefixes that `pack_responses` shares between responses to equal prompts: prompts without the last token."""
    return [prompt[:-1] for prompt in prompts]


def packed_length(trajectory: Sequence[Continuation]) -> int:
    """Tokens that are computed for all sequences of a trajectory, whose shared prefix counts once."""
    lengths = sum(len(context) + len(tokens) for context, tokens in trajectory)
    return lengths - sum(_shared_lengths(trajectory)[1:])


def _shared_lengths(trajectory: Sequence[Continuation]) -> list[int]:
    """For each sequence, the tokens of the first prompt that it shares: all but the last one, or none."""
    prefix = tuple(trajectory[0][0][:-1])
    size = len(prefix)
    return [size if len(context) > size and tuple(context[:size]) == prefix else 0 for context, _ in trajectory]


def pack_nothing(device: torch.device | str) -> PackedResponses:
    """One token and no response: the pass of a rank without a batch, while other ranks run theirs."""
    one = pack_responses([[0]], [[]], device=device)
    filler = replace(one.packed, is_filler=True)
    return replace(one, packed=filler, response_lengths=(), value_positions=one.predictors)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device. Copies from the host to CUDA are asynchronous, from pinned memory."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


Indices = np.ndarray[Any, np.dtype[np.int64]]


def _on_host(sequences: Sequence[Sequence[int]], shareable: Sequence[int]) -> Packed:
    counts = [len(sequence) for sequence in sequences]
    if not counts or min(counts) == 0:
        raise ValueError(f"packing wants at least one sequence, each of at least one token; the lengths are {counts}")
    segments: list[Sequence[int]] = []
    prefixes: list[int | None] = []
    known: dict[tuple[int, ...], int] = {}
    beginnings = [
        tuple(sequence[:count]) for sequence, count in zip(sequences, shareable or [0] * len(counts), strict=True)
    ]
    times = Counter(beginnings)
    for sequence, beginning in zip(sequences, beginnings, strict=True):
        if not beginning or times[beginning] == 1:
            segments.append(sequence)
            prefixes.append(None)
            continue
        if beginning not in known:
            known[beginning] = len(segments)
            segments.append(beginning)
            prefixes.append(None)
        segments.append(sequence[len(beginning) :])
        prefixes.append(known[beginning])
    lengths = tuple(map(len, segments))
    starts = np.array(prefix_lengths(lengths, prefixes), dtype=np.int64)
    return Packed(
        token_ids=torch.from_numpy(np.fromiter(chain.from_iterable(segments), dtype=np.int64, count=sum(lengths))),
        position_ids=torch.from_numpy(_runs(starts, np.array(lengths, dtype=np.int64))),
        lengths=lengths,
        prefixes=tuple(prefixes) if known else (),
    )


def _ends(packed: Packed) -> Indices:
    """[sequences] the flat index after the last token of each sequence."""
    shared = set(packed.prefixes)
    ends = accumulate(packed.lengths)
    return np.array([end for segment, end in enumerate(ends) if segment not in shared], dtype=np.int64)


def _runs(first: Indices, counts: Indices) -> Indices:
    """Concatenated ranges: for each i, the `counts[i]` numbers from `first[i]` on."""
    begins = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(first - begins, counts)


def plan_batches(
    lengths: Sequence[int], *, token_budget: int, prefixes: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Indices of `lengths` in as few balanced batches as the budget suggests, each in ascending order.

    The longest sequences are placed first, each into the batch with the fewest tokens. If a batch of several sequences
    exceeds the budget, the plan is repeated with one more batch. Only a single sequence may exceed the budget.

    `prefixes`: the first tokens of each sequence, which it shares with those that have the same ones; empty for none.
    """
    if not lengths:
        return []
    planner = _Planner(lengths, prefixes, token_budget)
    return [batch for batch in planner.batches(planner.units()) if batch]


def plan_shares(
    lengths: Sequence[int], *, token_budget: int, num_ranks: int, prefixes: Sequence[Sequence[int]] = ()
) -> list[list[list[int]]]:
    """The batches of every rank: equally many for each, since ranks meet in every pass.

    Together they hold every index once, in balanced batches within the budget. An empty batch is a pass over nothing.
    Sequences that share a prefix are spread over ranks only if this takes tokens from the fullest batch.
    """
    if num_ranks == 1:
        return [plan_batches(lengths, token_budget=token_budget, prefixes=prefixes)]
    planner = _Planner(lengths, prefixes, token_budget)
    batches = planner.batches(planner.spread(planner.units(), num_ranks), batches_per_round=num_ranks)
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def plan_own_share(
    lengths: Sequence[int], *, token_budget: int, prefixes: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """The batches of this process's rank, as `plan_shares` plans them."""
    world = current()
    shares = plan_shares(lengths, token_budget=token_budget, num_ranks=world.size, prefixes=prefixes)
    return shares[world.rank]


Unit = Sequence[int]


@dataclass(frozen=True, slots=True)
class _Planner:
    lengths: Sequence[int]
    prefixes: Sequence[Sequence[int]]
    token_budget: int

    def cost(self, unit: Unit) -> int:
        """Tokens that are computed for a unit: a shared prefix counts once."""
        shared = len(self._prefix(unit[0]))
        return sum(self.lengths[i] for i in unit) - shared * (len(unit) - 1)

    def _prefix(self, index: int) -> Sequence[int]:
        return self.prefixes[index] if self.prefixes else ()

    def units(self) -> list[Unit]:
        """Sequences that share a prefix, cut into as few units as fit into the budget; each other sequence alone."""
        together: dict[object, list[int]] = {}
        for index in range(len(self.lengths)):
            prefix = tuple(self._prefix(index))
            together.setdefault(prefix or index, []).append(index)
        return [unit for members in together.values() for unit in self._within_budget(members)]

    def _within_budget(self, members: Unit) -> list[Unit]:
        shared = len(self._prefix(members[0]))
        least = max(1, -(-(self.cost(members) - shared) // max(1, self.token_budget - shared)))
        for count in range(least, len(members)):
            units = self._parts(members, count)
            if all(len(unit) == 1 or self.cost(unit) <= self.token_budget for unit in units):
                return units
        return [[index] for index in members]

    def _parts(self, members: Unit, count: int) -> list[Unit]:
        parts = _fill([self.lengths[i] for i in members], count)
        return [sorted(members[i] for i in part) for part in parts if part]

    def spread(self, units: list[Unit], num_ranks: int) -> list[Unit]:
        """Cut units in two as long as the fullest of `num_ranks` batches then has fewer tokens."""
        while True:
            costs = [self.cost(unit) for unit in units]
            batches = _fill(costs, num_ranks)
            loads = [sum(costs[i] for i in batch) for batch in batches]
            fullest = batches[loads.index(max(loads))]
            largest = max((i for i in fullest if len(units[i]) > 1), key=lambda i: costs[i], default=None)
            if largest is None:
                return units
            cut = [*units[:largest], *self._parts(units[largest], 2), *units[largest + 1 :]]
            if self._fullest(cut, num_ranks) >= max(loads):
                return units
            units = cut

    def _fullest(self, units: Sequence[Unit], num_batches: int) -> int:
        costs = [self.cost(unit) for unit in units]
        return max(sum(costs[i] for i in batch) for batch in _fill(costs, num_batches))

    def batches(self, units: Sequence[Unit], *, batches_per_round: int = 1) -> list[list[int]]:
        """The units in batches within the budget, a multiple of `batches_per_round` of them."""
        costs = [self.cost(unit) for unit in units]
        rounds = -(-sum(costs) // (self.token_budget * batches_per_round))
        while True:
            batches = _fill(costs, rounds * batches_per_round)
            fits = all(len(batch) <= 1 or sum(costs[i] for i in batch) <= self.token_budget for batch in batches)
            if fits or rounds * batches_per_round >= len(units):
                return [sorted(index for i in batch for index in units[i]) for batch in batches]
            rounds += 1


def _fill(lengths: Sequence[int], num_batches: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    loads = [0] * num_batches
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = loads.index(min(loads))
        batches[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return batches
