"""What ranks send each other for a rollout: responses as bytes, and sharded weights for an engine of rank 0.

Responses are sent as JSON for small values and raw numbers for tokens, without pickle. The prompts are known on every
rank, so a message has their indices only. Of sharded weights one layer at a time is gathered on request, so that the
whole model is never in memory.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from proximo.distributed.shard_files import is_sharded, local_part
from proximo.distributed.world import alone, current, whole
from proximo.records import Episode, Finish, Fork, Prompt, Response, SamplingMask, Turn
from proximo.rollout.engine import Fingerprint, distance_of_entries

Result = TypeVar("Result")
WHAT = "loading weights into the engine"
_LAYER = re.compile(r".*?\.\d+(?=\.)")


def to_bytes(responses: Iterable[tuple[int, Response]]) -> bytes:
    """Pairs of a prompt's index and a response to it. Log-probs are sent as float32, from the CPU."""
    rows, numbers = [], list[bytes]()
    for index, response in responses:
        logprobs = response.logprobs.detach().cpu().float().numpy()
        mask = response.response_mask.detach().cpu().numpy()
        drawn_from = response.sampling_mask
        rows.append(
            {
                "prompt": index,
                "sample": response.sample_index,
                "finish": response.finish.value,
                "version": response.policy_version,
                "token_versions": response.token_versions,
                "text": response.text,
                "lengths": [len(response.token_ids), len(logprobs), len(mask)],
                "drawn_from": None if drawn_from is None else len(drawn_from.token_ids),
                "trajectory": None if response.episode is None else _trajectory(response, response.episode),
            }
        )
        numbers += [
            np.array(response.token_ids, dtype=np.int64).tobytes(),
            logprobs.astype(np.float32).tobytes(),
            mask.astype(np.uint8).tobytes(),
        ]
        if drawn_from is not None:
            numbers += [drawn_from.token_ids.cpu().int().numpy().tobytes(), drawn_from.counts.long().numpy().tobytes()]
    head = json.dumps(rows).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *numbers])


def as_sent(own: Sequence[Response], sent: Sequence[Response]) -> list[Response]:
    """The sender's responses as the receivers get them: the same records, or copies of those that `to_bytes` rounds."""
    return [
        mine if mine.logprobs.dtype == torch.float32 and mine.logprobs.device.type == "cpu" else copy
        for mine, copy in zip(own, sent, strict=True)
    ]


def from_bytes(message: bytes, prompts: Sequence[Prompt]) -> list[tuple[int, Response]]:
    """The responses in a message of `to_bytes`, with the prompts of its indices."""
    offset = 8 + int.from_bytes(message[:8], "little")

    def taken(count: int, dtype: type) -> np.ndarray:
        nonlocal offset
        start, offset = offset, offset + count * np.dtype(dtype).itemsize
        return np.frombuffer(message, dtype=dtype, count=count, offset=start)

    def mask_of(num_ids: int, num_tokens: int) -> SamplingMask:
        return SamplingMask(
            token_ids=torch.from_numpy(taken(num_ids, np.int32).copy()),
            counts=torch.from_numpy(taken(num_tokens, np.int64).copy()),
        )

    found = []
    for row in json.loads(message[8:offset]):
        num_tokens, num_logprobs, num_marks = row["lengths"]
        prompt, trajectory = prompts[row["prompt"]], {}
        if row["trajectory"] is not None:
            prompt, trajectory = _as_trajectory(prompt, **row["trajectory"])
        response = Response(
            prompt=prompt,
            sample_index=row["sample"],
            token_ids=tuple(taken(num_tokens, np.int64).tolist()),
            logprobs=torch.from_numpy(taken(num_logprobs, np.float32).copy()),
            response_mask=torch.from_numpy(taken(num_marks, np.uint8).astype(np.bool_)),
            finish=Finish(row["finish"]),
            policy_version=row["version"],
            text=row["text"],
            token_versions=None if row["token_versions"] is None else tuple(row["token_versions"]),
            sampling_mask=None if row["drawn_from"] is None else mask_of(row["drawn_from"], num_tokens),
            **trajectory,
        )
        found.append((row["prompt"], response))
    return found


def _trajectory(response: Response, episode: Episode) -> dict[str, Any]:
    """What a trajectory has besides the numbers of any response, as JSON values: also what its policy read first."""
    prompt = response.prompt
    return {
        "observed": {"token_ids": prompt.token_ids, "text": prompt.text, "messages": prompt.messages},
        "forks": [[fork.start, fork.context] for fork in response.forks],
        "turns": [asdict(turn) for turn in episode.turns],
        "episode": {
            "info": json.loads(json.dumps(dict(episode.info), default=repr)),
            "failure": episode.failure,
            "num_cut_observations": episode.num_cut_observations,
        },
    }


