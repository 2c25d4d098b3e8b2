"""Verifiers for tests: a good one, and one that misbehaves on demand. They are made in worker processes."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proximo_verifiers.errors import ConfigError, DataError, MissingExtraError
from proximo_verifiers.verifier import Answer, Grade, PostponedError, ScoreState, Verifier


class Letters(Verifier):
    """The share of one letter; every call leaves a line in `seen`, where that is given."""

    def __init__(self, letter: str = "a", seen: str | None = None, by_clock: bool = False) -> None:
        self.letter, self.seen, self.by_clock = letter, seen, by_clock

    def grade(self, answer: Answer) -> Grade:
        if self.seen is not None:
            with Path(self.seen).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(answer.text) + "\n")
        share = answer.text.count(self.letter) / (len(answer.text) + 1)
        return Grade(score=share, components={"length": float(len(answer.text))}, by_clock=self.by_clock)

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        if metadata.get("unfit"):
            raise DataError("there is nothing to grade by")


class LettersAlone(Letters):
    """Has nothing to say of an answer with a digit."""

    def grade(self, answer: Answer) -> Grade:
        if any(map(str.isdigit, answer.text)):
            return Grade(score=math.nan, state=ScoreState.NOT_APPLICABLE, reason="there is a digit")
        return super().grade(answer)


class Waiting(Letters):
    """Waits for answers with a `z`, but in their first turn."""

    def grade(self, answer: Answer) -> Grade:
        grade = super().grade(answer)
        if "z" in answer.text:
            if answer.first_turn:
                raise PostponedError
            time.sleep(float(answer.text.count("z")))
        return grade


class Everything(Verifier):
    """Says what it was handed."""

    def grade(self, answer: Answer) -> Grade:
        told = [answer.text, answer.prompt, answer.reference, dict(answer.metadata), answer.finish, answer.num_tokens]
        return Grade(score=-1.0, state=ScoreState.MODEL_FAULT, reason=json.dumps(told))


class Hostile(Verifier):
    """Does what the answer says; else its score is the answer's length. `begun` gets a byte before it hangs."""

    def __init__(self, begun: str | None = None) -> None:
        self.begun = begun

    def grade(self, answer: Answer) -> Grade:
        deed = getattr(self, f"do_{answer.text}", None)
        if deed is not None:
            deed()
        return Grade(score=float(len(answer.text)))

    def timeout_grade(self) -> Grade:
        return Grade(score=-0.5, state=ScoreState.MODEL_FAULT, components={"part": 0.0})

    def note(self) -> None:
        if self.begun is not None:
            with Path(self.begun).open("a", encoding="utf-8") as marks:
                marks.write("x")

    def do_sleep(self) -> None:
        self.note()
        time.sleep(1000)

    def do_spin(self) -> None:
        self.note()
        while True:
            pass

    def do_raise(self) -> None:
        raise ValueError("no\nsuch luck")

    def do_mumble(self) -> None:
        raise ValueError("half a pair: \ud800")

    def do_exit(self) -> None:
        sys.exit(4)

    def do_die(self) -> None:
        os._exit(3)

    def do_abort(self) -> None:
        os.abort()

    def do_recurse(self) -> None:
        self.do_recurse()

    def do_eat(self) -> None:
        hoard: Sequence[bytearray] = [bytearray(2**24) for _ in range(1000)]
        del hoard

    def do_flood(self) -> None:
        for descriptor in (1, 2):
            for _ in range(100):
                os.write(descriptor, b"x" * 2**16)
        print("y" * 2**20)

    def do_read(self) -> None:
        assert sys.stdin.read() == ""

    def do_close(self) -> None:
        os.closerange(3, 256)

    def do_garble(self) -> None:
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, b"\x00\x00\x00\x05false")
            except OSError:
                continue

    def do_announce(self) -> None:
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, b"\xff\xff\xff\xff")
            except OSError:
                continue

    def do_fork(self) -> None:
        os.fork()

    def do_leave_a_child(self) -> None:
        if os.fork() == 0:
            time.sleep(1000)

    def do_leave_a_child_and_die(self) -> None:
        self.do_leave_a_child()
        os._exit(5)


class OfNoUse(Verifier):
    """Cannot tell, or says what is no number."""

    def grade(self, answer: Answer) -> Grade:
        if answer.text == "nan":
            return Grade(score=float("nan"))
        if answer.text == "name":
            return Grade(score=1.0, components={"no/name": 1.0})
        return Grade(score=float("nan"), state=ScoreState.INFRASTRUCTURE_FAULT, reason="the other machine is down")


class Environment(Verifier):
    """Fails with the names of the variables that it sees, and where it stands."""

    def grade(self, answer: Answer) -> Grade:
        facts = {"names": sorted(os.environ), "session": os.getsid(0) == os.getpid(), "folder": os.environ["TMPDIR"]}
        Path(os.environ["TMPDIR"], "left").write_text("x", encoding="utf-8")
        return Grade(score=0.0, state=ScoreState.MODEL_FAULT, reason=json.dumps(facts))


class Flaky(Verifier):
    """Dies on every answer that no worker has died on yet."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def grade(self, answer: Answer) -> Grade:
        mark = self.folder / answer.text
        if not mark.exists():
            mark.touch()
            os._exit(1)
        return Grade(score=1.0)


class Slow(Verifier):
    """Takes as many seconds as the answer says, the first times; none after that. Its file has a byte for each."""

    def __init__(self, folder: str, times: int = 1) -> None:
        self.folder, self.times = Path(folder), times

    def grade(self, answer: Answer) -> Grade:
        with (self.folder / answer.text).open("a+b") as marks:
            if marks.tell() < self.times:
                marks.write(b"x")
                marks.flush()
                time.sleep(float(answer.text))
        return Grade(score=1.0)


class Late(Verifier):
    """Is ready when a file is there."""

    def __init__(self, go_on: str) -> None:
        while not Path(go_on).exists():
            time.sleep(0.01)


class Closing(Verifier):
    """Writes a file when it is closed."""

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)

    def grade(self, answer: Answer) -> Grade:
        return Grade(score=1.0)

    def close(self) -> None:
        self.mark.touch()


def needs_an_extra() -> None:
    raise MissingExtraError("install proximo[maths]")


def is_misconfigured() -> None:
    raise ConfigError("the limit must be above 0")


def breaks() -> None:
    raise RuntimeError("no way")


def dies() -> None:
    os._exit(7)


class Unfinished:
    """A verifier of somebody who has read no page."""

    def grade(self) -> Grade:
        return Grade(score=1.0)


class Wordless(Verifier):
    """Forgets to return."""

    def grade(self, answer: Answer) -> Grade:
        return None  # ty: ignore[invalid-return-type]


class Dying(Verifier):
    """Ends its worker on every second answer, or so."""

    def grade(self, answer: Answer) -> Grade:
        if sum(map(ord, answer.text)) % 2:
            os._exit(1)
        return Grade(score=float(len(answer.text)))
