"""Rewards, functions and calls of the user's run once, on rank 0, and every rank gets what they gave."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from distributed.ranks import Ranks
from fake_vllm import GENERATE, fake_servers
from proximo.algorithms.controllers import AdaptiveKLController
from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.data.readers.reading import load_rows
from proximo.data.readers.source import DataSource
from proximo.distributed.world import current, is_alone
from proximo.errors import ProximoError, RankError, TrainingError
from proximo.learner.optimizers import OwnOptimizer
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.calls import OwnCall
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.worker import ServedReferenceWorker
from proximo.ppo.task import evaluate_policy
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.remote import RemoteLimits, RemoteReward
from proximo.rewards.source import build_on_first
from proximo.rewards.verifier_reward import VerifierReward
from proximo.rewards.weighted import WeightedReward
from proximo.rollout.vllm.server import VLLMServer
from proximo.run.make.sharding import shard_model
from records_made import prompt, response
from rewards.remote.reward_services import ScriptedService, grades, reply
from tiny_runs import make_inputs, recipe_of

PROMPTS = ["ab", "cdefgh", "i", "jkl", "mn"]
CALLS: list[str] = []
"""What this process was asked to do, in order."""


def config(**options: Any) -> PPOConfig:
    base: dict[str, Any] = {
        "num_steps": 2,
        "prompts_per_step": 3,
        "epochs_per_step": 1,
        "rollout": {"max_new_tokens": 5},
        "policy_optimizer": {"learning_rate": 1e-3},
    }
    return PPOConfig(**{key: value for key, value in (base | options).items() if value is not None})


def trainer(*, shard: str = "replicate", **parts: Any) -> PPOTrainer:
    CALLS.clear()
    options = parts.pop("config", {})
    return PPOTrainer(
        tiny_language_model(seed=3),
        tiny_tokenizer(),
        config=config(**options),
        devices=DevicesConfig.model_validate({"shard": shard}),
        **parts,
    )


def untimed(line: Mapping[str, float]) -> dict[str, float]:
    timed = ("time/", "throughput/", "memory/")
    return {key: value for key, value in line.items() if not key.startswith(timed) and "seconds" not in key}


def length(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    del prompts
    CALLS.append("reward")
    return [len(text) + len(facts["token_ids"]) / 8 for text, facts in zip(responses, metadata, strict=True)]


def broken(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    raise OSError(f"no disk for {len(prompts)} {len(responses)} {len(metadata)}")


class Eager:
    """A source of the user's that counts what it began, and refuses what it did not begin."""

    name = "eager"

    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(self, response: Response) -> None:
        CALLS.append("begin")
        self.begun.append(id(response))

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        CALLS.append("score")
        assert sorted(map(id, responses)) == sorted(self.begun)
        self.begun.clear()
        return [Scored(response=each, score=float(len(each.text)), components={"a": 1.0}) for each in responses]


def trained_with(reward: Any, shard: str = "replicate") -> dict[str, Any]:
    made = trainer(shard=shard, reward=reward() if isinstance(reward, type) else reward)
    lines = made.train(PROMPTS, on_step=lambda number, _: CALLS.append(f"step {number}"))
    return {"lines": list(map(untimed, lines)), "calls": list(CALLS)}


