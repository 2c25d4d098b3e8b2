"""Players in processes of their own, seen from the trainer: one nursery, and a channel to each player."""

import atexit
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from proximo.environments.players.nursery import CLOSE_SECONDS, NURSERY_SERVICE, kill_group
from proximo.environments.players.threads import PlayerEnded
from proximo.errors import ConfigError, DataError, as_own_errors
from proximo_verifiers.errors import WorkersError
from proximo_verifiers.progress_log import logging_start
from proximo_verifiers.workers.frames import FrameDecoder, FrameError, encode
from proximo_verifiers.workers.loop import START_SECONDS, reported_error
from proximo_verifiers.workers.process import WorkerFolder, WorkerProcess, WorkerSpec, sweep_folders

MAX_FAILED_NURSERIES = 3
"""After so many nurseries in a row that ended before they were ready, the run ends."""
_READ_BYTES = 2**18
_END_SECONDS = CLOSE_SECONDS + 5.0


@dataclass(eq=False, slots=True)
class _Channel:
    """A player, and the socket to it."""

    number: int | None
    """None for one that has connected and not yet said which it is."""
    connection: socket.socket | None = None
    """None before it has connected, and after its end."""
    process: int | None = None
    """None until the nursery has said it."""
    unsent: bytearray = field(default_factory=bytearray)
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    is_ended: bool = False


