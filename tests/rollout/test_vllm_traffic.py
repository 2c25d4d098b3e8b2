"""Requests and replies of vLLM 0.32, recorded: what we ask is what it answered then, and its answers are understood.

The fake server of the other tests speaks the same paths; this holds that vLLM itself does.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model
from fake_vllm import FakeVLLM, fake_servers
from inside_vllm import Loading, worker_file
from proximo.models.language import LanguageModel
from proximo.rollout.engine import fingerprint
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.vllm.pushed_weights import PushedWeights
from proximo.rollout.vllm.requests import GENERATE_PATH, generate_body, ids_body, read_choice, read_logprobs
from proximo.rollout.vllm.server import VLLMServer

RECORDED = [json.loads(line) for line in (Path(__file__).parent / "recorded_vllm.jsonl").read_text().splitlines()]
*GENERATED, INTERRUPTED, GIVEN = [line for line in RECORDED if line["path"] == GENERATE_PATH]
"""Responses, the last of which was being sampled when weights were loaded; and log-probs of given ids."""
KEY = RandomKey(seed=3, purpose="rollout", step=1)
OPTIONS = (
    SamplingOptions(max_new_tokens=3),
    SamplingOptions(max_new_tokens=4, greedy=True),
    SamplingOptions(max_new_tokens=20, stop_token_ids=tuple(range(7, 13))),
    SamplingOptions(max_new_tokens=20, stop_strings=tuple("abcdef")),
    SamplingOptions(max_new_tokens=4, min_new_tokens=2, top_k=5, top_p=0.9),
)


@pytest.mark.parametrize(("options", "line"), list(zip(OPTIONS, GENERATED, strict=True)))
def test_a_response_is_asked_for_and_read_as_vllm_answered(options: SamplingOptions, line: dict[str, Any]) -> None:
    body = generate_body(
        [5, 6, 7],
        options=options,
        ending_ids=[2],
        seed=KEY.stream(0, 0),
        limit=options.max_new_tokens,
        model=None,
        vocab_size=None,
        with_stop_strings=bool(options.stop_strings),
    )
    assert json.loads(body) == line["request"]
    choice = read_choice(line["reply"].encode(), limit=options.max_new_tokens, vocab_size=64)
    (sent,) = json.loads(line["reply"])["choices"]
    assert list(choice.token_ids) == sent["token_ids"]
    assert list(choice.logprobs) == [each["logprob"] for each in sent["logprobs"]["content"]]
    assert choice.weight_versions == (("proximo-0-3d7a8276f7c3fef2", 0),)


def test_the_weights_of_each_token_are_read_where_other_ones_were_loaded_meanwhile() -> None:
    choice = read_choice(INTERRUPTED["reply"].encode(), limit=32, vocab_size=64)
    assert choice.weight_versions == (("proximo-0-d3c30d9cc7f10691", 0), ("proximo-1-fec294195c9cfcfb", 1))
    assert len(choice.token_ids) == 32


def test_log_probs_of_given_ids_are_asked_for_and_read_as_vllm_answered_and_the_fake_answers_alike() -> None:
    ids, real = GIVEN["request"]["token_ids"], json.loads(GIVEN["reply"])
    assert json.loads(ids_body(ids)) == GIVEN["request"]
    found = read_logprobs(GIVEN["reply"].encode(), ids, start=3)
    assert found == (-4.417847633361816, -2.1570780277252197, -3.0626068115234375)
    with fake_servers(LanguageModel(tiny_language_model())) as (fake,):
        own = fake.answer(GENERATE_PATH, GIVEN["request"])
    assert own.keys() <= real.keys()
    assert own["choices"][0].keys() <= real["choices"][0].keys()
    for made, recorded in zip(own["prompt_logprobs"], real["prompt_logprobs"], strict=True):
        assert (made and [*made, *made.popitem()[1]]) == (recorded and [*recorded, *recorded.popitem()[1]])


def test_weights_are_pushed_and_asked_for_as_vllm_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    server = VLLMServer("http://127.0.0.1:9")
    lines = [line for line in RECORDED if line["path"] != GENERATE_PATH]
    given = iter(lines)

    def send(method: str, path: str, body: bytes = b"", *, seconds: float) -> bytes:
        line = next(given)
        assert (method, path, json.loads(body or b"null")) == (line["method"], line["path"], line["request"])
        return line["reply"].encode()

    monkeypatch.setattr(server._client, "send", send)
    update = lines[3]["request"]["update_info"]
    version = "proximo-0-3d7a8276f7c3fef2"
    server.load_weights(update, version=version)
    assert server.weight_version() == version
    assert server.weight_version() == version
    assert server.adapters() == []
    server.close()


def test_the_fake_server_knows_the_paths_that_vllm_knows() -> None:
    paths = {line["path"] for line in RECORDED}
    source = Path(FakeVLLM.__module__ + ".py")
    text = (Path(__file__).parents[1] / source).read_text()
    assert not [path for path in paths if f'"{path}"' not in text]


def test_the_digest_inside_vllm_is_the_trainers_fingerprint() -> None:
    """The file that vLLM imports knows nothing of Proximo, so it has the rule a second time."""
    tensors = {"b": torch.arange(400.0).view(20, 20), "a": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(2.0)}
    assert worker_file().digest(tensors, {}) == fingerprint(tensors)


def test_another_file_than_was_announced_is_refused_before_a_layer_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = worker_file()
    monkeypatch.setattr(made, "initialize_layerwise_reload", None)
    path = PushedWeights(tmp_path, adapter=None, num_tensors=1).write({"a": torch.ones(3)}.items())
    update = made.TransferUpdate(path=str(path), digest=fingerprint({"a": torch.zeros(3)}))
    with pytest.raises(ValueError, match="holds other weights than were announced"):
        made.Transfer().receive_weights(update)


def layers(**shapes: tuple[int, ...]) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, shape in shapes.items():
        made.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    return made


@pytest.mark.parametrize(
    ("sent", "is_whole", "said"),
    [
        ({"layers.a": 3, "layers.b": 2}, True, None),
        ({"layers.a": 3}, False, None),
        ({"layers.a": 3}, True, "the trainer's model has no layers.b, which the server's has"),
        ({"layers.a": 3, "layers.c": 2}, True, r"has no place for layers.c of shape \(2,\): KeyError"),
        ({"layers.a": 3, "layers.b": 5}, True, r"has no place for layers.b of shape \(5,\): RuntimeError"),
    ],
)
def test_a_push_of_another_model_is_refused_with_the_tensor(
    sent: dict[str, int], *, is_whole: bool, said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, done = worker_file(), []
    monkeypatch.setattr(made, "initialize_layerwise_reload", lambda _: done.append("opened"))
    monkeypatch.setattr(made, "finalize_layerwise_reload", lambda *_: done.append("closed"))
    transfer = made.Transfer()
    transfer.model, transfer.model_config = Loading(layers(a=(3,), b=(2,))), None
    transfer.device = torch.device("cpu")
    tensors = {name: torch.ones(size) for name, size in sent.items()}
    files = PushedWeights(tmp_path, adapter=None, num_tensors=len(sent) if is_whole else 2)
    update = made.TransferUpdate(path=str(files.write(tensors.items())), digest=fingerprint(tensors))
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        transfer.receive_weights(update)
    assert done == ["opened", "closed"], "an open layer cannot sample"
    assert (transfer.model.layers.a == 1).all()