def agree(found: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """All ranks have the same lines, those of one rank; rank 0 has its effects, and the others have none."""
    for each in found:
        assert each["lines"] == found[0]["lines"]
        for line, other in zip(each["lines"], wanted["lines"], strict=True):
            assert line == pytest.approx(other, rel=1e-3, abs=1e-4)
    assert [each["calls"] for each in found] == [wanted["calls"], *([] for _ in found[1:])]


def test_a_function_and_on_step_are_called_once(two: Ranks) -> None:
    wanted = trained_with(length)
    assert wanted["calls"] == ["reward", "step 1", "reward", "step 2"]
    agree(two.run(trained_with, length, "full"), wanted)


def test_an_eager_source_begins_each_response_once_and_scores_the_same_records(two: Ranks) -> None:
    wanted = trained_with(Eager)
    assert wanted["calls"] == [*["begin"] * 3, "score", "step 1", *["begin"] * 3, "score", "step 2"]
    agree(two.run(trained_with, Eager), wanted)


class Stop(Exception):
    """How a user's on_step may end a training."""


def stop_at_once(number: int, metrics: Mapping[str, float]) -> None:
    CALLS.append(f"stopped after {number} with {len(metrics) > 0}")
    raise Stop("enough")


def errors() -> dict[str, Any]:
    """What each rank raises where the code of the user's does, on rank 0 alone."""
    found: dict[str, Any] = {}

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except Exception as error:
            found[name] = type(error), str(error)

    attempt("reward", lambda: trainer(reward=broken).train(PROMPTS))
    attempt(
        "weighted",
        lambda: trainer(
            reward=WeightedReward([(1.0, FunctionReward(broken)), (1.0, FunctionReward(length, name="b"))])
        ).train(PROMPTS),
    )
    attempt("on_step", lambda: trainer(reward=length).train(PROMPTS, on_step=stop_at_once))
    found["calls"] = list(CALLS)
    attempt("unsendable", lambda: current().on_rank_0(lambda: lambda: 0, what="a closure"))
    call = OwnCall(at="experience", does="measure", function=lambda *_: 1 / 0)
    attempt("own", lambda: trainer(reward=length, own_calls=[call]).train(PROMPTS))
    return found


def test_what_raises_on_rank_0_ends_every_rank(two: Ranks) -> None:
    first, second = two.run(errors)
    for name in ("reward", "weighted"):
        assert issubclass(first[name][0], ProximoError)
        assert "raised OSError: no disk for 3 3 3" in first[name][1]
        assert second[name][0] is RankError
        assert first[name][1] in second[name][1]
    assert first["on_step"] == second["on_step"] == (Stop, "enough")
    # The other source of the weighted sum may still be at work in its thread when the error is raised.
    assert [call for call in first["calls"] if call != "reward"] == ["stopped after 1 with True"]
    assert second["calls"] == []
    assert "a closure gave a function that cannot be sent to the other ranks" in first["unsendable"][1]
    assert second["unsendable"][0] is RankError
    assert first["own"][0] is TrainingError
    assert "raised ZeroDivisionError" in first["own"][1]
    assert second["own"][0] is RankError


def noisy(made: Any, *inputs: Any) -> dict[str, float]:
    CALLS.append("own")
    return {"noise": random.random() + len(made.experience.lengths)}


def louder(scored: Sequence[Scored], *inputs: Any) -> list[Scored]:
    CALLS.append("scored")
    return [Scored(response=each.response, score=each.score + random.random()) for each in scored]


class Controller(AdaptiveKLController):
    """A controller of the user's with a state, and an effect."""

    def update(self, kl_values: Sequence[float]) -> float:
        CALLS.append("kl")
        return super().update(kl_values) + random.random()


def any_rate(update: int, num_updates: int) -> float:
    CALLS.append(f"rate {update} of {num_updates}")
    return random.random()


def with_extras() -> dict[str, Any]:
    calls = [
        OwnCall(at="experience", does="measure", function=noisy),
        OwnCall(at="score", function=louder),
    ]
    controller = Controller(0.1, target=6.0, horizon=100)
    own = OwnOptimizer(make=lambda parameters: torch.optim.SGD(parameters, lr=0.1), schedule=any_rate)
    parts: dict[str, Any] = {"own_calls": calls, "kl_controller": controller, "optimizers": {"policy": own}}
    made = trainer(reward=length, config={"policy_optimizer": None}, **parts)
    lines = made.train(PROMPTS)
    return {"lines": list(map(untimed, lines)), "calls": list(CALLS), "coefficient": made.state.kl_coefficient}


def test_own_calls_a_controller_and_a_schedule_are_called_once(two: Ranks) -> None:
    first, second = two.run(with_extras)
    assert first["lines"] == second["lines"]
    assert first["lines"][0]["extra/noise"] != int(first["lines"][0]["extra/noise"])
    assert first["coefficient"] == second["coefficient"] > 0.1
    once = ["reward", "scored", "own", "rate", "kl"]
    assert [name for name, _ in groupby(call.split()[0] for call in first["calls"])] == once * 2
    rates = [call for call in first["calls"] if call.startswith("rate")]
    assert rates == [f"rate {update} of {len(rates)}" for update in range(len(rates))]
    assert second["calls"] == []


def stepped_with_other_scores() -> dict[str, float]:
    made = trainer()
    responses = made.generate(PROMPTS[:3])
    scores = [1.0, 0.0, 2.0] if current().leads else [9.0, 9.0, None]
    return untimed(made.step(PROMPTS[:3], responses, scores))


def test_the_scores_of_rank_0_count(two: Ranks) -> None:
    first, second = two.run(stepped_with_other_scores)
    assert first == second
    assert first == pytest.approx(stepped_with_other_scores(), rel=1e-3, abs=1e-4)


ANSWERS = [
    response(range(6, 7 + n), to=prompt(f"p{n}", token_ids=range(5, 6 + n % 4)), text="ab" * n) for n in range(9)
]


def summed(shard: str, url: str | None, dense: str = "none") -> dict[str, Any]:
    """Scores by a function, a verifier in processes, a service, a source of the user's, and a reward model."""
    CALLS.clear()
    model = scalar_from_language_model(LanguageModel(tiny_language_model(seed=1)), HeadStart.NORMAL, seed=2)
    shard_model(model, DevicesConfig.model_validate({"shard": shard}), role="reward")
    scorer = ModelReward(model, tokens_per_microbatch=20, dense=dense)
    verifier = build_on_first(lambda: VerifierReward("example_verifiers:Letters", name="letters"), name="letters")
    limits = RemoteLimits(responses_per_request=4, request_seconds=300, step_seconds=300)
    remote = build_on_first(lambda: RemoteReward(url or "", name="far", limits=limits), name="far") if url else None

    class Computing:
        """A source that is called in the main thread."""

        name = "own"

        def score(self, responses: Sequence[Response]) -> list[Scored]:
            CALLS.append("own")
            fault = ScoreState.INFRASTRUCTURE_FAULT
            found = [Scored(response=each, score=0.5, components={"b": 2.0}) for each in responses]
            found[3] = Scored(response=responses[3], score=float("nan"), state=fault, reason="no idea")
            return found

    function = FunctionReward(length, name="length")
    parts: list[Any] = [(1.0, function), (2.0, scorer), (0.5, verifier), (3.0, Computing())]
    if remote is not None:
        parts.append((1.0, remote))
    source = WeightedReward(parts)
    assert source.is_eager
    scored = [*source.score(ANSWERS), *scorer.score(ANSWERS[:1])]  # the last one has no share for a second rank
    asked = [*ANSWERS, ANSWERS[0]]
    statistics = source.statistics() if current().leads else {}
    source.close()
    return {
        "scores": [(s.score, dict(s.components), s.state, s.reason, s.token_rewards, s.prefix_scores) for s in scored],
        "same": all(s.response is a for s, a in zip(scored, asked, strict=True)),
        "calls": sorted(CALLS),
        "counted": sorted(key for key in statistics if key.endswith("failure_fraction")),
    }


def close_scores(found: Any, wanted: Any) -> bool:
    return all(
        mine[:1] == pytest.approx(others[:1], rel=1e-4, nan_ok=True)
        and mine[1] == pytest.approx(others[1], rel=1e-4, nan_ok=True)
        and mine[2:4] == others[2:4]
        and (mine[4:] == others[4:] or mine[5] == pytest.approx(others[5], rel=1e-4))
        for mine, others in zip(found, wanted, strict=True)
    )


@pytest.fixture(scope="module")
def service() -> Iterator[ScriptedService]:
    with ScriptedService(lambda connection, count: reply(grades([0.25] * count))(connection, count)) as running:
        yield running


def test_a_weighted_sum_of_all_kinds_of_sources_is_that_of_one_rank(two: Ranks, service: ScriptedService) -> None:
    wanted = summed("replicate", service.url)
    num_requests = len(service.requests)
    assert num_requests == 3
    for shard in ("replicate", "full"):
        first, second = two.run(summed, shard, service.url)
        assert close_scores(first["scores"], wanted["scores"])
        assert repr(first["scores"]) == repr(second["scores"])
        assert first["same"]
        assert second["same"]
        assert first["calls"] == wanted["calls"] == ["own", "reward"]
        assert second["calls"] == []
        assert first["counted"] == wanted["counted"]
    assert len(service.requests) == 3 * num_requests, "rank 0 alone asks the service"


def test_scores_of_prefixes_by_a_sharded_model_are_those_of_one_rank(two: Ranks) -> None:
    wanted = summed("replicate", None, "deltas")
    found = two.run(summed, "full", None, "deltas")
    assert wanted["scores"][4][5] is not None
    assert all(close_scores(each["scores"], wanted["scores"]) for each in found)
    assert len({repr(each["scores"]) for each in found}) == 1


def evaluated(shard: str) -> dict[str, Any]:
    made = trainer(shard=shard, config={"evaluate_reference": True})
    reward = WeightedReward([(1.0, FunctionReward(length))])
    found = evaluate_policy(made.roles, made._prompts(PROMPTS), reward=reward, config=made.config, seed=4)
    return {
        "scores": [s.score for s in found.scored],
        "reference": [s.score for s in found.reference if s is not None],
        "kl": found.kl,
        "calls": list(CALLS),
    }


def test_an_evaluation_is_that_of_one_rank(two: Ranks) -> None:
    wanted = evaluated("replicate")
    for shard in ("replicate", "full"):
        first, second = two.run(evaluated, shard)
        assert first["scores"] == second["scores"] == wanted["scores"]
        assert first["reference"] == second["reference"] == wanted["reference"]
        assert first["kl"] == second["kl"]
        assert first["kl"] == pytest.approx(wanted["kl"], abs=1e-4)
        assert (first["calls"], second["calls"]) == (wanted["calls"], [])


def rows(kind: str) -> Iterator[dict[str, Any]]:
    """A data function with an effect, and without an end."""
    CALLS.append("rows")
    while True:
        yield {"prompt": f"{kind} {random.random()}"}


def read_rows() -> tuple[list[Any], list[str]]:
    CALLS.clear()
    source = DataSource(path=f"{__name__}:rows", format="function", kwargs={"kind": "a"}, max_rows=3)
    return [row.values for row in load_rows([source]).rows], list(CALLS)


def test_a_data_function_is_called_once(two: Ranks) -> None:
    (first, calls), (second, others) = two.run(read_rows)
    assert first == second
    assert len(first) == 3
    assert (calls, others) == (["rows"], [])


def sampling_on_step(shard: str) -> list[str]:
    """A user's on_step that samples, on rank 0 alone."""
    made = trainer(shard=shard, reward=length)

    def on_step(number: int, metrics: Mapping[str, float]) -> None:
        del metrics
        assert is_alone()
        CALLS.append(f"{number}: {len(made.generate(PROMPTS))}")

    made.train(PROMPTS, on_step=on_step)
    return [call for call in CALLS if call != "reward"]


def sampling_on_step_fails() -> str:
    try:
        sampling_on_step("full")
    except RankError as error:
        return str(error)
    return "nothing"


def test_on_step_may_sample_from_whole_models_and_is_told_that_it_cannot_from_shards(two: Ranks) -> None:
    assert two.run(sampling_on_step, "replicate") == [["1: 5", "2: 5"], []]
    for problem in two.run(sampling_on_step_fails):
        assert "this code runs only on rank 0, and the model is sharded" in problem


def task_of(folder: str) -> dict[str, Any]:
    """Two steps of a recipe with rewards of three kinds, a gold reward and an evaluation."""
    recipe = recipe_of("ppo", Path(folder))
    recipe["reward"].append({"kind": "pattern", "name": "vowel", "pattern": "[aeiou]", "workers": 1})
    recipe["run"]["folder"] = str(Path(folder) / "run")
    task = build_task(PPORecipe.model_validate(recipe))
    try:
        records = [task.step(1), task.evaluate(), task.step(2)]
        built = [type(source).__name__ for _, source in task.reward.sources]
    finally:
        task.close()
    means = {
        key: value.value
        for record in records
        if record is not None
        for key, value in sorted(record.metrics.items())
        if "score/" in key or ("gold" in key and hasattr(value, "value"))
    }
    samples = [{**sample, "kl": None} for record in records if record is not None for sample in record.samples]
    return {"built": built, "means": str(means), "samples": samples}


def test_a_recipe_builds_its_sources_on_rank_0_alone(two: Ranks, tmp_path: Path) -> None:
    folder = str(make_inputs(tmp_path))
    wanted = task_of(folder)
    first, second = two.run(task_of, folder)
    assert first["built"] == wanted["built"] == ["ModelReward", "FunctionReward", "VerifierReward"]
    assert second["built"] == ["ModelReward", "AbsentSource", "AbsentSource"]
    assert first["means"] == second["means"]
    assert first["samples"] == second["samples"]
    assert [s["response"] for s in first["samples"]] == [s["response"] for s in wanted["samples"]]
    scores = [[s["score"] for s in found["samples"]] for found in (first, wanted)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3, abs=1e-4)


def of_a_served_reference(url: str) -> list[float]:
    with closing(ServedReferenceWorker([VLLMServer(url)] if current().leads else [])) as worker:
        return worker.logprobs(ANSWERS).logprobs.tolist()


def test_rank_0_alone_asks_the_servers_of_a_reference(two: Ranks) -> None:
    with fake_servers(LanguageModel(tiny_language_model())) as (fake,):
        first, second = two.run(of_a_served_reference, fake.url)
        assert first == second
        assert fake.counts[GENERATE] == len(ANSWERS)


def alone_with_a_model() -> list[float]:
    """A source of the user's that asks a reward model itself."""
    model = scalar_from_language_model(LanguageModel(tiny_language_model(seed=1)), HeadStart.NORMAL, seed=2)
    inner = ModelReward(model)

    def halves(prompts: Sequence[Any], responses: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        del prompts, responses, metadata
        return [each.score / 2 for each in inner.score(ANSWERS)]

    return [s.score for s in WeightedReward([(1.0, FunctionReward(halves))]).score(ANSWERS)]


def test_a_function_may_ask_a_model_that_lies_whole_on_rank_0(two: Ranks) -> None:
    first, second = two.run(alone_with_a_model)
    assert first == second == alone_with_a_model()
