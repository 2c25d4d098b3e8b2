"""Weights that are loaded while the built-in engine samples: they take effect at the next token."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.errors import TrainingError
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.records import Prompt, Response
from proximo.rollout.decoding import DecodingCall
from proximo.rollout.engine import push_weights, versions_of_tokens
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions

KEY = RandomKey(seed=3, purpose="rollout", step=0)
OPTIONS = SamplingOptions(max_new_tokens=10)
TEXTS = ("hello", "a", "what is it? tell me now.", "go on", "abc, abc")


def prompts() -> list[Prompt]:
    return [Prompt(id=text, token_ids=tuple(tiny_tokenizer().encode(text, add_special_tokens=False))) for text in TEXTS]


def policy(seed: int) -> LanguageModel:
    return LanguageModel(tiny_language_model(seed=seed, initializer_range=0.6))


def weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.trainable_parameters()}


def sampled(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, after_passes: int, then: Callable[[], None]
) -> list[Response]:
    """Responses of the engine; `then` runs in another thread after some passes, and to its end before the next one."""
    passes, step = [0], DecodingCall.step

    def counted(call: DecodingCall) -> list:
        passes[0] += 1
        ended = step(call)
        if passes[0] == after_passes:
            loading = threading.Thread(target=then)
            loading.start()
            threads.append(loading)
            while loading.is_alive() and not engine._turns._next.locked():
                time.sleep(0.001)
        return ended

    threads: list[threading.Thread] = []
    monkeypatch.setattr(DecodingCall, "step", counted)
    try:
        return engine.generate(prompts(), num_samples=2, options=OPTIONS, key=KEY)
    finally:
        for thread in threads:
            thread.join()


def logprobs(model: LanguageModel, response: Response) -> torch.Tensor:
    packed = pack_responses([response.prompt.token_ids], [response.token_ids])
    return model.response_logprobs(packed, temperature=1.0).logprobs.detach()


@pytest.mark.parametrize("max_num_seqs", [64, 4])
def test_each_token_is_drawn_by_the_weights_of_its_version(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
    """Its log-prob is that of the same tokens in one pass of these weights, which no stale key or value changes."""
    first, second = policy(0), policy(1)
    engine = LocalEngine(
        first.frozen_copy(), tiny_tokenizer(), eos_token_ids=(2,), max_num_seqs=max_num_seqs, owns_model=True
    )
    push_weights(engine, 4, weights(first))
    found = sampled(engine, monkeypatch, 3, lambda: engine.load_weights(5, weights(second)))
    mixed = [response for response in found if response.token_versions is not None]
    assert mixed
    assert all(response.token_versions == tuple(sorted(response.token_versions or ())) for response in mixed)
    for response in found:
        versions = torch.tensor(response.token_versions or (response.policy_version,) * len(response.token_ids))
        assert versions[0] == response.policy_version
        expected = torch.where(versions == 4, logprobs(first, response), logprobs(second, response))
        torch.testing.assert_close(response.logprobs, expected, atol=2e-5, rtol=0)
    if max_num_seqs == 4:  # those that wait begin with the new weights
        assert {response.policy_version for response in found} == {4, 5}


def test_the_tokens_before_are_kept_and_those_after_are_the_draws_of_the_same_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = policy(0)

    def engine() -> LocalEngine:
        made = LocalEngine(first.frozen_copy(), tiny_tokenizer(), eos_token_ids=(2,), owns_model=True)
        push_weights(made, 0, weights(first))
        return made

    whole = engine().generate(prompts(), num_samples=2, options=OPTIONS, key=KEY)
    other = engine()
    cut = sampled(other, monkeypatch, 4, lambda: other.load_weights(1, weights(first)))
    assert [each.token_ids for each in cut] == [each.token_ids for each in whole]
    assert any(each.token_versions for each in cut)


def test_two_calls_in_two_threads_give_what_each_gives_alone() -> None:
    model = policy(0)
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=(2,))
    push_weights(engine, 0, dict(model.trainable_parameters()))
    keys = [replace(KEY, step=step) for step in range(3)]
    alone = [engine.generate(prompts(), num_samples=1, options=OPTIONS, key=key) for key in keys]
    found: dict[int, list[Response]] = {}

    def run(number: int) -> None:
        found[number] = engine.generate(prompts(), num_samples=1, options=OPTIONS, key=keys[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert [r.token_ids for r in found[number]] == [r.token_ids for r in alone[number]]


def test_an_engine_that_is_stopped_raises_and_samples_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy(0)
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=(2,))
    push_weights(engine, 0, dict(model.trainable_parameters()))
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="stopped while it sampled"):
        sampled(engine, patch, 2, engine.stop)
    assert len(engine.generate(prompts(), num_samples=1, options=OPTIONS, key=KEY)) == len(TEXTS)


def test_the_versions_of_tokens_where_the_weights_change_twice_between_two_of_them() -> None:
    assert versions_of_tokens([(3, 0)], 2) == (3, 3)
    assert versions_of_tokens([(3, 0), (4, 2), (6, 2)], 4) == (3, 3, 6, 6)
    assert versions_of_tokens([(3, 0), (4, 2)], 2) == (3, 3)
    assert versions_of_tokens([(3, 0), (4, 5)], 2) == (3, 3)
