"""Samples of two and three ranks are those of one, and an engine of the user's is called on rank 0 alone."""

import gc
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from builders import run_through_modules, tiny_language_model, tiny_tokenizer
from distributed.ranks import Ranks
from distributed.test_memory_of_ranks import live_bytes
from foreign_engine import ForeignEngine, RemoteEngine
from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.distributed.world import current, whole
from proximo.errors import ConfigError, RankError, TrainingError, UserError
from proximo.metrics.values import Sum
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.transformers_model import decoder_layers
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Prompt, Response
from proximo.rollout.engine import Fingerprint, Holding, fingerprint, push_to, sampling_with, statistics_of
from proximo.rollout.local import LocalEngine
from proximo.rollout.rank_transfers import from_bytes, to_bytes
from proximo.rollout.ranks_engine import FirstRankEngine, on_ranks
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.run.make.sharding import shard_model
from records_made import response

PROMPTS = [Prompt(id=f"p{n}", token_ids=tuple(range(5, 8 + n))) for n in range(5)]
KEY = RandomKey(seed=3, purpose="rollout", step=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "sampled": {},
    "top_p": {"top_p": 0.5},
    "random limits": {"random_limit_min": 1},
}
ASKED = {"several": (PROMPTS, 3), "fewer than ranks": (PROMPTS[3:4], 2), "the same thrice": (PROMPTS[:1] * 3, 1)}


def policy(shard: str, precision: Precision = Precision.FLOAT32) -> LanguageModel:
    model = LanguageModel(tiny_language_model(initializer_range=0.2), precision=precision)
    shard_model(model, DevicesConfig.model_validate({"shard": shard}), role="policy")
    return model


def built_in(model: LanguageModel) -> LocalEngine:
    return LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2], max_num_seqs=3)


def plain(responses: list[Response]) -> list[tuple[Any, ...]]:
    return [
        (r.prompt.id, r.sample_index, r.token_ids, r.finish, r.text, r.policy_version, r.logprobs.tolist())
        for r in responses
    ]