def _as_trajectory(
    row: Prompt,
    *,
    observed: Mapping[str, Any],
    forks: Sequence[tuple[int, Sequence[int]]],
    turns: Sequence[Mapping[str, Any]],
    episode: Mapping[str, Any],
) -> tuple[Prompt, dict[str, Any]]:
    """The prompt of a trajectory, which was begun with a row, and the further fields of its record."""
    messages = None if observed["messages"] is None else tuple(observed["messages"])
    prompt = replace(row, token_ids=tuple(observed["token_ids"]), text=observed["text"], messages=messages)
    return prompt, {
        "forks": tuple(Fork(start=start, context=tuple(context)) for start, context in forks),
        "episode": Episode(
            turns=tuple(replace(Turn(**turn), messages=tuple(turn["messages"])) for turn in turns), **episode
        ),
    }


class StreamedWeights(Mapping[str, Tensor]):
    """Sharded tensors by name. Rank 0 may ask for them inside `give`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._sharded = {name for name, tensor in self._tensors.items() if is_sharded(tensor)}
        self._world = current()
        self._gathered: dict[str, Tensor] = {}
        self._asking = threading.Lock()

    def give(self, run: Callable[[], Result]) -> Result:
        """Run on rank 0 the function that asks for tensors; other ranks help to gather them. Every rank has to call it,
        and gets the result.
        """
        if not self._world.leads:
            while True:
                said: _Gather | _End[Result] = self._world.on_rank_0(_of_rank_0, what=WHAT)
                if isinstance(said, _End):
                    return said.result
                self._gather(said.layer)
        try:
            with alone():
                end = _End(run())
        except BaseException as error:
            failure = error
            self._world.on_rank_0(lambda: _raise(failure), what=WHAT)
            raise
        finally:
            self._gathered = {}
        return self._world.on_rank_0(lambda: end, what=WHAT).result

    def fingerprint(self) -> str:
        """The fingerprint of the whole tensors. No rank needs more than its parts. Every rank has to call it."""
        ours = {name: _entries_here(self._tensors[name]) for name in self._sharded}
        found, shares = Fingerprint(), self._world.gather(ours, what="the fingerprint of weights")
        for name, tensor in self._tensors.items():
            if name not in ours:
                found.add(name, tensor)
                continue
            entries = torch.empty(-(-tensor.numel() // distance_of_entries(tensor.numel())), dtype=tensor.dtype)
            for share in shares:
                places, numbers = share[name]
                entries[places] = numbers
            found.add_entries(name, tensor, entries.to(tensor.device))
        return found.hexdigest()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._sharded:
            return self._tensors[name]
        with self._asking:
            if name not in self._gathered:
                layer = _layer_of(name)
                self._world.on_rank_0(lambda: _Gather(layer), what=WHAT)
                self._gathered = self._gather(layer)
            return self._gathered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @torch.no_grad()
    def _gather(self, layer: str) -> dict[str, Tensor]:
        self._gathered = {}  # not two layers at a time
        return {
            name: whole(tensor)
            for name, tensor in self._tensors.items()  # in the order of the model, on every rank
            if name in self._sharded and _layer_of(name) == layer
        }


@dataclass(frozen=True, slots=True)
class _Gather:
    """Message of rank 0: gather the layer of a tensor."""

    layer: str


@dataclass(frozen=True, slots=True)
class _End(Generic[Result]):
    """Message of rank 0: no further tensor is needed, with the result."""

    result: Result


@torch.no_grad()
def _entries_here(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a tensor's fingerprint on this rank: their indices among all entries, and their values."""
    part, size = local_part(tensor), tensor.numel()
    flat = torch.arange(0, size, distance_of_entries(size))
    inside, places = torch.ones(len(flat), dtype=torch.bool), list[Tensor]()
    for index, offset, length in zip(
        torch.unravel_index(flat, part.shape), part.offsets, part.tensor.shape, strict=True
    ):
        inside &= (index >= offset) & (index < offset + length)
        places.append(index - offset)
    local = part.tensor[tuple(place[inside].to(part.tensor.device) for place in places)]
    return inside.nonzero()[:, 0], local.cpu()


def _layer_of(name: str) -> str:
    """The unit that is gathered together: the tensors of a layer, or one outside of the layers."""
    found = _LAYER.match(name)
    return name if found is None else found[0]


def _raise(error: BaseException) -> None:
    raise error


def _of_rank_0() -> Any:
    raise AssertionError("only rank 0 names the next layer to gather")
