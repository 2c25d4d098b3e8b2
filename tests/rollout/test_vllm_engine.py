"""The vLLM engine against servers that fail: what is found, what is asked again, and what ends the run."""

import json
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import FakeVLLM, Fault, fake_servers
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, TrainingError
from proximo.http_client import UnansweredError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack_responses
from proximo.ppo.roles.sampler import check_engine
from proximo.ppo.trainer import PPOTrainer
from proximo.ppo.update.epochs import pack_members
from proximo.records import Finish, Prompt, Response, SamplingMask
from proximo.rollout.engine import fingerprint, push_weights
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.vllm import dispatch, pushed_weights, server
from proximo.rollout.vllm.dispatch import Dispatch, Job
from proximo.rollout.vllm.engine import VLLMEngine, VLLMOptions
from proximo.rollout.vllm.pushed_weights import PushedWeights
from proximo.rollout.vllm.requests import InvalidReplyError, read_choice
from proximo.rollout.vllm.server import ServerLimits, VLLMServer
from waiting import LATEST_SECONDS

PROMPTS = [Prompt(id=f"p{n}", token_ids=tuple(range(5, 8 + n))) for n in range(4)]
KEY = RandomKey(seed=3, purpose="rollout", step=1)
OPTIONS = SamplingOptions(max_new_tokens=6)
OPEN = ExitStack()
GENERATE = "/inference/v1/generate"


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves no server behind, and waits little."""
    for module in (dispatch, server):
        monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
        monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.1)
    with OPEN:
        yield


def model(seed: int = 0) -> LanguageModel:
    return LanguageModel(tiny_language_model(seed=seed, initializer_range=0.2))


def served(
    policy: LanguageModel,
    count: int = 1,
    fault: Fault | None = None,
    *,
    attempts: int = 3,
    sleeps: bool = False,
    **limits: Any,
) -> tuple[VLLMEngine, list[FakeVLLM]]:
    fakes = OPEN.enter_context(fake_servers(policy, count, fault))
    servers = [VLLMServer(each.url, limits=ServerLimits(**limits)) for each in fakes]
    engine = VLLMEngine(
        servers,
        policy,
        tiny_tokenizer(),
        eos_token_ids=[2],
        options=VLLMOptions(attempts=attempts, max_logprob_error=1e-3, sleeps=sleeps),
    )
    OPEN.callback(engine.close)
    return engine, fakes


def pushed(policy: LanguageModel, version: int = 1, **others: Any) -> tuple[VLLMEngine, list[FakeVLLM]]:
    engine, fakes = served(policy, **others)
    push_weights(engine, version, dict(policy.trainable_parameters()))
    return engine, fakes


def drawn(engine: Any, options: SamplingOptions = OPTIONS, num_samples: int = 3) -> list[Response]:
    return engine.generate(PROMPTS, num_samples=num_samples, options=options, key=KEY)


def tokens(responses: list[Response]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in responses]


def as_lists(mask: SamplingMask | None) -> Any:
    return mask and (mask.token_ids.tolist(), mask.counts.tolist())


def let_mask(engine: VLLMEngine, fakes: list[FakeVLLM]) -> None:
    engine.options = replace(engine.options, may_have_masks=True)
    for fake in fakes:
        fake.gives_masks = True


def built_in(policy: LanguageModel) -> LocalEngine:
    engine = LocalEngine(policy, tiny_tokenizer(), eos_token_ids=[2])
    engine.load_weights(1, dict(policy.trainable_parameters()))
    return engine


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        SamplingOptions(max_new_tokens=6, greedy=True),
        SamplingOptions(max_new_tokens=9, random_limit_min=2, stop_token_ids=(7, 8)),
        SamplingOptions(max_new_tokens=9, min_new_tokens=4, temperature=0.7),
        SamplingOptions(max_new_tokens=9, stop_strings=("a", "bc", "d")),
        SamplingOptions(max_new_tokens=6, top_k=3),
        SamplingOptions(max_new_tokens=6, top_p=0.5),
        SamplingOptions(max_new_tokens=6, top_k=9, top_p=0.8, temperature=0.7, min_new_tokens=3),
    ],
    ids=str,
)
def test_a_server_that_draws_as_we_do_gives_what_the_built_in_engine_gives(options: SamplingOptions) -> None:
    """The request says all that shapes a response: limits, ends, temperature, restrictions, the seed of each."""
    policy = model()
    engine, fakes = pushed(policy, count=2)
    if options.leaves_out_tokens:
        let_mask(engine, fakes)
    ours, theirs = drawn(built_in(policy), options), drawn(engine, options)
    assert tokens(theirs) == tokens(ours)
    assert [each.finish for each in theirs] == [each.finish for each in ours]
    assert [each.text for each in theirs] == [each.text for each in ours]
    if options.temperature == 1 or options.draws_from_full_softmax or options.leaves_out_tokens:
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(other.logprobs, own.logprobs, atol=1e-5, rtol=0)
            assert as_lists(other.sampling_mask) == as_lists(own.sampling_mask)
            assert (own.sampling_mask is not None) == options.leaves_out_tokens
    else:
        assert all(each.logprobs.isnan().all() for each in theirs)


def test_a_server_without_masks_gives_the_log_probs_of_all_tokens() -> None:
    """At temperature 1 they are those of all tokens; elsewhere nobody knows."""
    policy = model()
    engine, _ = pushed(policy)
    engine.options = replace(engine.options, may_have_masks=True)
    for temperature in (1.0, 0.7):
        shaped = SamplingOptions(max_new_tokens=6, top_k=3, temperature=temperature)
        theirs = drawn(engine, shaped)
        assert all(each.sampling_mask is None for each in theirs)
        ours = torch.cat([each.logprobs for each in theirs])
        assert ours.isnan().all() if temperature != 1 else torch.allclose(ours, learners(policy, theirs), atol=1e-5)


def test_servers_with_masks_take_all_that_a_run_asks_for() -> None:
    """vLLM refuses what has no top_k or no temperature: a greedy answer is the draw among one token."""
    policy = model()
    engine, fakes = pushed(policy)
    let_mask(engine, fakes)
    greedy, given = SamplingOptions(max_new_tokens=6, greedy=True), SamplingOptions(max_new_tokens=6, top_p=0.9)
    assert tokens(drawn(engine, greedy)) == tokens(drawn(built_in(policy), greedy))
    assert all(each.logprobs.isnan().all() and each.sampling_mask is None for each in drawn(engine, greedy))
    check_engine(engine, PROMPTS, lambda r: learners(policy, r), given, seed=0, version=1)


@torch.no_grad()
def learners(policy: LanguageModel, responses: list[Response]) -> torch.Tensor:
    packed = pack_members(responses, range(len(responses)), device=torch.device("cpu"))
    return policy.response_logprobs(packed).logprobs


@pytest.mark.parametrize(
    "mask",
    [
        [[5]],
        [[5], [6, 7]],
        [[5], 7],
        [[5], [7, -1]],
        [[5], [7, 64]],
        [[5], [7, "8"]],
        [[5], [7, 8.0]],
        [[5], [7, True]],
        [[5], [7, 2**40]],
        {"a": 1},
    ],
    ids=str,
)
def test_a_mask_that_is_not_of_the_response_is_no_reply(mask: Any) -> None:
    choice = {"token_ids": [5, 7], "finish_reason": "length", "sampling_mask": mask}
    spans = [{"version": "1", "start": 0, "end": 2}]
    reply = json.dumps({"choices": [choice | {"weight_versions": spans}]}).encode()
    if mask == [[5], [6, 7]]:
        assert as_lists(read_choice(reply, limit=2, vocab_size=64).sampling_mask) == ([5, 6, 7], [1, 2])
        return
    with pytest.raises(InvalidReplyError, match="sampling mask is not that of the response"):
        read_choice(reply, limit=2, vocab_size=64)


def test_prompts_are_balanced_and_a_prompt_stays_on_its_server() -> None:
    asked: dict[str, set[tuple[int, ...]]] = {}
    all_asked = threading.Barrier(12)

    def note(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == GENERATE:
            asked.setdefault(fake.url, set()).add(tuple(body["token_ids"]))
            all_asked.wait(LATEST_SECONDS)

    engine, fakes = pushed(model(), count=2, fault=note)
    drawn(engine)
    assert [len(asked[fake.url]) for fake in fakes] == [2, 2]
    assert sum(fake.counts[GENERATE] for fake in fakes) == 12


def broken(number: int, reply: Any) -> Fault:
    """The `number`-th request for a response gets this reply instead, or what it makes of the usual one."""
    seen = {"count": 0}

    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        if path != GENERATE:
            return None
        seen["count"] += 1
        if seen["count"] != number:
            return None
        if not callable(reply):
            return reply
        usual = fake.answer(path, body)
        return json.dumps(reply(usual)).encode()

    return fault


def none(usual: dict[str, Any]) -> dict[str, Any]:
    return usual | {"choices": []}


def one_more(usual: dict[str, Any]) -> dict[str, Any]:
    return usual | {"choices": usual["choices"] * 2}


def in_choice(**fields: Any) -> Any:
    return lambda usual: {"choices": [usual["choices"][0] | fields]}


def without_last_logprob(usual: dict[str, Any]) -> dict[str, Any]:
    choice = usual["choices"][0]
    return {"choices": [choice | {"logprobs": {"content": choice["logprobs"]["content"][:-1] or [{}]}}]}


@pytest.mark.parametrize(
    "reply",
    [
        500,
        503,
        b'{"choices": [{"tok',
        b"[]",
        none,
        one_more,
        in_choice(token_ids=[]),
        in_choice(token_ids=[10**6]),
        in_choice(token_ids=list(range(5, 40))),
        in_choice(token_ids=[5, "x"]),
        in_choice(finish_reason="abort"),
        in_choice(weight_versions=None),
        in_choice(weight_versions=[{"version": "proximo", "start": 1, "end": 2}]),
        without_last_logprob,
    ],
    ids=[
        "500",
        "503",
        "cut",
        "a list",
        "no response",
        "two responses",
        "no token",
        "a token beyond the vocabulary",
        "too many tokens",
        "no number",
        "aborted",
        "no weights named",
        "weights of some tokens",
        "log-probs of other tokens",
    ],
)
def test_a_broken_reply_is_asked_for_again_and_leaves_no_trace(reply: Any) -> None:
    policy = model()
    engine, fakes = pushed(policy, fault=broken(5, reply))
    assert tokens(drawn(engine)) == tokens(drawn(built_in(policy)))
    assert fakes[0].counts[GENERATE] == 13
    assert engine.counts["retries"] == 1


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((500, "CUDA out of memory. Tried to allocate 2.00 GiB"), "status 500 .CUDA out of memory. Tried to allocate"),
        (b"not JSON", "invalid reply: not JSON"),
    ],
)
def test_a_server_that_never_answers_rightly_ends_the_call_with_its_name_and_words(reply: Any, said: str) -> None:
    def always(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return reply if path == GENERATE else None

    engine, fakes = pushed(model(), fault=always)
    with pytest.raises(
        TrainingError, match=f"no usable response after 3 attempts, the last at .*{fakes[0].url}: {said}"
    ):
        drawn(engine)


def test_a_hung_server_is_left_at_the_deadline_of_a_request() -> None:
    go_on = threading.Event()

    def hang(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return go_on.wait(LATEST_SECONDS) and None if path == GENERATE else None

    engine, _ = pushed(model(), fault=hang, attempts=2, request_seconds=0.3)
    with pytest.raises(TrainingError, match=r"no complete reply within 0\.3 s"):
        drawn(engine)
    go_on.set()


def test_what_a_slow_server_owes_another_one_gives() -> None:
    policy, slow, go_on = model(), list[FakeVLLM](), threading.Event()

    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return go_on.wait(LATEST_SECONDS) and None if path == GENERATE and fake in slow else None

    engine, fakes = pushed(policy, count=2, fault=fault)
    slow.append(fakes[0])
    engine.servers[0].limits = ServerLimits(request_seconds=1.0)
    assert tokens(drawn(engine)) == tokens(drawn(built_in(policy)))
    go_on.set()
    assert 1 <= engine.counts["retries"] <= 12
    assert fakes[1].counts[GENERATE] >= 12


def test_what_a_dead_server_owes_another_one_gives() -> None:
    policy = model()
    engine, fakes = pushed(policy, count=2)
    fakes[0].close()
    try:
        assert tokens(drawn(engine)) == tokens(drawn(built_in(policy)))
    finally:
        fakes[0].close = lambda: None  # type: ignore[method-assign]
    assert fakes[1].counts[GENERATE] > 6


def test_a_job_that_waits_for_a_server_that_is_left_out_is_done_by_one_that_failed_as_well() -> None:
    """It fails once at the server that works, and goes to the dead one: nobody else would ever take it."""
    server: Any = SimpleNamespace(
        limits=ServerLimits(max_concurrent_requests=1), has_ended=lambda: False, restart_if_ended=lambda: None
    )
    asked: list[int] = []

    def ask(_: Any) -> int:
        asked.append(1)
        if len(asked) == 1:
            raise UnansweredError("not now")
        return 7

    call = Dispatch([server, server], [Job(home=1, ask=ask)], attempts=5)
    call._failures_in_a_row[0] = dispatch.FAILURES_IN_A_ROW
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(call.run()), daemon=True)
    thread.start()
    thread.join(LATEST_SECONDS)
    assert found == [7]


@pytest.mark.parametrize("num_ended", [1, 2])
def test_servers_that_have_ended_are_asked_no_more_once_none_is_left(num_ended: int) -> None:
    asked: list[int] = []

    def ask(server: Any) -> int:
        asked.append(1)
        if server.has_ended():
            raise UnansweredError("nobody listens")
        return 7

    servers: list[Any] = [
        SimpleNamespace(
            limits=ServerLimits(),
            url="url",
            has_ended=lambda i=i: i < num_ended,
            last_words=lambda: "status 9",
            restart_if_ended=lambda: None,
        )
        for i in range(2)
    ]
    call = Dispatch(servers, [Job(home=0, ask=ask)], attempts=1000)
    if num_ended == 1:
        assert list(call.run()) == [7]
    else:
        with pytest.raises(TrainingError, match="the vLLM server url answers no more: nobody listens; status 9"):
            list(call.run())
        assert len(asked) == 1


def test_a_refusal_is_not_repeated() -> None:
    def refuse(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return 400 if path == GENERATE else None

    engine, fakes = pushed(model(), fault=refuse)
    with pytest.raises(TrainingError, match="a vLLM server refused a request: .* status 400"):
        drawn(engine)
    assert fakes[0].counts[GENERATE] <= 12


def test_a_server_that_starts_anew_within_a_rollout_gets_the_weights_again() -> None:
    """Its first weights are another policy's; no response of theirs is kept."""
    policy, seen = model(1), {"count": 0}

    def restart(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == GENERATE:
            seen["count"] += 1
            if seen["count"] == 5:
                fake.restart()

    engine, fakes = served(model(), fault=restart, attempts=5)
    push_weights(engine, 1, dict(policy.trainable_parameters()))
    assert tokens(drawn(engine)) == tokens(drawn(built_in(policy)))
    assert engine.counts["stale"] >= 1
    assert fakes[0].counts["/update_weights"] == 2


@pytest.mark.parametrize("lora", [False, True])
def test_a_server_that_serves_another_run_too_is_told_as_that(*, lora: bool) -> None:
    """Each pushes whenever the other has: no response is ever one's own."""
    policy = model().with_adapter(LoRAOptions(rank=2)) if lora else model()
    others: list[VLLMEngine] = []

    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == GENERATE:
            others[0].load_weights(10 + fake.counts[GENERATE], dict(policy.trainable_parameters()))

    engine, fakes = pushed(policy, fault=fault, attempts=2)
    others.append(VLLMEngine([VLLMServer(fakes[0].url)], policy, tiny_tokenizer(), eos_token_ids=[2]))
    OPEN.callback(others[0].close)
    said = (
        "it was restarted, or serves another run too" if lora else "weights proximo-12-.*: another run probably pushes"
    )
    with pytest.raises(
        TrainingError, match=f"after 2 attempts, the last at the vLLM server {fakes[0].url}: it .*{said}"
    ):
        engine.generate(PROMPTS[:1], num_samples=1, options=OPTIONS, key=KEY)


def test_an_adapter_that_a_server_lost_is_given_again() -> None:
    policy, seen = model().with_adapter(LoRAOptions(rank=2)), {"count": 0}

    def restart(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == GENERATE:
            seen["count"] += 1
            if seen["count"] == 5:
                fake.restart()

    engine, fakes = served(policy, fault=restart, attempts=5)
    other = {name: tensor.detach() + 0.5 for name, tensor in policy.trainable_parameters()}
    engine.load_weights(1, other)
    before = tokens(drawn(engine))
    assert before == tokens(drawn(engine))
    assert fakes[0].counts["/v1/load_lora_adapter"] == 2
    assert list(fakes[0].adapters) == [engine._last.name]  # type: ignore[union-attr]


# What a push may do wrong. Each is found in the next step, by one check alone.


def trained(fault: Fault | None = None, *, staleness: int = 0, **options: Any) -> tuple[PPOTrainer, FakeVLLM]:
    policy = model()
    engine, fakes = served(policy, fault=fault, **options)
    config = PPOConfig(
        num_steps=3,
        prompts_per_step=4,
        responses_per_prompt=2,
        epochs_per_step=1,
        num_minibatches=2,
        rollout={"max_new_tokens": 6, "staleness": staleness},  # type: ignore[arg-type]
        policy_optimizer={"learning_rate": 3e-2},  # type: ignore[arg-type]
    )
    return PPOTrainer(policy, tiny_tokenizer(), engine=engine, config=config), fakes[0]


def length(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    return [float(len(text)) for text in responses]


def run(trainer: PPOTrainer) -> list[dict[str, float]]:
    return [dict(line) for line in trainer.train(["ab", "cde", "f", "gh"], reward=length)]


def test_a_run_through_servers_measures_its_mismatch() -> None:
    trainer, fake = trained()
    for line in run(trainer):
        assert abs(line["mismatch/kl"]) < 1e-5
        assert line["mismatch/max_abs_log_ratio"] < 1e-4
        assert line["mismatch/missing_logprobs"] == 0
    assert fake.counts["/update_weights"] == 4
    assert fake.version.startswith("proximo-6-")


def test_what_servers_failed_at_is_in_the_line_of_the_step() -> None:
    seen = {"count": 0}

    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        seen["count"] += path == GENERATE
        if path == GENERATE and seen["count"] == 3:
            return 500
        if path == GENERATE and seen["count"] == 20:
            fake.restart()
        return None

    trainer, _ = trained(fault=fault)
    lines = run(trainer)
    retries = [line["engine/retries"] for line in lines]
    stale = [line["engine/stale_responses"] for line in lines]
    assert retries[0] == 1
    assert stale[0] == 0
    assert retries[1] == stale[1] >= 1
    assert retries[2] == stale[2] == 0


class Slow(Counter[str]):
    """Other threads run between its reading and its writing."""

    def __getitem__(self, key: str) -> int:
        found = super().__getitem__(key)
        time.sleep(0.001)
        return found


def at_once(count: int, run: Callable[[], object]) -> None:
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_threads_count_at_the_same_time_is_counted_once_each() -> None:
    engine, _ = served(model())
    engine.counts = Slow()
    at_once(20, lambda: engine._count("stale", 1))
    found = {name: metric.value for name, metric in engine.statistics().items()}
    assert found == {"engine/retries": 0, "engine/stale_responses": 20, "engine/restarts": 0}
    assert engine.statistics()["engine/stale_responses"].value == 0


def test_calls_that_run_at_the_same_time_are_counted_once_each() -> None:
    """By this count the adapters are kept that running calls sample with."""
    engine, _ = pushed(model())
    engine._calls = Slow()
    at_once(8, lambda: drawn(engine, SamplingOptions(max_new_tokens=1)))
    assert set(engine._calls.values()) == {0}


def test_a_server_that_lost_its_weights_is_given_the_last_ones_and_not_while_it_loads_them() -> None:
    """A call that began before a push notices during it that the server has other weights."""
    noticing: list[threading.Thread] = []

    def restart(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights" and fake.counts[path] == 2:
            fake.version = "others"
            noticing.append(threading.Thread(target=lambda: engine._reload(engine.servers[0], earlier)))
            noticing[0].start()
            noticing[0].join(0.3)

    policy = model()
    engine, (fake,) = pushed(policy, version=0, fault=restart)
    earlier = engine._last
    assert earlier is not None
    engine.load_weights(1, dict(policy.trainable_parameters()))
    noticing[0].join(LATEST_SECONDS)
    held = engine.holds()
    assert held is not None
    assert held.version == 1
    assert fake.counts["/update_weights"] == 2


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_push_that_is_cut_short_ends_the_run(step: str) -> None:
    def cut(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return 500 if path == step and fake.version.startswith("proximo-0") else None

    trainer, fake = trained(fault=cut)
    with pytest.raises(TrainingError, match=r"did not load the policy's weights of version 2: status 500"):
        run(trainer)
    assert not fake.is_paused, "others wait for it"


def test_the_error_of_a_push_is_told_and_not_that_of_what_comes_after_it() -> None:
    """vLLM closes the connection over which it tells an error; the next request may find it so."""
    said: list[str] = []

    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights":
            return 500, "no memory for the layer"
        if path == "/resume":
            said.append(path)
            return 503 if len(said) == 1 else None
        return None

    policy = model()
    engine, fakes = served(policy, fault=fault)
    with pytest.raises(TrainingError, match="status 500 .no memory for the layer"):
        push_weights(engine, 1, dict(policy.trainable_parameters()))
    assert not fakes[0].is_paused


def test_a_server_that_an_earlier_trainer_left_within_a_push_takes_the_next_one() -> None:
    policy = model()
    engine, fakes = served(policy)
    fakes[0].pause()
    fakes[0].start()
    push_weights(engine, 1, dict(policy.trainable_parameters()))
    assert tokens(drawn(engine)) == tokens(drawn(built_in(policy)))
    assert not fakes[0].is_paused


def test_a_push_that_is_skipped_is_found_by_the_version() -> None:
    def skip(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        pushes = ("/start_weight_update", "/update_weights", "/finish_weight_update")
        return b"{}" if path in pushes and fake.version.startswith("proximo-0") else None

    trainer, _ = trained(fault=skip)
    with pytest.raises(TrainingError, match="given the policy's weights of version 2, but holds nothing"):
        run(trainer)


def test_weights_of_another_push_under_the_right_name_are_found_by_their_digest() -> None:
    kept: list[bytes] = []

    def swap(fake: FakeVLLM, path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights":
            (file,) = Path(body["update_info"]["path"]).iterdir()
            kept.append(file.read_bytes())
            file.write_bytes(kept[0])

    trainer, _ = trained(fault=swap)
    with pytest.raises(TrainingError, match="did not load the policy's weights of version 2"):
        run(trainer)


def test_weights_that_are_not_loaded_though_the_server_says_so_are_found_by_the_canary() -> None:
    def forget(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        return b"{}" if path == "/update_weights" and fake.version.startswith("proximo-0") else None

    trainer, _ = trained(fault=forget)
    with pytest.raises(TrainingError, match="weights of version 2, but its log-probs differ from the learner's by up"):
        run(trainer)


def test_a_prefix_cache_that_is_not_reset_is_found_by_the_canary() -> None:
    trainer, fake = trained()
    fake.keeps_prefixes = True
    with pytest.raises(TrainingError, match="a prefix cache that was not reset"):
        run(trainer)


@pytest.mark.parametrize(
    ("other", "tensor"),
    [
        ({"vocab_size": 72}, "lm_head.weight of shape (72, 16)"),
        ({"num_hidden_layers": 3}, "model.layers.2."),
    ],
    ids=["vocabulary", "layers"],
)
def test_a_server_of_another_model_is_told_with_the_tensor_that_does_not_fit(other: Any, tensor: str) -> None:
    fakes = OPEN.enter_context(fake_servers(model()))
    policy = LanguageModel(tiny_language_model(**other))
    engine = VLLMEngine([VLLMServer(fakes[0].url)], policy, tiny_tokenizer(), eos_token_ids=[2])
    OPEN.callback(engine.close)
    with pytest.raises(TrainingError) as caught:
        push_weights(engine, 1, dict(policy.trainable_parameters()))
    assert (
        f"did not load the policy's weights of version 1: status 500 (the server's model has no place for {tensor}"
        in (str(caught.value))
    )


def test_a_push_that_comes_twice_changes_nothing() -> None:
    policy = model()
    engine, fakes = pushed(policy)
    before = tokens(drawn(engine))
    engine.load_weights(1, dict(policy.trainable_parameters()))
    assert fakes[0].counts["/update_weights"] == 2
    assert tokens(drawn(engine)) == before


def test_log_probs_that_are_missing_are_the_learners_and_are_counted() -> None:
    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        if path != GENERATE:
            return None
        usual = fake.answer(path, body)
        usual["choices"][0]["logprobs"]["content"][0]["logprob"] = math.nan
        return json.dumps(usual).encode()

    trainer, _ = trained(fault=fault)
    for line in run(trainer):
        assert line["mismatch/missing_logprobs"] == 8
        assert abs(line["mismatch/kl"]) < 1e-5
        assert math.isfinite(line["policy/loss"])


def test_an_engine_without_log_probs_is_used_and_told_to_be_unchecked() -> None:
    def fault(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        if path != GENERATE:
            return None
        usual = fake.answer(path, body)
        return json.dumps(in_choice(logprobs=None)(usual)).encode()

    trainer, _ = trained(fault=fault)
    with pytest.warns(UserWarning, match="gives no log-probs of the tokens that it samples") as told:
        lines = run(trainer)
    messages = sorted({str(each.message) for each in told})  # a run shows equal ones once
    assert [message.partition(":")[0] for message in messages] == [
        "ppo.guards.max_mismatch compares nothing",
        "the engine gives no log-probs of the tokens that it samples",
    ]
    assert all(line["mismatch/missing_logprobs"] > 8 for line in lines)


def test_ends_of_responses_are_ours_where_the_server_reads_another_text() -> None:
    """It ends at a string that our decoding does not find: it is asked once more, without stop strings."""

    def early(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        if path == GENERATE and "stop" in body["sampling_params"]:
            shorter = body | {"sampling_params": body["sampling_params"] | {"max_tokens": 2, "min_tokens": 2}}
            return json.dumps(fake.answer(path, shorter)).encode()
        return None

    policy = model()
    engine, _ = pushed(policy, fault=early)
    options = SamplingOptions(max_new_tokens=6, stop_strings=("zzz",))
    assert tokens(drawn(engine, options)) == tokens(drawn(built_in(policy), options))
    assert {each.finish for each in drawn(engine, options)} <= {Finish.EOS, Finish.LENGTH}


def test_files_of_pushes_do_not_pile_up_and_go_with_the_engine() -> None:
    policy = model()
    engine, _ = pushed(policy)
    for version in (2, 3):
        push_weights(engine, version, dict(policy.trainable_parameters()))
    folder = engine._files.folder
    assert len(list(folder.iterdir())) == 1
    engine.close()
    assert not folder.exists()


def test_a_push_is_written_in_parts_and_of_each_no_more_is_copied_than_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another type each tensor is a copy of its own: a part at a time. In the same type there is none."""
    monkeypatch.setattr(pushed_weights, "PART_BYTES", 3000)
    alive: list[weakref.ref[torch.Tensor]] = []
    counts: list[int] = []
    on_host = pushed_weights._on_host

    def noted(*given: Any) -> torch.Tensor:
        alive.append(weakref.ref(tensor := on_host(*given)))
        counts.append(sum(each() is not None for each in alive))
        return tensor

    monkeypatch.setattr(pushed_weights, "_on_host", noted)
    tensors = {f"t{n}": torch.randn(500) for n in range(8)}
    files = PushedWeights(tmp_path, adapter=None, num_tensors=9)
    folder = files.write(tensors.items(), torch.bfloat16)
    found = {name: tensor for path in folder.iterdir() for name, tensor in load_file(path).items()}
    assert fingerprint(found) == fingerprint(tensors, torch.bfloat16) != fingerprint(tensors)
    assert counts == [1, 2, 3, 1, 2, 3, 1, 2], "three tensors of 1000 bytes are a part"
    assert on_host(tensors["t0"], torch.float32).data_ptr() == tensors["t0"].data_ptr()
    with safe_open(folder / "model-00002.safetensors", "pt") as file:
        assert file.metadata()["tensors_of_model"] == "9"


def test_a_folder_of_a_trainer_that_ended_is_removed_and_one_of_another_machine_is_not(tmp_path: Path) -> None:
    """Several machines may share the folder. A process id of another one says nothing here."""
    first = PushedWeights(tmp_path, adapter=None, num_tensors=2)
    ended = first.folder.with_name(first.folder.name.replace(str(os.getpid()), str(2**22 + 1)))
    here = pushed_weights._own_prefix()
    elsewhere = ended.with_name(ended.name.replace(here, f"{pushed_weights.PREFIX}00000000-"))
    for each in (ended, elsewhere):
        each.mkdir()
    second = PushedWeights(tmp_path, adapter=None, num_tensors=2)
    assert {*tmp_path.iterdir()} == {first.folder, second.folder, elsewhere}


def test_weights_that_cannot_be_written_end_the_run_with_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(pushed_weights, "save_file", full)
    policy = model()
    engine, _ = served(policy)
    with pytest.raises(TrainingError, match=r"cannot be written to .*No space left.*engine\.transfer_folder"):
        engine.load_weights(1, dict(policy.trainable_parameters()))


def until_loaded(fake: FakeVLLM) -> tuple[threading.Event, threading.Event]:
    """Responses wait at their fourth token: the first event is set when one is there, the second lets them go on."""
    reached, loaded = threading.Event(), threading.Event()

    def before_token(position: int) -> None:
        if position == 3:
            reached.set()
            assert loaded.wait(LATEST_SECONDS)

    fake.before_token = before_token
    return reached, loaded


def test_weights_that_are_loaded_while_it_samples_take_effect_at_the_next_token() -> None:
    policy = model()
    engine, (fake,) = pushed(policy, version=0)
    reached, loaded = until_loaded(fake)
    before, found = policy.frozen_copy(), list[Response]()
    asking = threading.Thread(target=lambda: found.extend(drawn(engine, SamplingOptions(max_new_tokens=30))))
    asking.start()
    assert reached.wait(LATEST_SECONDS)
    with torch.no_grad():
        for _, tensor in policy.trainable_parameters():
            tensor.add_(0.05)
    engine.load_weights(1, dict(policy.trainable_parameters()))
    loaded.set()
    asking.join(LATEST_SECONDS)
    mixed = [each for each in found if each.token_versions is not None]
    assert mixed
    for each in mixed:
        assert each.policy_version == 0
        versions = torch.tensor(each.token_versions)
        expected = torch.where(versions == 0, logprobs_under(before, each), logprobs_under(policy, each))
        torch.testing.assert_close(each.logprobs, expected, atol=1e-4, rtol=0)


def test_a_response_of_weights_from_before_its_call_is_sampled_again() -> None:
    """The server took an earlier push up again. Later pushes than that of the call are fine, earlier ones are not."""
    policy = model()
    engine, (fake,) = pushed(policy, version=0)
    first = fake.version
    engine.load_weights(1, dict(policy.trainable_parameters()))
    fake.version = first
    assert {each.policy_version for each in drawn(engine)} == {1}
    assert engine.counts["stale"]


def logprobs_under(policy: LanguageModel, response: Response) -> torch.Tensor:
    packed = pack_responses([response.prompt.token_ids], [response.token_ids])
    return policy.response_logprobs(packed).logprobs.detach()


def test_calls_of_an_adapter_end_with_theirs_while_the_next_one_is_loaded() -> None:
    policy = LanguageModel(tiny_language_model()).with_adapter(LoRAOptions(rank=2, alpha=4.0))
    engine, (fake,) = pushed(policy, version=0)
    reached, loaded = until_loaded(fake)
    found: list[Response] = []
    asking = threading.Thread(target=lambda: found.extend(drawn(engine, SamplingOptions(max_new_tokens=30))))
    asking.start()
    assert reached.wait(LATEST_SECONDS)
    engine.load_weights(1, dict(policy.trainable_parameters()))
    assert len(fake.adapters) == 2, "the one that samples is kept"
    loaded.set()
    asking.join(LATEST_SECONDS)
    assert {each.policy_version for each in found} == {0}
    engine.load_weights(2, dict(policy.trainable_parameters()))
    assert len(fake.adapters) == 1
    assert {each.policy_version for each in drawn(engine)} == {2}


def test_servers_that_sleep_do_not_sample_ahead() -> None:
    with pytest.raises(ConfigError, match="does not say that it is thread_safe"):
        trained(staleness=1, sleeps=True)


def test_servers_sleep_while_the_learner_trains_and_wake_for_a_push_and_for_samples() -> None:
    policy = model()
    asleep: list[tuple[str, bool]] = []

    def watched(fake: FakeVLLM, path: str, body: dict[str, Any]) -> Any:
        asleep.append((path, fake.is_asleep))
        return None

    engine, (fake,) = served(policy, fault=watched, sleeps=True)
    engine.load_weights(0, dict(policy.trainable_parameters()))
    assert not fake.is_asleep
    drawn(engine)
    assert fake.is_asleep
    engine.load_weights(1, dict(policy.trainable_parameters()))
    drawn(engine)
    assert not [path for path, sleeps in asleep if sleeps and path in (GENERATE, "/update_weights")]
    engine.close()
    assert not fake.is_asleep, "another run may use it"


def test_a_server_that_cannot_sleep_is_an_error_that_says_what_it_needs() -> None:
    policy = model()
    engine, _ = pushed(policy, fault=lambda _, path, __: 404 if path.startswith("/sleep") else None, sleeps=True)
    with pytest.raises(TrainingError, match="does not sleep .engine.sleep; it needs vLLM's enable-sleep-mode"):
        drawn(engine)
