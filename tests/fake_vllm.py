"""A server that speaks vLLM's HTTP: tiny, exact, and with faults on demand. It samples with the built-in rule."""

import argparse
import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, recv_fds
from socket import socket as Socket
from socketserver import BaseRequestHandler, ForkingMixIn, ThreadingUnixStreamServer, UnixStreamServer
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

import proximo
from builders import tiny_language_model, tiny_tokenizer
from fake_driver import FakeDriver
from inside_vllm import Loading, worker_file
from proximo.models.language import LanguageModel
from proximo.models.lora import load_adapter
from proximo.models.packing import pack
from proximo.rollout.local import FairLock
from proximo.rollout.sampling import SamplingOptions, sample
from proximo.rollout.vllm.engine import VLLMEngine, VLLMOptions
from proximo.rollout.vllm.server import VLLMServer

Fault = Callable[["FakeVLLM", str, dict[str, Any]], Any]
"""Called with path and body of a request. It returns the reply: bytes, a status, a status with what it says, or None
for the usual one."""

CUT = object()
"""A reply that never comes: the connection is closed."""
GENERATE = "/inference/v1/generate"
LOADING = threading.Lock()
"""Filters of warnings, which loading an adapter sets, are of the whole process."""


class FakeVLLM:
    """One server: its model, what it holds, and the requests that came."""

    def __init__(self, model: LanguageModel, fault: Fault | None = None, *, socket: str | None = None) -> None:
        copied = copy.deepcopy(model.model)
        self.base = LanguageModel(copied.unload() if isinstance(copied, PeftModel) else copied)
        self.first = {name: tensor.clone() for name, tensor in self.base.model.state_dict().items()}
        self.host, self.driver = "cpu", FakeDriver(Path())
        """The machine whose memory it can open, and the driver that opens it."""
        self.worker = self._worker()
        self.fault = fault
        self.version = "default"
        self.root = "base"
        self.adapters: dict[str, LanguageModel] = {}
        self.cached: dict[tuple[int, ...], tuple[str, torch.Tensor]] = {}
        """Logits after prompts, as a prefix cache would keep them."""
        self.keeps_prefixes = False
        """A prefix cache that nobody resets."""
        self.gives_masks = False
        """Started with `--return-sampling-mask`."""
        self.counts: Counter[str] = Counter()
        self.turns = FairLock()
        self.before_token: Callable[[int], object] = lambda position: None
        """Called before each token of a response, in the thread of its request."""
        self.is_paused = False
        self.is_asleep = False
        self._is_updating = False
        self.connections: list[Socket] = []
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server: Any
        if socket is None:
            self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        else:
            self._server = ThreadingUnixStreamServer(socket, handler)
            self.url = f"unix://{socket}"
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for each in self.connections:  # a client keeps some, and a server that is gone answers on none
            with suppress(OSError):
                each.shutdown(SHUT_RDWR)

    def _worker(self) -> Any:
        """The code of a worker process, on the model of this server."""
        code = worker_file()
        code.host_of, code.driver = lambda _: self.host, lambda: self.driver
        worker = code.Transfer()
        worker.model, worker.model_config = Loading(self.base.model, prefix=""), None
        worker.device = torch.device("cpu")
        return worker

    def restart(self) -> None:
        """Lose all that was pushed, as a server does that starts anew from its folder."""
        with self.turns.turn():  # no token is drawn by weights of one version under the name of another
            self.base.model.load_state_dict(self.first)
            self.version, self.adapters, self._is_updating, self.is_paused = "default", {}, False, False
            self.worker = self._worker()
            self.cached.clear()

    def has(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> bool:
        """Whether its weights are these tensors, rounded to the dtype in which they were sent."""
        own = dict(self.base.model.named_parameters())
        return all(own[name].equal(tensor.to(dtype).float()) for name, tensor in tensors.items())

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The usual reply: an object, a status, or a status with what it says."""
        if path == GENERATE:  # weights may change between two tokens
            return self.generate(body)
        with self.turns.turn():
            return self._answer(path, body)

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        return {
            "/weight_info": lambda: {"weight_version": self.version},
            "/v1/models": lambda: {
                "data": [
                    {"id": "base", "root": self.root, "parent": None, "max_model_len": 128},
                    *({"id": name, "parent": "base"} for name in self.adapters),
                ]
            },
            "/health": lambda: {},
            "/init_weight_transfer_engine": lambda: self.told(self.worker.init, body["init_info"]),
            "/start_weight_update": self.start,
            "/update_weights": lambda: self.update(body["update_info"]),
            "/finish_weight_update": lambda: self.finish(body.get("weight_version")),
            "/pause?mode=keep": self.pause,
            "/resume": self.resume,
            "/sleep?level=1": lambda: self.rest(sleeps=True),
            "/wake_up": lambda: self.rest(sleeps=False),
            "/v1/load_lora_adapter": lambda: self.load_adapter(body["lora_name"], Path(body["lora_path"])),
            "/v1/unload_lora_adapter": lambda: self.adapters.pop(body["lora_name"]) and {},
        }.get(path, lambda: 404)()

    def start(self) -> Any:
        if self._is_updating:
            return 500
        self._is_updating = True
        return {}

    def update(self, info: dict[str, Any]) -> Any:
        refused = self.is_asleep or not self.is_paused or not self._is_updating
        reply = 500 if refused else self.told(self.worker.update, info)
        self._is_updating = reply == {}
        return reply

    def told(self, do: Callable[[dict[str, Any]], None], info: dict[str, Any]) -> Any:
        """What a worker does, or the error with what it says."""
        try:
            do(info)
        except (ValueError, TypeError) as error:
            return 500, str(error)
        return {}

    def finish(self, version: str | None) -> Any:
        if not self._is_updating:
            return 500
        self._is_updating, self.version = False, version or self.version
        return {}

    def pause(self) -> Any:
        self.is_paused = True
        if not self.keeps_prefixes:
            self.cached.clear()
        return {"status": "paused"}

    def rest(self, *, sleeps: bool) -> Any:
        self.is_asleep = sleeps
        self.cached.clear()
        return {"status": "sleeping" if sleeps else "awake"}

    def resume(self) -> Any:
        self.is_paused = False
        return {"status": "resumed"}

    def load_adapter(self, name: str, folder: Path) -> Any:
        with LOADING:
            self.adapters[name] = LanguageModel(load_adapter(copy.deepcopy(self.base.model), folder))
        return {}

    def generate(self, body: dict[str, Any]) -> Any:
        assert not self.is_asleep
        model, name = self.base, body.get("model")
        if name is not None:
            if name not in self.adapters:
                return 404
            model = self.adapters[name]
        given = body["sampling_params"]
        if given.get("prompt_logprobs") is not None:
            return self.score(model, body["token_ids"])
        if self.gives_masks and (given["top_k"] <= 0 or given["temperature"] <= 0):
            return 400, "return_sampling_mask requires top_k > 0 and temperature > 0"
        options = SamplingOptions(
            max_new_tokens=given["max_tokens"],
            min_new_tokens=given["min_tokens"],
            temperature=given["temperature"] or 1.0,
            greedy=given["temperature"] == 0,
            top_k=given["top_k"] or None,
            top_p=given["top_p"],
        )
        ending = torch.tensor(given["stop_token_ids"], dtype=torch.long)
        token_ids, content, masks, finish = list(body["token_ids"]), [], [], "length"
        spans: list[dict[str, Any]] = []
        for position in range(options.max_new_tokens):
            self.before_token(position)
            while self.is_paused:
                time.sleep(0.001)
            with self.turns.turn():
                logits = self._logits(model, tuple(token_ids), is_prompt=position == 0)
                token, logprob, allowed = sample(
                    logits,
                    streams=torch.tensor([given["seed"]]),
                    positions=torch.tensor([position]),
                    options=options,
                    ending_ids=ending,
                )
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": position, "end": position})
                spans[-1]["end"] = position + 1
            masks.append(list(range(logits.shape[1])) if allowed is None else allowed[0].nonzero()[:, 0].tolist())
            if not self.gives_masks and options.leaves_out_tokens:
                logprob = (logits / options.temperature).log_softmax(1)[0, token]
            token_ids.append(int(token))
            content.append({"token_id": int(token), "logprob": float(logprob), "rank": 1, "top_logprobs": []})
            if int(token) in given["stop_token_ids"]:
                finish = "stop"
                break
        made = [each["token_id"] for each in content]
        choice = {"index": 0, "finish_reason": finish, "token_ids": made, "logprobs": {"content": content}}
        choice |= {"weight_versions": spans, "sampling_mask": masks if self.gives_masks else None}
        return {"choices": [choice]}

    @torch.no_grad()
    def score(self, model: LanguageModel, token_ids: list[int]) -> Any:
        """The log-prob of each id of a prompt, and one token after it. Temperature and top-k change nothing."""
        if len(token_ids) + 1 > 128 or max(token_ids) >= model.vocab_size:
            return 400, "the prompt is too long, or a token id is out of vocabulary"
        with self.turns.turn():
            logits = model.head.logits(model.hidden_states(pack([tuple(token_ids)])))
            spans = [{"version": self.version, "start": 0, "end": 1}]
        rows = zip(token_ids[1:], logits.log_softmax(1), strict=False)
        entries = [{str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": None}} for i, row in rows]
        choice = {"index": 0, "finish_reason": "length", "token_ids": [int(logits[-1].argmax())], "logprobs": None}
        return {"prompt_logprobs": [None, *entries], "choices": [choice | {"weight_versions": spans}]}

    @torch.no_grad()
    def _logits(self, model: LanguageModel, token_ids: tuple[int, ...], *, is_prompt: bool) -> torch.Tensor:
        if is_prompt and token_ids in self.cached:
            return self.cached[token_ids]
        packed = pack([token_ids])
        logits = model.head.logits(model.hidden_states(packed)[-1:])
        if is_prompt:
            self.cached[token_ids] = logits
        return logits


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVLLM
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # a reply in one piece, for which no client waits 40 ms

    def setup(self) -> None:
        super().setup()
        self.fake.connections.append(self.connection)

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        self.fake.counts[self.path] += 1
        reply = None if self.fake.fault is None else self.fake.fault(self.fake, self.path, body)
        if reply is None:
            reply = self.fake.answer(self.path, body)
        if reply is CUT:
            self.close_connection = True
            return
        status, content = _status_and_content(reply)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _status_and_content(reply: Any) -> tuple[int, bytes]:
    match reply:
        case int():
            return reply, b""
        case (int() as status, str() as said):
            return status, said.encode()
        case bytes():
            return 200, reply
    return 200, json.dumps(reply).encode()


@contextmanager
def fake_servers(model: LanguageModel, count: int = 1, fault: Fault | None = None) -> Iterator[list[FakeVLLM]]:
    """Servers of a model, closed at the end."""
    made = [FakeVLLM(model, fault) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def engine_on(fakes: list[FakeVLLM], policy: LanguageModel, opened: ExitStack, **options: Any) -> VLLMEngine:
    """An engine that samples with these servers."""
    servers = [VLLMServer(each.url) for each in fakes]
    engine = VLLMEngine(servers, policy, tiny_tokenizer(), eos_token_ids=[2], options=VLLMOptions(**options))
    opened.callback(engine.close)
    return engine


def fake_environment(folder: Path) -> Path:
    """An environment as `proximo engine install` makes one, whose vLLM is this file. A server starts a child in another
    session. With `--sleep` it does no more; with `--fail` it ends at once."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    here, package = Path(__file__), Path(proximo.__file__).parents[1]
    fails = 'case "$*" in *--fail*) echo "no memory for one block of the cache"; exit 1;; esac'
    sleeps = 'setsid sleep 600 & echo "child $!"\ncase "$*" in *--sleep*) exec sleep 600;; esac'
    runs = f'PYTHONPATH={here.parent}:{package} exec {sys.executable} {here} "$@"'
    python.write_text(f"#!/bin/sh\n{fails}\n{sleeps}\n{runs}\n")
    python.chmod(0o755)
    return folder


ASK = """import os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect(sys.argv[1])
socket.send_fds(asked, ["\\0".join(sys.argv[2:]).encode()], [1, 2])
os._exit(ord(asked.recv(1) or b"\\1"))"""


@contextmanager
def forked_environment(folder: Path) -> Iterator[Path]:
    """The same, but servers are forks of one process. What stands for each where it was started ends with it."""
    python, place = fake_environment(folder) / "bin" / "python", folder / "asked"
    (folder / "ask.py").write_text(ASK)
    *first, runs = python.read_text().splitlines()
    python.write_text("\n".join([*first, f'exec {sys.executable} -IS {folder / "ask.py"} {place} "$@"']))
    with subprocess.Popen(["/bin/sh", "-c", runs, "sh", str(place)], stdin=subprocess.PIPE) as process:
        while not place.exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield folder


class _Forked(BaseRequestHandler):
    """A server in a process of its own: here, in the fork for a request, its end is waited for and told."""

    def handle(self) -> None:
        words, outputs, *_ = recv_fds(self.request, 2**16, 2)
        if server := os.fork():
            self.request.send(bytes([os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) & 255]))
            return
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
        threading.Thread(target=lambda: self.request.recv(1) or os._exit(0), daemon=True).start()
        serve_forever(words.decode().split("\0"))


