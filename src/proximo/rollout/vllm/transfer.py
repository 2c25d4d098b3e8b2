"""How the weights of a push reach each server: through memory of the learner's device, or through files."""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from proximo.http_client import RequestRefusedError, UnansweredError
from proximo.rollout.vllm.device_memory import PackedWeights, packed_weights
from proximo.rollout.vllm.pushed_weights import PushedWeights
from proximo.rollout.vllm.server import VLLMServer

LOG = logging.getLogger("proximo.rollout")


class Transfer:
    """The weights of the last push, for any server at any time: one that restarted gets what the others got.

    The first push is packed into memory of the learner's device. Servers that cannot open it, because they are on
    another machine or their device does not reach it, get files from then on; without a server that can, the memory is
    given back. An adapter always travels as files.
    """

    def __init__(self, files: PushedWeights, servers: Collection[VLLMServer], dtype: torch.dtype | None) -> None:
        """`dtype`: of the sent tensors; None for their own, which only files can hold."""
        self.files = files
        self._dtype = dtype
        self._by_memory = set(servers) if dtype is not None and not files.is_adapter else set()
        """Servers that may open the memory."""
        self._packed: PackedWeights | None = None
        self._readers: set[VLLMServer] = set()
        """Servers that were told to read the memory and have not said that they did."""
        self._needs_files = threading.Lock()
        """Servers are given a push at the same time."""

    def take(
        self, tensors: Iterator[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], *, kept: Collection[str]
    ) -> None:
        """Take a push in place of the last one. Each tensor is asked for once. See `PushedWeights.write`."""
        items: Iterable[tuple[str, Tensor]] = tensors
        if self._by_memory and self._dtype is not None and (first := next(tensors, None)) is not None:
            items = chain([first], tensors)
            self._packed = packed_weights(self._packed, shapes, self._dtype, first[1].device)
            if self._packed is None:
                self._by_memory.clear()
        if self._packed is None:
            self.files.write(items, self._dtype, kept=kept)
        else:
            self.files.clear()
            self._packed.fill(items)

    def give(self, server: VLLMServer, *, name: str, digest: str) -> None:
        """Load the push into one server. `name`: its version there. `digest`: of the tensors.

        Raises UnansweredError and RequestRefusedError.
        """
        packed = self._packed
        if packed is not None and server in self._by_memory:
            update = {"digest": digest, "tensors": packed.layout(), "tensors_of_model": self.files.num_tensors}
            try:
                self._readers.add(server)
                server.load_weights(update, version=name, memory=packed.memory.as_sent())
                self._readers.discard(server)
                return
            except (UnansweredError, RequestRefusedError) as error:
                if not _is_an_answer(error):
                    raise
                self._readers.discard(server)
                LOG.warning("the vLLM server %s gets its weights through files: %s", server.url, error)
                self._by_memory.discard(server)
        update = self._in_files(name, digest)
        try:
            server.load_weights(update, version=name)
        except (UnansweredError, RequestRefusedError) as error:
            if not _is_an_answer(error) or "changes" not in update:
                raise
            LOG.warning("the vLLM server %s gets all weights instead of changes: %s", server.url, error)
            server.load_weights(self._in_files(name, digest, whole=True), version=name)

    def settle(self) -> None:
        """Give the memory back if no server opens it. Call when every server has the push."""
        if self._packed is not None and not self._by_memory:
            packed, self._packed = self._packed, None
            packed.memory.close()

    def close(self) -> None:
        """Remove the files, and free the memory, as far as the device still works and no server may read it."""
        self.files.close()
        if any(not server.has_ended() for server in tuple(self._readers)):  # it is freed with the process
            return
        self._by_memory.clear()
        with suppress(OSError, RuntimeError):
            self.settle()

    def _in_files(self, name: str, digest: str, *, whole: bool = False) -> dict[str, Any]:
        with self._needs_files:
            if self._packed is not None and self.files.last is None:
                self.files.write(self._packed.tensors())
                self.files.keep(name)
            elif whole and self.files.digests_of_changes:
                self.files.write_whole()
                self.files.keep(f"{name}-whole")
            update = {"path": str(self.files.last), "digest": digest}
            return update | ({"changes": found} if (found := self.files.digests_of_changes) else {})


def _is_an_answer(error: UnansweredError | RequestRefusedError) -> bool:
    """Whether the server itself said no: one that cannot be reached gets the same again."""
    return isinstance(error, RequestRefusedError) or not (error.connection or error.timed_out)