def samples(shard: str) -> dict[str, Any]:
    """What every rank gets, and on rank 0 the number of calls of `on_finished`."""
    model = policy(shard)
    engine = on_ranks(built_in(model))
    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        for asked, (prompts, count) in ASKED.items():
            told: list[Response] = []
            with sampling_with(engine, model):
                push_to(engine, model, version=7)
                got = engine.generate(
                    prompts,
                    num_samples=count,
                    options=SamplingOptions(max_new_tokens=8, **options),
                    key=KEY,
                    on_finished=told.append,
                )
            assert all(each.prompt is prompts[i // count] for i, each in enumerate(got))
            if current().leads:  # the records that began are those that are scored
                assert sorted(map(id, told)) == sorted(map(id, got))
            found[f"{name}, {asked}"] = plain(got), len(told)
    return found


@cache
def samples_of_one() -> dict[str, Any]:
    return samples("replicate")


def check_samples(ranks: Ranks, shard: str) -> None:
    results = ranks.run(samples, shard)
    for rank, found in enumerate(results):
        for name, (wanted, num_told) in samples_of_one().items():
            got, told = found[name]
            assert [each[:-1] for each in got] == [each[:-1] for each in wanted], name
            for mine, others in zip(got, wanted, strict=True):
                assert mine[-1] == pytest.approx(others[-1], abs=1e-5)
            assert told == (num_told if rank == 0 else 0)
            assert got == results[0][name][0], "every rank has the same bits"


@pytest.mark.parametrize("shard", ["replicate", "full", "grads"])
def test_samples_of_two_ranks_are_those_of_one(two: Ranks, shard: str) -> None:
    check_samples(two, shard)


def test_samples_of_three_ranks_are_those_of_one(three: Ranks) -> None:
    check_samples(three, "replicate")
    check_samples(three, "full")


def no_step_is_shared(shard: str) -> list[int]:
    """How often a rank waited for another one between the start and the end of sampling."""
    model = policy(shard)
    engine = on_ranks(built_in(model))
    push_to(engine, model, version=0)
    num_gathers: list[int] = []
    inner = engine.own.generate

    def counted(*arguments: Any, **options: Any) -> list[Response]:
        calls: list[Any] = []
        original = torch.distributed.all_gather_into_tensor
        torch.distributed.all_gather_into_tensor = lambda *a, **k: (calls.append(a), original(*a, **k))[1]
        try:
            return inner(*arguments, **options)
        finally:
            torch.distributed.all_gather_into_tensor = original
            num_gathers.append(len(calls))

    engine.own.generate = counted
    with sampling_with(engine, model):
        engine.generate(PROMPTS, num_samples=1, options=SamplingOptions(max_new_tokens=8), key=KEY)
    return num_gathers


def test_the_ranks_meet_at_no_token(two: Ranks) -> None:
    assert two.run(no_step_is_shared, "full") == [[0], [0]]


def in_bf16(shard: str) -> list[tuple[Any, ...]]:
    """Through the modules on one rank too, as sharded models run."""
    model = policy(shard, Precision.BF16)
    engine = on_ranks(built_in(model))
    with pytest.MonkeyPatch.context() as patch, sampling_with(engine, model):
        run_through_modules(patch)
        push_to(engine, model, version=0)
        return plain(engine.generate(PROMPTS, num_samples=2, options=SamplingOptions(max_new_tokens=8), key=KEY))


def test_a_policy_in_bf16_samples_the_same_on_ranks(two: Ranks) -> None:
    wanted = in_bf16("replicate")
    for shard in ("replicate", "full"):
        for found in two.run(in_bf16, shard):
            for mine, others in zip(found, wanted, strict=True):
                assert mine[:-1] == others[:-1]
                assert mine[-1] == pytest.approx(others[-1], abs=1e-2)


def failures() -> dict[str, Any]:
    """What each rank raises, and what it samples afterwards."""
    model = policy("replicate")
    engine = on_ranks(built_in(model))
    long = Prompt(id="long", token_ids=(5,) * 256)
    found: dict[str, Any] = {}

    def attempt(name: str, prompts: list[Prompt], on_finished: Any = None) -> None:
        try:
            engine.generate(
                prompts, num_samples=1, options=SamplingOptions(max_new_tokens=8), key=KEY, on_finished=on_finished
            )
        except Exception as error:
            found[name] = type(error), str(error)

    def refuse(_: Response) -> None:
        raise TrainingError("this source begins nothing")

    attempt("none", [])
    attempt("too long", [PROMPTS[0], long])
    attempt("eager", PROMPTS, refuse)
    with torch.no_grad():
        weight = next(model.model.parameters())
        kept = weight.clone()
        if not current().leads:
            weight.fill_(float("nan"))
        attempt("not finite", PROMPTS, lambda _: None)
        weight.copy_(kept)
    told: list[Response] = []
    attempt("after", PROMPTS, told.append)
    found["told"] = len(told)
    return found


def test_what_fails_on_one_rank_fails_on_all_with_its_error(two: Ranks) -> None:
    found = two.run(failures)
    for rank, each in enumerate(found):
        assert each["none"][0] is UserError
        assert each["too long"][0] is UserError
        assert "prompt 'long' has 256 tokens" in each["too long"][1]
        assert ("rank 1: " in each["too long"][1]) == (rank == 0)
        assert each["eager"][0] is TrainingError
        assert "begins nothing" in each["eager"][1]
        assert each["not finite"][0] is TrainingError
        assert "not finite" in each["not finite"][1]
        assert "after" not in each
    assert [each["told"] for each in found] == [5, 0], "no message of a call that failed reaches the next one"


def with_foreign_engine(shard: str) -> dict[str, Any]:
    model = policy(shard)
    theirs: Any = ForeignEngine(LanguageModel(tiny_language_model(seed=9)))
    theirs.statistics = lambda: {"engine/retries": Sum(len(theirs.loaded))}
    engine = on_ranks(theirs)
    told: list[Response] = []
    push_to(engine, model, version=3)
    push_to(engine, model, version=3)
    with sampling_with(engine, model):
        got = engine.generate(
            PROMPTS, num_samples=2, options=SamplingOptions(max_new_tokens=8), key=KEY, on_finished=told.append
        )
    whole_tensors = {name: whole(tensor.detach()) for name, tensor in model.trainable_parameters()}
    return {
        "responses": plain(got),
        "told": len(told),
        "loaded": theirs.loaded,
        "holds": engine.holds(),
        "statistics": statistics_of(engine),
        "fingerprint": fingerprint(whole_tensors),
    }


@pytest.mark.parametrize("shard", ["replicate", "full"])
def test_an_engine_of_the_users_is_called_on_rank_0_with_whole_weights(two: Ranks, shard: str) -> None:
    wanted = with_foreign_engine("replicate")
    assert wanted["loaded"] == [3]
    first, second = two.run(with_foreign_engine, shard)
    assert first == wanted
    assert second == wanted | {"told": 0, "loaded": []}


def copied_on_rank_0() -> str:
    model = policy("full")
    if not current().leads:
        return "made nothing"
    with pytest.raises(RankError) as error:
        ForeignEngine(model)
    return str(error.value)


def test_an_engine_that_rank_0_alone_makes_of_a_sharded_model_is_refused_at_once(two: Ranks) -> None:
    first, second = two.run(copied_on_rank_0)
    assert first.startswith("a model that is sharded over ranks is not copied")
    assert second == "made nothing"


class Gathers(TorchDispatchMode):
    """Counts the bytes of tensors that are gathered outside of the passes of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "_c10d_functional::all_gather_into_tensor":
            self.num_bytes += result.nbytes
        return result


class OnePassEngine(ForeignEngine):
    """Takes each tensor once, and notes the bytes that lie on this rank then and did not at the start."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.notes: list[int] = []

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        own = dict(self.model.model.named_parameters())
        found, before = Fingerprint(), live_bytes()
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.notes.append(live_bytes() - before)
                found.add(name, tensor)
                own[name].copy_(tensor)
        self.loaded.append(version)
        self.digest = found.hexdigest()

    def holds(self) -> Holding | None:
        return Holding(version=self.loaded[-1], fingerprint=self.digest) if self.loaded else None


def bytes_of_pushes() -> dict[str, int]:
    """Three steps and an evaluation with an engine of rank 0: pushes, bytes gathered for them, and most bytes there."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = LanguageModel(tiny_language_model(initializer_range=0.2, **sizes))
    engine: Any = OnePassEngine(model) if current().leads else None
    config = PPOConfig.model_validate(
        {
            "num_steps": 3,
            "prompts_per_step": 4,
            "rollout": {"max_new_tokens": 5},
            "advantage": {"kind": "group_centred"},
            "responses_per_prompt": 2,
        }
    )
    whole_bytes = sum(parameter.nbytes for parameter in model.model.parameters())
    layer = sum(parameter.nbytes for parameter in decoder_layers(model.base)[0].parameters())
    trainer = PPOTrainer(
        model,
        tiny_tokenizer(),
        engine=FirstRankEngine(engine),
        config=config,
        devices=DevicesConfig.model_validate({"shard": "full"}),
    )
    gc.collect()
    gc.freeze()
    with Gathers() as gathers:
        trainer.train(PROMPTS, reward=lambda prompts, responses, metadata: [float(len(r)) for r in responses])
    gc.unfreeze()
    return {
        "pushes": 0 if engine is None else len(engine.loaded),
        "gathered": gathers.num_bytes,
        "whole": whole_bytes,
        "layer": layer,
        "most": 0 if engine is None else max(engine.notes),
    }


def test_a_push_gathers_each_tensor_once_and_no_whole_policy_lies_on_a_rank(two: Ranks) -> None:
    first, second = two.run(bytes_of_pushes)
    print(first)
    assert first["pushes"] == 4
    assert first["gathered"] == second["gathered"] == 4 * first["whole"]
    assert first["most"] < 2 * first["layer"]


def push_a_broken(fault: str) -> str:
    """What a rank raises where the engine fails between two tensors, or holds something else afterwards."""

    class Broken(OnePassEngine):
        def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
            next(iter(tensors.values()))
            if fault == "raises":
                raise TrainingError("no room")
            super().load_weights(version + 1, tensors)

    engine = FirstRankEngine(cast(Any, Broken(policy("replicate")) if current().leads else None))
    model = policy("full")
    with pytest.raises((TrainingError, RankError)) as error:
        push_to(engine, model, version=1)
    current().barrier(what="the end")
    return str(error.value)


@pytest.mark.parametrize(("fault", "message"), [("raises", "no room"), ("holds", "but holds version 2")])
def test_an_engine_that_fails_during_a_push_ends_it_on_every_rank(two: Ranks, fault: str, message: str) -> None:
    for said in two.run(push_a_broken, fault):
        assert message in said


def test_responses_survive_as_bytes() -> None:
    asked = [Prompt(id="a", token_ids=(5,)), Prompt(id="b", token_ids=(6,))]
    given = [
        (1, response((7, 8, 2), to=asked[1], text='lone \ud800 and "quotes"', mask=[True, False, True])),
        (0, response((), to=asked[0], text="")),
        (1, response((2**40,), to=asked[1], logprobs=[float("nan")])),
        (0, response((9, 9), to=asked[0], logprobs=[])),
    ]
    found = from_bytes(to_bytes(given), asked)
    for (index, sent), (number, got) in zip(given, found, strict=True):
        assert index == number
        assert got.prompt is sent.prompt
        assert (got.token_ids, got.text, got.finish) == (sent.token_ids, sent.text, sent.finish)
        assert got.logprobs.numpy().tobytes() == sent.logprobs.numpy().tobytes()
        assert got.response_mask.tolist() == sent.response_mask.tolist()
        assert (got.logprobs.dtype, got.response_mask.dtype) == (torch.float32, torch.bool)


def sampled_ahead(staleness: int, dtype: torch.dtype = torch.float32) -> tuple[list[dict[str, float]], int]:
    """A run that samples ahead: its metrics that must not depend on the rank, and how many threads are left."""
    model = LanguageModel(tiny_language_model(initializer_range=0.2))
    config = PPOConfig.model_validate(
        {
            "num_steps": 4,
            "prompts_per_step": 4,
            "responses_per_prompt": 2,
            "rollout": {"max_new_tokens": 5, "staleness": staleness},
            "policy_optimizer": {"learning_rate": 1e-2},
        }
    )
    engine: Any = RemoteEngine(model) if current().leads else None
    if engine is not None:
        draw = engine.generate
        engine.generate = lambda *a, **k: [replace(each, logprobs=each.logprobs.to(dtype)) for each in draw(*a, **k)]
    trainer = PPOTrainer(model, tiny_tokenizer(), engine=FirstRankEngine(engine), config=config)
    lines = trainer.train(PROMPTS, reward=lambda prompts, responses, metadata: [float(len(r)) for r in responses])
    kept = [
        {name: line[name] for name in line if name.startswith(("score", "kl/", "policy/", "stal"))} for line in lines
    ]
    return kept, sum(thread.name == "rollouts" for thread in threading.enumerate())


def test_rank_0_samples_ahead_and_every_rank_learns_from_the_same(two: Ranks) -> None:
    (first, threads), (second, none) = two.run(sampled_ahead, 1)
    assert threads == none == 0
    assert [line["staleness/max_steps"] for line in first] == [0, 1, 1, 1]
    for one, other in zip(first, second, strict=True):
        idle = {name for name in one if "idle" in name}
        assert {name: one[name] for name in one.keys() - idle} == {name: other[name] for name in other.keys() - idle}
    (alone, _) = sampled_ahead(1)
    assert [line["score/mean"] for line in alone] == pytest.approx([line["score/mean"] for line in first], abs=1e-4)


def test_every_rank_learns_from_the_same_bits_of_an_engine_in_float64(two: Ranks) -> None:
    (first, _), (second, _) = two.run(sampled_ahead, 1, torch.float64)
    assert [line["policy/behaviour_weight"] for line in first] == [line["policy/behaviour_weight"] for line in second]


def test_the_built_in_engine_does_not_sample_ahead_on_several_ranks(two: Ranks) -> None:
    found = two.run(refused_ahead)
    assert all(each.startswith("ppo.rollout.staleness samples while the learner trains") for each in found)


def test_an_engine_that_is_not_for_threads_is_refused_on_every_rank(two: Ranks) -> None:
    found = two.run(refused_ahead, True)
    assert all("ForeignEngine does not say that it is thread_safe" in each for each in found)


def refused_ahead(with_engine: bool = False) -> str:
    config = PPOConfig.model_validate({"num_steps": 2, "prompts_per_step": 4, "rollout": {"staleness": 1}})
    model = LanguageModel(tiny_language_model())
    theirs = ForeignEngine(model) if current().leads else None
    engine = FirstRankEngine(cast(Any, theirs)) if with_engine else None
    with pytest.raises((ConfigError, RankError)) as error:  # the latter quotes what rank 0 said
        PPOTrainer(model, tiny_tokenizer(), engine=engine, config=config)
    return str(error.value)