def fork_servers(place: str) -> None:
    """A server for each that asks at this socket, until the end of the input."""
    LanguageModel(tiny_language_model())  # imports what is imported with the first model
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(0), daemon=True).start()
    type("Forking", (ForkingMixIn, UnixStreamServer), {})(place, _Forked).serve_forever()


def _die(once: Path | None) -> None:
    try:
        if once is not None:
            once.touch(exist_ok=False)
    except FileExistsError:
        return
    print("no memory for one more response", flush=True)
    os._exit(9)


def serve_forever(arguments: list[str]) -> None:
    """What the command line of a server asks for: its model, at its socket. `--dies-after` ends after some responses,
    only where it can make the file `--dies-once`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    for name in ("--model", "--uds", "--load-format", "--logprobs-mode", "--dtype", "--tokenizer"):
        parser.add_argument(name)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--dies-after", type=int)
    parser.add_argument("--dies-once", type=Path)
    given, _ = parser.parse_known_args(arguments)
    assert given.module == "vllm.entrypoints.openai.api_server"
    if given.load_format == "dummy":
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given.model), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    fake = FakeVLLM(LanguageModel(model.eval()), socket=given.uds)
    if given.dies_after is not None:
        fake.fault = lambda fake, path, _: _die(given.dies_once) if fake.counts[GENERATE] > given.dies_after else None
    fake._thread.join()


if __name__ == "__main__":
    serve_forever(sys.argv[1:]) if sys.argv[2:] else fork_servers(sys.argv[1])
