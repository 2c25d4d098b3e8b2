"""A server of a model whose answers tests write themselves: ids are code points of text."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from proximo.environments.call_requests import Vocabulary
from proximo.environments.chat_calls import ChatCalls
from proximo.environments.engine import Limits
from proximo.environments.recorder import Recording
from proximo.environments.server import ModelServer
from proximo.records import Finish, Prompt
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall
from waiting import LATEST_SECONDS

EOS = 3
OPTIONS = SamplingOptions(max_new_tokens=8, temperature=1.0, stop_strings=("END",))


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(id) for id in ids if id != EOS)


class LetterDialogue:
    """`role:text|` for each message, then `assistant:`."""

    def __init__(self, messages: Any, tools: Any) -> None:
        self._begins = "T" if tools else ""
        self._turns: list[tuple[int, ...]] = []

    def ask(self, items: Sequence[Any]) -> None:
        asked = ids(self._begins)
        for item in items:
            is_turn = isinstance(item, int)
            asked += ids("assistant:") if is_turn else ids(f"{item['role']}:{item['content']}|")
            asked += (*self._turns[item], ord("|")) if is_turn else ()
        self.prompt_ids = asked + ids("assistant:")

    def turn_text(self, token_ids: Sequence[int], finish: Finish) -> str:
        return Letters().decode(token_ids)

    def wrote(self, token_ids: Sequence[int], finish: Finish) -> int:
        self._turns.append(tuple(token_ids))
        return len(self._turns) - 1


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


@dataclass
class WrittenSession:
    """A session whose answers are written by `write`, or at once by `reply`."""

    server: ModelServer | None = None
    asked: list[CallRequest] = field(default_factory=list)
    reply: str | None = None
    num_running: int = 0

    def submit(self, request: CallRequest) -> None:
        self.asked.append(request)
        if self.reply is not None:
            self.write(self.reply, request)

    def write(self, text: str, request: CallRequest | None = None, finish: Finish = Finish.EOS) -> None:
        request = request or self.asked[-1]
        token_ids = (*ids(text), EOS) if finish is Finish.EOS else ids(text)
        logprobs = tuple(-0.5 for _ in token_ids)
        call = ModelCall(
            request=request, token_ids=token_ids, logprobs=logprobs, finish=finish, versions=((7, 0), (8, 1))
        )
        assert self.server is not None
        self.server.answered([call])

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        raise NotImplementedError

    def forget(self, lane: Any) -> None:
        pass


@contextmanager
def serving(reply: str | None = None, **limits: Any) -> Iterator[tuple[ModelServer, WrittenSession]]:
    options = {"host": "127.0.0.1"} | {name: limits.pop(name) for name in ("host", "token") if name in limits}
    chat = ChatCalls(
        tokenizer=Letters(),
        begin=LetterDialogue,
        style="hermes",
        vocabulary=Vocabulary(size=300, special_ids=(EOS,)),
    )
    with closing(ModelServer(chat, max_model_len=64, **options)) as server:
        session = WrittenSession(server=server, reply=reply)
        yield server, session


def recording(session: WrittenSession, id: str = "secret", **limits: Any) -> Recording:
    return Recording(
        id=id,
        prompt=Prompt(id="row", token_ids=()),
        sample_index=0,
        lane=1,
        stream=5,
        session=session,
        options=OPTIONS,
        limits=Limits(**{"max_turns": 4, "max_tokens": 120} | limits),
        max_new_tokens=8,
    )


def post(url: str, body: Any, **options: Any) -> httpx2.Response:
    with httpx2.Client(trust_env=False, verify=False, timeout=LATEST_SECONDS) as client:
        return client.post(url, content=json.dumps(body), **options)


def chat(base_url: str, *texts: str, **body: Any) -> httpx2.Response:
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return post(f"{base_url}/chat/completions", {"model": "policy", "messages": messages, **body})


def request_of(server: ModelServer, header: str = "") -> tuple[bytes, bytes, tuple[str, int]]:
    """Head and body of a request in messages, and where to send them."""
    address = urlsplit(server.url)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = f"POST /t/secret/v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n{header}\r\n"
    return head.encode(), body, (str(address.hostname), int(address.port or 0))


class Asking(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, base_url: str, *texts: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self.response: httpx2.Response | None = None
        self._asked = base_url, texts, body
        self.start()

    def run(self) -> None:
        base_url, texts, body = self._asked
        with suppress(httpx2.TransportError):
            self.response = chat(base_url, *texts, **body)

    def ended(self) -> httpx2.Response | None:
        """The response; None if the connection was closed without one."""
        self.join(LATEST_SECONDS)
        assert not self.is_alive()
        return self.response

    def result(self) -> httpx2.Response:
        self.ended()
        assert self.response is not None
        return self.response
