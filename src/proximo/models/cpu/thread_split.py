"""Two pieces of work at a time on a CPU, each with half of the threads: overlapped updates of policy and critic.

Small operators, attention over one sequence and all that is between operators gain nothing from a second thread; a
second pass beside the first does. A pass that is cut in two gains little (benchmarks/README.md).
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

Result = TypeVar("Result")

_NUM_PIECES = 2
"""More would wait for each other at the interpreter's lock."""


class PeerFailedError(Exception):
    """Raised in one piece because the other one has failed: it must not go on training after the caller was told."""


def can_split_threads(device: str, *, num_threads: int | None = None) -> bool:
    """True on a CPU whose threads can be halved; `num_threads` where they are not torch's own."""
    return device == "cpu" and (num_threads or torch.get_num_threads()) % _NUM_PIECES == 0


def operators_are_watched() -> bool:
    """True where something follows the operators of the caller's thread, and would miss those of another one.

    A counter of operations, a profiler, or an autocast of the caller's own.
    """
    modes = _get_current_dispatch_mode() is not None or _get_current_function_mode() is not None
    return modes or torch.autograd._profiler_enabled() or torch.is_autocast_enabled("cpu")


def run_overlapped(pieces: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the pieces, at most two, return, in their order; the first runs in the thread of the caller.

    Each has half of the caller's threads (until it asks for all: `use_all_threads`), its grad mode and its context
    variables. Raises what the first piece that failed has raised, an interrupt included, when both have ended.
    """
    if len(pieces) > _NUM_PIECES:
        raise ValueError(f"{len(pieces)} pieces were given, but only {_NUM_PIECES} run at a time")
    if len(pieces) < _NUM_PIECES:
        return [piece() for piece in pieces]
    num_threads, grad_enabled = torch.get_num_threads(), torch.is_grad_enabled()
    results: list[Any] = [None] * _NUM_PIECES
    errors: list[BaseException] = []
    failed, ends = threading.Event(), [threading.Event() for _ in pieces]

    def run(index: int) -> None:
        torch.set_num_threads(max(1, num_threads // _NUM_PIECES))
        _PEER.set(_Peer(failed=failed, ended=ends[1 - index], num_threads=num_threads))
        try:
            with torch.set_grad_enabled(grad_enabled):
                results[index] = pieces[index]()
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)
            failed.set()
        finally:
            ends[index].set()

    # A daemon, so that a process that is told to leave at once does not wait for the end of an epoch.
    other = threading.Thread(target=copy_context().run, args=(run, 1), name="second-piece", daemon=True)
    try:
        other.start()
        copy_context().run(run, 0)
    except BaseException:  # an interrupt outside of the piece
        failed.set()
        ends[0].set()
        raise
    finally:
        while other.ident is not None and not ends[1].is_set():
            try:
                ends[0].set()  # also where an interrupt came between the piece and its end
                ends[1].wait()  # join() takes a thread for ended when it is interrupted (CPython 3.11)
            except BaseException as error:  # an interrupt, which the other piece is told of
                errors.append(error)
                failed.set()
        torch.set_num_threads(num_threads)  # after the other piece, since this is also what new threads begin with
    for error in sorted(errors, key=lambda each: isinstance(each, PeerFailedError)):
        raise error
    return results


def check_peer() -> None:
    """Call now and then within a piece. Raises PeerFailedError where the other one has failed."""
    peer = _PEER.get()
    if peer is not None and peer.failed.is_set():
        raise PeerFailedError("what ran at the same time has failed")


def has_peer() -> bool:
    """True within a piece that runs beside another one, also when that one has ended."""
    return _PEER.get() is not None


def use_all_threads() -> None:
    """Wait until the other piece has ended, and go on with the threads of both; nothing where there is none.

    Asked at a point that does not depend on time, so that each run computes the same with as many threads. At most one
    of the pieces may ask. Raises PeerFailedError where the other one has failed.
    """
    peer = _PEER.get()
    if peer is not None:
        peer.ended.wait()
        check_peer()
        torch.set_num_threads(peer.num_threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peer:
    """What a piece knows of the other one."""

    failed: threading.Event
    """Either of the two has."""
    ended: threading.Event
    num_threads: int
    """Of both."""


_PEER: ContextVar[_Peer | None] = ContextVar("peer", default=None)
