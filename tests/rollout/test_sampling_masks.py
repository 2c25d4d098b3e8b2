"""What top-k and top-p leave out of a draw reaches the learner, whose log-probs are those of the draw."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from architectures import ARCHITECTURES, build_architecture
from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import count_a, ppo_trainer
from proximo.environments.environment import EnvironmentStep
from proximo.environments.trajectory import Trajectory
from proximo.errors import DataError
from proximo.models.language import LanguageModel
from proximo.ppo.roles.sampler import NO_MASK
from proximo.ppo.update.epochs import pack_members
from proximo.records import Finish, Prompt, Response, SamplingMask
from proximo.rollout.local import LocalEngine
from proximo.rollout.rank_transfers import from_bytes, to_bytes
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall

PROMPTS = [Prompt(id=str(n), token_ids=tuple(range(5, 8 + n))) for n in range(3)]
KEY = RandomKey(seed=3, purpose="rollout", step=1)
CUTS: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.7, "min_new_tokens": 4}]


def lively(seed: int = 5) -> LanguageModel:
    """In float64, since its logits are large."""
    return LanguageModel(tiny_language_model(seed=seed, initializer_range=0.6).double())


def drawn(model: LanguageModel, **options: Any) -> list[Response]:
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2, 11, 20], max_num_seqs=4)
    made = SamplingOptions(**({"max_new_tokens": 9} | options))
    return engine.generate(PROMPTS, num_samples=3, options=made, key=KEY)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_learner_has_the_log_probs_of_the_draw(cut: dict[str, Any], temperature: float) -> None:
    model = lively()
    responses = drawn(model, temperature=temperature, **cut)
    for response in responses:
        assert response.sampling_mask is not None
        rows = response.sampling_mask.rows()
        assert all(token in ids for token, ids in zip(response.token_ids, rows, strict=True))
        assert all(ids == sorted(set(ids)) and len(ids) <= cut.get("top_k", 64) for ids in rows)
    batch = pack_members(responses, [4, 0, 7, 1, 2, 3, 5, 6, 8], device=torch.device("cpu"))
    found = model.response_logprobs(batch, temperature=temperature).logprobs.float()
    expected = torch.cat([responses[index].logprobs for index in (4, 0, 7, 1, 2, 3, 5, 6, 8)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    batch = pack_members([*responses, *drawn(model)], [*range(9), 9], device=torch.device("cpu"))
    both = model.response_logprobs(batch, temperature=temperature).logprobs
    assert len(both) > len(found), "a response without a mask beside those that have one"


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_for_every_architecture(name: str) -> None:
    model = LanguageModel(build_architecture(name))
    responses = drawn(model, top_k=4, max_new_tokens=5)
    found = model.response_logprobs(pack_members(responses, range(9), device=torch.device("cpu"))).logprobs
    torch.testing.assert_close(found, torch.cat([each.logprobs for each in responses]), rtol=0, atol=1e-5)


def test_nothing_else_has_a_mask() -> None:
    for options in ({}, {"greedy": True}, {"greedy": True, "top_k": 3}, {"top_p": 1.0}, {"min_new_tokens": 3}):
        assert all(each.sampling_mask is None for each in drawn(lively(), **options))


def test_a_session_draws_with_the_same_masks() -> None:
    model = lively()
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2, 11, 20], max_num_seqs=4)
    options = SamplingOptions(max_new_tokens=9, top_p=0.5)
    found: dict[Any, ModelCall] = {}
    with engine.session(options, max_tokens=40) as session:
        for index, prompt in enumerate(PROMPTS):
            for sample in range(3):
                stream = {"stream": KEY.stream(index, sample), "first_position": 0, "max_new_tokens": 9}
                place = (index, sample)
                session.submit(CallRequest(id=place, lane=place, token_ids=prompt.token_ids, **stream))
        while len(found) < 9:
            found |= {call.request.id: call for call in session.advance(1)}
    for response, (_, call) in zip(drawn(model, top_p=0.5), sorted(found.items()), strict=True):
        assert call.token_ids == response.token_ids
        assert call.sampling_mask is not None
        assert response.sampling_mask is not None
        assert call.sampling_mask.rows() == response.sampling_mask.rows()


def call(read: tuple[int, ...], ids: tuple[int, ...], mask: list[list[int]]) -> ModelCall:
    request = CallRequest(id=0, lane=0, token_ids=read, stream=0, first_position=0, max_new_tokens=9)
    flat = torch.tensor([token for each in mask for token in each], dtype=torch.int32)
    return ModelCall(
        request=request,
        token_ids=ids,
        logprobs=(-1.0,) * len(ids),
        finish=Finish.EOS,
        versions=((1, 0),),
        sampling_mask=SamplingMask(token_ids=flat, counts=torch.tensor([len(each) for each in mask])),
    )


def trajectory() -> Response:
    """Two calls with an answer between them, and one that forks."""
    made = Trajectory(prompt=PROMPTS[0], sample_index=0)
    read = PROMPTS[0].token_ids
    made.add_call(call(read, (8, 9), [[8, 3], [9]]), "one")
    made.add_answer(EnvironmentStep(observation="well"))
    made.add_call(call((*read, 8, 9, 30, 31), (7,), [[6, 7, 8]]), "two")
    made.add_answer(EnvironmentStep(observation="well"))
    made.add_call(call((5, 6), (4, 2), [[4], [1, 2]]), "three")
    return made.response(Finish.EOS)


def test_what_an_environment_wrote_was_not_drawn() -> None:
    response = trajectory()
    assert response.token_ids == (8, 9, 30, 31, 7, 4, 2)
    assert response.sampling_mask is not None
    assert response.sampling_mask.rows() == [[8, 3], [9], [], [], [6, 7, 8], [4], [1, 2]]
    packed = pack_members([response], [0], device=torch.device("cpu"))
    model = lively()
    found = model.response_logprobs(packed).logprobs
    logits = model.head.logits(model.hidden_states(packed.packed, packed.predictors))
    for n, ids in enumerate(response.sampling_mask.rows()):
        among = ids or list(range(64))
        exact = logits[n, among].log_softmax(0)[among.index(response.token_ids[n])]
        torch.testing.assert_close(found[n], exact, rtol=0, atol=1e-9)


def test_ranks_and_checkpoints_keep_it() -> None:
    responses = [*drawn(lively(), top_p=0.6), trajectory(), *drawn(lively())]
    prompts = [response.prompt for response in responses]
    again = from_bytes(to_bytes(enumerate(responses)), prompts)
    for response, (_, copy) in zip(responses, again, strict=True):
        assert (copy.sampling_mask is None) == (response.sampling_mask is None)
        if response.sampling_mask is not None and copy.sampling_mask is not None:
            assert copy.sampling_mask.rows() == response.sampling_mask.rows()
            assert copy.sampling_mask.token_ids.dtype == torch.int32


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 3, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_compares_and_learns_the_truncated_policy(cut: dict[str, Any], staleness: int) -> None:
    """Sampler and learner agree. The reference, at first the policy itself, has its log-probs among all tokens."""
    lines: list[dict[str, Any]] = []
    policy = tiny_language_model(seed=5, initializer_range=0.6)
    rollout = {"max_new_tokens": 6, **cut}
    trainer = ppo_trainer(policy, num_steps=3, rollout=rollout | {"staleness": staleness})
    trainer.train(["ab", "cde", "f", "gh"], reward=count_a, on_step=lambda _, line: lines.append(line))
    assert len(lines) == 3
    assert trainer.reuses_sampled_logprobs == (staleness == 0)
    assert staleness == 0 or lines[0]["mismatch/max_abs_log_ratio"] < 1e-4
    assert lines[0]["first_minibatch/max_abs_log_ratio"] < 1e-5
    assert lines[0]["kl/per_token"] > 0.05, "the log of the probability that was left, with the sign changed"


def test_a_mask_that_was_not_cut_with_its_tokens_is_an_error() -> None:
    response = drawn(lively(), top_k=3)[0]
    cut = replace(response, token_ids=response.token_ids[:1], logprobs=response.logprobs[:1])
    with pytest.raises(DataError, match="a response has 1 tokens, and its sampling mask [2-9] draws"):
        pack_members([cut], [0], device=torch.device("cpu"))


def test_an_engine_without_masks_is_told_of() -> None:
    class Forgetful(LocalEngine):
        logprobs_are_the_learners = False

        def generate(self, *given: Any, **options: Any) -> list[Response]:
            return [replace(each, sampling_mask=None) for each in super().generate(*given, **options)]

    policy = LanguageModel(tiny_language_model())
    engine = Forgetful(policy, tiny_tokenizer(), eos_token_ids=[2])
    options = {"rollout": {"max_new_tokens": 6, "top_k": 3}, "guards": {"max_mismatch": None}}
    trainer = ppo_trainer(policy.model, num_steps=1, engine=engine, **options)
    with pytest.warns(UserWarning, match="does not say which tokens it left out") as told:
        trainer.train(["ab", "cde", "f", "gh"], reward=count_a)
    assert str(told[0].message) == NO_MASK