class ProcessPlayers:
    """Players forked from a nursery. To be used from one thread. They end with `close`, or with this process."""

    def __init__(
        self, path: str, options: Mapping[str, Any], *, memory_bytes: int | None = None, name: str | None = None
    ) -> None:
        """`path`: `package.module:Class` or `file.py:Class`. `memory_bytes` limits the address space of each process.

        `name` is for messages; None for the path.

        Raises ConfigError where the environment cannot be imported or called with these options, MissingExtraError if
        it lacks a package, and TrainingError if no process can be started.
        """
        self.name = name or path
        self._spec = WorkerSpec(
            path=path,
            service=NURSERY_SERVICE,
            options=options,
            memory_bytes=memory_bytes,
            whole_environment=True,
        )
        sweep_folders()
        self._folder = WorkerFolder()
        self._address = os.path.join(self._folder.path, "players")
        self._selector = selectors.DefaultSelector()
        self._channels: dict[int, _Channel] = {}
        self._num_opened = 0
        self._events: list[tuple[int, dict[str, Any] | PlayerEnded]] = []
        self._asked: deque[_Channel] = deque()
        """Whose fork or end the nursery was asked for, in the order of its replies."""
        self._num_failed_nurseries = 0
        self._is_closed = False
        self._starter = ThreadPoolExecutor(1, "nursery")
        """Lives as long as the nursery, which the kernel ends with the thread that started it."""
        atexit.register(self.close)
        try:
            with as_own_errors(), logging_start(f"environment {self.name}", "its first process"):
                self._listener = self._listen()
                self._nursery = self._start_nursery()
                self._wait_for_nursery()
        except BaseException:
            self.close()
            raise

    def begin_player(self) -> int:
        """The number of a new player, which the nursery forks."""
        number = self._num_opened = self._num_opened + 1
        channel = self._channels[number] = _Channel(number)
        self._ask_nursery(channel, {"fork": [self._address, number]})
        return number

    def send(self, number: int, request: Mapping[str, Any]) -> None:
        """Give a player a request. Raises DataError for a row that cannot be written as JSON."""
        try:
            frame = encode(request)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"a row of the data cannot be sent to the process of its environment ({error}): leave the column out "
                "with columns in its source, or write it as text"
            ) from error
        channel = self._channels[number]
        channel.unsent += frame
        self._flush(channel)

    def wait(self, seconds: float) -> list[tuple[int, dict[str, Any] | PlayerEnded]]:
        """The replies that have arrived. Waits at most this long for the first.

        Raises TrainingError if the environment cannot be imported any more.
        """
        deadline = time.monotonic() + (0.0 if self._events else seconds)
        with as_own_errors():
            while True:
                self._look(max(0.0, deadline - time.monotonic()))
                if self._events or time.monotonic() >= deadline:
                    events, self._events = self._events, []
                    return events

    def end(self, number: int) -> None:
        """Kill a player with all that it started."""
        if channel := self._channels.get(number):  # its own end may be among the last news
            self._end(channel)

    def close(self) -> None:
        """End all players. Those that do nothing close their environments first; after CLOSE_SECONDS all are killed."""
        atexit.unregister(self.close)
        if self._is_closed:
            return
        self._is_closed = True
        for key in tuple(self._selector.get_map().values()):
            if isinstance(key.data, _Channel):
                self._disconnect(key.data)
        if hasattr(self, "_listener"):
            self._listener.close()
        if hasattr(self, "_nursery"):
            self._nursery.dismiss()
            deadline = time.monotonic() + _END_SECONDS
            while not self._nursery.has_died() and time.monotonic() < deadline:
                time.sleep(0.002)
            self._nursery.kill()
        self._starter.shutdown()
        self._selector.close()
        self._folder.remove()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(self._address)
        except OSError as error:  # such an address has about 100 characters at most
            listener.close()
            raise ConfigError(
                f"the processes of environments cannot be reached at {self._address} ({error}): set TMPDIR to a "
                "folder with a short path"
            ) from error
        listener.listen(1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _start_nursery(self) -> WorkerProcess:
        try:
            nursery = self._starter.submit(WorkerProcess, self._spec).result()
        except OSError as error:
            raise WorkersError(f"no process can be started: {error}") from error
        self._selector.register(nursery.replies, selectors.EVENT_READ)
        return nursery

    def _wait_for_nursery(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._nursery.is_ready:
            self.wait(0.1)
            if time.monotonic() > deadline:
                raise WorkersError(f"environment {self.name!r} was not imported within {START_SECONDS:g} seconds")

    def _look(self, seconds: float) -> None:
        """Waits at most this long for something to be read or written, and does so."""
        self._nursery.write()
        ready = self._selector.select(seconds)
        for key, events in ready:
            self._on_event(key, events)
        if not ready and self._nursery.has_died():
            self._nursery_ended()

    def _on_event(self, key: selectors.SelectorKey, events: int) -> None:
        channel = key.data
        if key.fileobj is self._listener:
            self._accept()
        elif channel is None:
            self._read_nursery()
        elif channel.connection is None:  # it was ended earlier in this round
            return
        elif events & selectors.EVENT_READ:
            self._read(channel)
        else:
            self._flush(channel)

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            connected, _ = self._listener.accept()
            connected.setblocking(False)
            self._selector.register(connected, selectors.EVENT_READ, _Channel(None, connected))

    def _read(self, channel: _Channel) -> None:
        assert channel.connection is not None
        try:
            piece = channel.connection.recv(_READ_BYTES)
            if not piece:
                raise ConnectionResetError
            for message in channel.decoder.feed(piece):
                if channel.number is None:
                    self._introduce(channel, int(message["player"]))
                else:
                    self._events.append((channel.number, message))
        except BlockingIOError:
            return
        except (OSError, FrameError, LookupError, TypeError, ValueError):  # it is dead, or does not speak as a player
            self._end(channel)

    def _introduce(self, stranger: _Channel, number: int) -> None:
        """The player of this number has connected, unless it was ended meanwhile."""
        connected, channel = stranger.connection, self._channels[number]
        if channel.is_ended or channel.connection is not None or connected is None:
            raise LookupError(number)
        stranger.connection, channel.connection, channel.decoder = None, connected, stranger.decoder
        self._selector.modify(connected, selectors.EVENT_READ, channel)
        self._flush(channel)

    def _flush(self, channel: _Channel) -> None:
        """Writes what the socket takes now, and has the selector say when it takes the rest."""
        if channel.connection is None:
            return
        had_rest = bool(channel.unsent)
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # the end is also there to be read
            while channel.unsent:
                del channel.unsent[: channel.connection.send(channel.unsent)]
        if had_rest or channel.unsent:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0)
            self._selector.modify(channel.connection, wanted, channel)

    def _end(self, channel: _Channel) -> None:
        """Has the nursery kill a player, as soon as its process is known."""
        self._disconnect(channel)
        if channel.number is not None and not channel.is_ended:
            channel.is_ended = True
            if channel.process is not None:
                self._ask_nursery(channel, {"end": channel.process})

    def _disconnect(self, channel: _Channel) -> None:
        if channel.connection is not None:
            self._selector.unregister(channel.connection)
            channel.connection.close()
            channel.connection = None

    def _ask_nursery(self, channel: _Channel, request: Mapping[str, Any]) -> None:
        self._asked.append(channel)
        self._nursery.send(encode(request))
        self._nursery.write()

    def _read_nursery(self) -> None:
        messages = self._nursery.read()
        if messages is None:
            self._nursery_ended()
            return
        for message in messages:
            self._on_nursery_message(message)

    def _on_nursery_message(self, message: Mapping[str, Any]) -> None:
        if not self._nursery.is_ready:
            if "failed" in message:
                self._nursery.start_error = reported_error(message["failed"], message["message"])
                return
            self._nursery.is_ready = True
            self._num_failed_nurseries = 0
            return
        channel = self._asked.popleft()
        if channel.process is not None or "raised" in message:
            self._forget(channel, str(message.get("value") or f"could not be started: {message['raised']}"))
            return
        channel.process = int(message["value"])
        if channel.is_ended:
            self._ask_nursery(channel, {"end": channel.process})

    def _forget(self, channel: _Channel, reason: str) -> None:
        """A player is gone."""
        self._disconnect(channel)
        if channel.number is not None and self._channels.pop(channel.number, None):
            self._events.append((channel.number, PlayerEnded(reason)))

    def _nursery_ended(self) -> None:
        """The players end with their nursery, and another one takes its place. Raises an error if none gets ready."""
        self._num_failed_nurseries += not self._nursery.is_ready
        if self._nursery.start_error is not None:
            raise self._nursery.start_error
        if self._num_failed_nurseries >= MAX_FAILED_NURSERIES:
            raise WorkersError(f"the process of environment {self.name!r} ends before it is ready")
        self._selector.unregister(self._nursery.replies)
        how = self._nursery.kill()
        self._asked.clear()
        for channel in tuple(self._channels.values()):
            if channel.process is not None:
                kill_group(channel.process)  # the player has ended with its nursery; what it started has not
            self._forget(channel, f"ended with the one that it was forked from, which {how}")
        self._nursery = self._start_nursery()
