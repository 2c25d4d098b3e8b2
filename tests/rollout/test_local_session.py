"""Sessions of the built-in engine: samples depend on the trajectory alone, log-probs are those of the learner."""

import random
import threading
from collections.abc import Callable

import pytest
import torch

from architectures import ARCHITECTURES, build_architecture
from builders import tiny_tokenizer
from proximo.errors import TrainingError, UserError
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.records import Finish, Prompt
from proximo.rollout import decoding, local_session
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import CallRequest, Session
from proximo_cpu.library import library
from session_play import KEY, OPTIONS, Played, learners_logprobs, play, trajectories

WITH_KERNELS = ["llama", "qwen2", "mistral_window", "gemma2", "gpt2"]
"""Grouped heads, tied embeddings, windows, soft-caps, tables of positions."""


def engine_of(name: str = "llama", *, slots: int = 5, **options) -> LocalEngine:
    precision = options.pop("precision", Precision.FLOAT32)
    model = LanguageModel(build_architecture(name), precision=precision)
    return LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2, 17], max_num_seqs=slots, owns_model=True, **options)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_of_eight_turns_are_the_learners(name: str) -> None:
    engine = engine_of(name)
    played = play(engine, trajectories(7, num_turns=8), delay=lambda each: (each.index + len(each.calls)) % 3)
    expect_learners(engine, played, tolerance=1e-5)
    assert {len(each.calls) for each in played} == {8}


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral_window"])
def test_the_modules_compute_the_same(name: str) -> None:
    """In float64: rows that are not the first ones, and packed tokens over their past."""
    model = LanguageModel(build_architecture(name, dtype=torch.float64))
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2, 17], max_num_seqs=5)
    played = play(engine, trajectories(7, num_turns=5), delay=lambda each: each.index % 3)
    expect_learners(engine, played, tolerance=2e-6)


def expect_learners(engine: LocalEngine, played: list[Played], *, tolerance: float) -> None:
    """Log-probs of the policy's tokens are the learner's, relatively or absolutely: some are -10."""
    for each, expected in zip(played, learners_logprobs(engine._model, played), strict=True):
        found = torch.tensor([logprob for _, logprob in each.written])
        torch.testing.assert_close(found, expected.float(), rtol=tolerance, atol=tolerance)


def never_kept(patch: pytest.MonkeyPatch) -> None:
    """A lane that thinks loses its row as soon as another calls."""
    patch.setattr(local_session, "_MOST_BYTES", 0)


def never_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(local_session, "_SHARED_TOKENS", 1000)


@pytest.mark.skipif(library() is None, reason="torch's products of other numbers of rows have other last bits")
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, Precision.FLOAT32) for name in WITH_KERNELS), ("qwen2", Precision.BF16), ("gemma2", Precision.BF16)],
)
def test_a_trajectory_is_the_same_to_the_bit_in_any_company(
    name: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts(slots: int, delay: Callable[[Played], int] = lambda _: 0, *, only: int | None = None, **options):
        played = trajectories(7, num_turns=3)
        chosen = played if only is None else [played[only]]
        play(engine_of(name, slots=slots, precision=precision, **options), chosen, delay=delay)
        return {each.index: each.facts() for each in chosen}

    expected = facts(64)
    assert facts(64, only=4)[4] == expected[4], "alone"
    assert facts(2) == expected, "few at a time"
    assert facts(4, lambda each: random.Random(each.index).randrange(6)) == expected, "another order"
    assert facts(9, prefill_tokens=2) == expected, "read in small parts"
    never_kept(monkeypatch)
    assert facts(2, lambda each: each.index % 2) == expected, "caches dropped"
    never_shared(monkeypatch)
    assert facts(9) == expected, "no beginning copied"


def test_a_lane_computes_only_what_its_cache_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = local_session.LocalSession._read
    monkeypatch.setattr(
        local_session.LocalSession,
        "_read",
        lambda self, parts: (read.append(sum(count for _, count in parts)), plain(self, parts))[1],
    )
    played = play(engine_of(), trajectories(6, num_turns=6))
    computed = sum(read)
    lengths = [len(each.ids) for each in played]
    fresh = sum(each.prompt_length for each in played)
    assert computed < sum(lengths), "a beginning of a group is read once, and what ends a trajectory not at all"
    assert computed >= sum(lengths) - fresh - sum(4 for _ in played)


def test_slow_environments_delay_nobody() -> None:
    """Its trajectory ends after the same number of passes beside others that think, and beside none."""

    def passes(others: int, *, slots: int = 3) -> int:
        counts = []
        played = trajectories(1 + others, num_turns=5)
        play(
            engine_of(slots=slots),
            played,
            delay=lambda each: 0 if each.index == 0 or not each.calls else 40,
            before=lambda _: counts.append(len(played[0].calls) < 5),
        )
        return sum(counts)

    assert passes(2) == passes(0)
    assert passes(200, slots=64) == passes(0)
    assert passes(30) <= passes(0) + 4 * 4, "at each further turn it may wait for a row, for at most four more tokens"


@pytest.mark.parametrize("length", [15, 16, 17, 18])
def test_calls_of_which_one_begins_as_the_other_both_end(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what they share is just enough to be copied: nobody waits for what nobody reads."""
    reads, plain = [0], local_session.LocalSession._read_all

    def counted(session: local_session.LocalSession) -> None:
        reads[0] += 1
        assert reads[0] < 50, "it reads for ever"
        plain(session)

    monkeypatch.setattr(local_session.LocalSession, "_read_all", counted)
    ids = tuple(range(20, 40))
    with engine_of().session(OPTIONS, max_tokens=60) as session:
        for lane, count in enumerate((length, 20, length)):
            asked = {"stream": lane, "first_position": 0, "max_new_tokens": 2}
            session.submit(CallRequest(id=lane, lane=lane, token_ids=ids[:count], **asked))
        assert len(ended(session)) == 3


def test_a_call_that_forks_keeps_the_common_beginning() -> None:
    engine = engine_of()
    with engine.session(OPTIONS, max_tokens=60) as session:
        ids = tuple(range(20, 40))
        asked = {"lane": "a", "stream": 1, "first_position": 0, "max_new_tokens": 4}
        session.submit(CallRequest(id=0, token_ids=ids, **asked))
        found = ended(session)
        fork = (*ids[:11], 3, 4, 5)
        session.submit(CallRequest(id=1, token_ids=fork, **asked))
        forked = ended(session)
    with engine.session(OPTIONS, max_tokens=60) as session:
        session.submit(CallRequest(id=1, token_ids=fork, **asked | {"lane": "b"}))
        assert ended(session)[0].logprobs == pytest.approx(forked[0].logprobs, abs=1e-5)
    assert found[0].token_ids != forked[0].token_ids


def ended(session: Session) -> list:
    calls = []
    while session.num_running:
        calls += session.advance(1)
    return calls


def test_weights_that_are_loaded_between_two_tokens_are_used_from_then_on() -> None:
    """Kept caches are those of the old weights: they are dropped, and running calls are computed again."""
    engine, other = engine_of(), LanguageModel(build_architecture("llama", seed=1))
    first = {name: tensor.detach().clone() for name, tensor in engine._model.model.named_parameters()}
    second = dict(other.model.named_parameters())
    engine.load_weights(3, first)
    passes = [0]

    def load(_: Session) -> None:
        passes[0] += 1
        if passes[0] == 12:
            engine.load_weights(4, second)

    played = play(engine, trajectories(8, num_turns=5), delay=lambda each: 3 * (each.index % 2), before=load)
    calls = [call for each in played for call in each.calls]
    assert {version for call in calls for version, _ in call.versions} == {3, 4}
    assert any(len(call.versions) == 2 for call in calls)
    new = learners_logprobs(engine._model, played)
    engine.load_weights(3, first)
    old = learners_logprobs(engine._model, played)
    for each, by_old, by_new in zip(played, old, new, strict=True):
        versions = [
            max((start, version) for version, start in call.versions if start <= i)[1]
            for call in each.calls
            for i in range(len(call.token_ids))
        ]
        expected = torch.where(torch.tensor(versions) == 3, by_old, by_new)
        found = torch.tensor([logprob for _, logprob in each.written])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [2, 8])
def test_blocks_of_an_accelerator_sample_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is over goes on while its block does. Its lane then continues from its end."""
    expected = [each.facts() for each in play(engine_of(), trajectories(9, num_turns=5))]
    for module in (decoding, local_session):
        monkeypatch.setattr(module, "passes_at_once", lambda _: count)
    found = [each.facts() for each in play(engine_of(), trajectories(9, num_turns=5))]
    for ours, theirs in zip(found, expected, strict=True):
        assert [(ids, finish) for ids, _, finish in ours] == [(ids, finish) for ids, _, finish in theirs]
        for (_, one, _), (_, other, _) in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_one_turn_is_a_response_of_generate() -> None:
    """The same stream and positions, so the same draws."""
    engine = engine_of()
    prompts = [Prompt(id=str(each.index), token_ids=tuple(each.ids)) for each in trajectories(4, num_turns=1)]
    options = SamplingOptions(max_new_tokens=12, stop_token_ids=(40,), temperature=0.9)
    expected = engine.generate(prompts, num_samples=1, options=options, key=KEY)
    with engine.session(options, max_tokens=40) as session:
        for index, prompt in enumerate(prompts):
            asked = {
                "id": index,
                "lane": index,
                "stream": KEY.stream(index, 0),
                "max_new_tokens": 12,
            }
            session.submit(CallRequest(token_ids=prompt.token_ids, first_position=0, **asked))
        calls = sorted(ended(session), key=lambda call: call.request.id)
    for call, response in zip(calls, expected, strict=True):
        assert (call.token_ids, call.finish) == (response.token_ids, response.finish)
        assert call.logprobs == pytest.approx(response.logprobs.tolist(), abs=1e-5)
        assert call.versions == ((0, 0),)


def test_a_stop_string_ends_a_call() -> None:
    engine = engine_of()
    pieces = [engine._tokenizer.decode([token]) for token in range(61)]
    options = SamplingOptions(max_new_tokens=1, stop_strings=tuple(piece for piece in pieces[20:30] if piece.strip()))
    played = play(engine, trajectories(6, num_turns=4), options=options)
    finishes = {call.finish for each in played for call in each.calls}
    assert Finish.STOP in finishes


def test_a_forgotten_lane_ends_without_a_result() -> None:
    engine = engine_of(slots=1)
    with engine.session(OPTIONS, max_tokens=60) as session:
        for lane in ("runs", "waits", "stays"):
            asked = {"stream": 1, "first_position": 0, "max_new_tokens": 5}
            session.submit(CallRequest(id=lane, lane=lane, token_ids=(5, 6, 7), **asked))
        assert session.advance(1) == []
        session.forget("runs")
        session.forget("waits")
        assert [call.request.id for call in ended(session)] == ["stays"]
        assert session.num_running == 0


def test_calls_that_come_from_other_threads_are_waited_for() -> None:
    engine = engine_of()
    with engine.session(OPTIONS, max_tokens=60) as session:
        assert session.advance(0) == []
        played = trajectories(8, num_turns=1)
        threads = [threading.Thread(target=session.submit, args=(each.request(),)) for each in played]
        for thread in threads:
            thread.start()
        calls = []
        while len(calls) < len(played):
            calls += session.advance(60)
        for thread in threads:
            thread.join()
    assert sorted(call.request.lane for call in calls) == list(range(8))


def test_an_error_ends_the_session_and_all_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(slots=1)
    with engine.session(OPTIONS, max_tokens=60) as session:
        for each in trajectories(3, num_turns=1):
            session.submit(each.request())
        with torch.no_grad():
            engine._model.model.get_output_embeddings().weight.fill_(torch.nan)
        with pytest.raises(TrainingError, match=r"not finite for token 0 of the call \(0, 0\)"):
            session.advance(1)
        assert session.num_running == 0
        with pytest.raises(TrainingError, match="the session has ended: the policy gave logits"):
            session.submit(trajectories(1, num_turns=1)[0].request())
        with pytest.raises(TrainingError, match="the session has ended"):
            session.advance(60)


def test_stopping_the_engine_ends_the_session() -> None:
    engine = engine_of()
    with engine.session(OPTIONS, max_tokens=60) as session:
        session.submit(trajectories(1, num_turns=1)[0].request())
        engine.stop()
        with pytest.raises(TrainingError, match="the engine was stopped while it sampled"):
            session.advance(1)


def test_a_session_that_is_closed_says_so_and_leaves_the_engine_free() -> None:
    engine = engine_of()
    with engine.session(OPTIONS, max_tokens=60) as session:
        session.submit(trajectories(1, num_turns=1)[0].request())
        session.advance(1)
    with pytest.raises(TrainingError, match="the session has ended: it was closed"):
        session.advance(1)
    assert play(engine, trajectories(2, num_turns=1))


@pytest.mark.parametrize(
    ("token_ids", "new", "message"),
    [
        ((), 3, "has 0 ids"),
        ((1, 2), 0, "max_new_tokens 0"),
        (tuple(range(38)), 3, "reads 38 tokens, which with max_new_tokens .3. makes 41, but a call may have 40"),
    ],
)
def test_a_call_that_cannot_be_is_refused(token_ids: tuple[int, ...], new: int, message: str) -> None:
    with engine_of().session(OPTIONS, max_tokens=40) as session:
        asked = {"id": 0, "lane": 0, "stream": 1, "first_position": 0}
        with pytest.raises(UserError, match=message):
            session.submit(CallRequest(token_ids=token_ids, max_new_tokens=new, **asked))
        assert session.num_running == 0


def test_a_fewest_number_of_tokens_is_refused() -> None:
    with (
        pytest.raises(UserError, match="min_new_tokens"),
        engine_of().session(SamplingOptions(max_new_tokens=5, min_new_tokens=2), max_tokens=40),
    ):
        pass
