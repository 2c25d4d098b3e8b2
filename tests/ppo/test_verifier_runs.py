"""Runs of PPO whose scores come from workers: checked before models, begun while others are sampled, ended in time."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_tokenizer
from ppo_trainers import ppo_trainer
from proximo.commands.dry_run import describe
from proximo.config.rewards.verifiers import CustomVerifierRewardConfig
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.models.precision.placement import Precision
from proximo.ppo import from_recipe
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Response, Scored
from proximo.rollout.decoding import DecodingCall
from proximo.rollout.sampling import RandomKey
from proximo.run.make import models as build
from proximo.run.make import reward_sources
from proximo.run.options import RunOptions
from proximo.run.preflight import check_inputs
from tiny_runs import changed, make_inputs, recipe_of, run
from worker_processes import workers_of

QUIET = RunOptions(overwrite=True, quiet=True)


def verifier(name: str, **options: Any) -> dict[str, Any]:
    return {"kind": "verifier", "name": name, "workers": 1, **options}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def recipe(place: Path, reward: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plain = {"reward": [reward], "gold": None, "value": {"init_from": "policy"}, "ppo.num_steps": 2}
    return changed(recipe_of("ppo", place), plain | changes)


def lines(place: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_counts_what_its_sources_do_and_leaves_no_worker(place: Path) -> None:
    watched = verifier("letters", verifier_class="example_verifiers:Letters", kwargs={"letter": "b"})
    made = recipe(place, verifier("letters", verifier_class="example_verifiers:Letters"), gold=watched)
    assert run("ppo", made, QUIET) == 0
    for line in lines(place)[1:]:
        assert line["source/letters/failure_fraction"] == line["source/gold.letters/failure_fraction"] == 0
        assert line["source/letters/seconds_p50"] > 0
        assert {"score/letters/mean", "score/letters.length/mean", "gold/mean"} <= set(line)
    assert workers_of(os.getpid()) == []


def test_a_run_whose_workers_die_ends_each_step_and_counts_the_failures(place: Path) -> None:
    dying = verifier("dying", verifier_class="example_verifiers:Dying", step_seconds=600)
    start = time.monotonic()
    assert run("ppo", recipe(place, dying, **{"ppo.guards.max_unscored_fraction": 1.0}), QUIET) == 0
    assert time.monotonic() - start < 300
    for line in lines(place)[1:]:
        # An evaluation in the same step asks the same source.
        asked, faults = (
            4 + line.get("evaluation/responses", 0),
            line["response/unscored"] + line.get("evaluation/unscored", 0),
        )
        assert line["source/dying/failure_fraction"] * asked == pytest.approx(faults)
        assert line["source/dying/worker_restarts"] >= faults
        assert line["score/mean"] == line["score/dying/mean"]
    assert sum(line["response/unscored"] for line in lines(place)[1:]) >= 2
    samples = [json.loads(line) for line in (place / "run" / "samples.jsonl").read_text().splitlines()]
    faulty = [each for each in samples if each["score"] is None]
    assert {(each["state"], each["reason"]) for each in faulty} == {
        ("infrastructure_fault", "its worker ended with status 1")
    }
    assert not any({"state", "reason"} & set(each) for each in samples if each["score"] is not None)
    assert "<span>its worker ended with status 1</span>" in (place / "run" / "report.html").read_text()
    with pytest.raises(TrainingError, match="its worker ended with status 1"):
        run("ppo", recipe(place, dying), QUIET)
    assert workers_of(os.getpid()) == []


def test_a_row_that_cannot_be_graded_is_named_before_a_model_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_recipe, "build_language_model", lambda *_, **__: pytest.fail("a model was loaded"))
    rows = [{"prompt": "ab"}, {"prompt": "cd", "unfit": True}]
    path = place / "unfit.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reward = verifier("letters", verifier_class="example_verifiers:Letters")
    for data in ({"sources": [{"path": str(path)}]}, {"evaluation_sources": [{"path": str(path)}]}):
        settings = {f"data.{key}": value for key, value in data.items()} | {"data.held_out_rows": 0}
        with pytest.raises(DataError, match=r"unfit.jsonl, row 2: reward source 'letters': there is nothing to grade"):
            run("ppo", recipe(place, reward, **settings), QUIET)
    assert workers_of(os.getpid()) == []


def test_workers_end_where_the_models_cannot_be_built(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        assert len(workers_of(os.getpid())) == 1
        raise TrainingError("no model today")

    monkeypatch.setattr(from_recipe, "build_language_model", fails)
    with pytest.raises(TrainingError, match="no model today"):
        run("ppo", recipe(place, verifier("letters", verifier_class="example_verifiers:Letters")), QUIET)
    assert workers_of(os.getpid()) == []


def test_a_dry_run_names_the_verifier_and_finds_one_that_is_not_there(place: Path) -> None:
    known = PPORecipe.model_validate(recipe(place, verifier("letters", verifier_class="example_verifiers:Letters")))
    assert "letters: example_verifiers:Letters (verifier), weight" in describe(known)
    check_inputs(known)
    missing = PPORecipe.model_validate(recipe(place, verifier("letters", verifier_class="example_verifiers:Letrers")))
    with pytest.raises(Exception, match=r"reward.0.verifier_class: .*example_verifiers.py defines no Letrers"):
        check_inputs(missing)


def test_a_package_for_programs_that_is_not_installed_is_found_before_anything_starts(place: Path) -> None:
    code = {"kind": "code", "form": "asserts", "packages": ["numpy"]}
    check_inputs(PPORecipe.model_validate(recipe(place, code)))
    missing = PPORecipe.model_validate(recipe(place, code | {"packages": ["nmpy"]}))
    with pytest.raises(ConfigError, match=r"reward.0.packages: .* imported as 'nmpy'; did you mean 'numpy'"):
        check_inputs(missing)


def test_what_a_recipe_says_of_workers_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        reward_sources, "VerifierReward", lambda verifier, **options: given.update(options, verifier=verifier)
    )
    config = CustomVerifierRewardConfig(
        kind="verifier", verifier_class="m:J", workers=3, worker_memory_mib=200, kwargs={"x": 1}
    )
    device_spec = build.DeviceSpec(device=torch.device("cpu"), precision=Precision.FLOAT32, seed=0)
    build.build_reward_source(config, tiny_tokenizer(), device_spec=device_spec, tokens_per_microbatch=64)
    assert given == {
        "verifier": "m:J",
        "name": "verifier",
        "options": {"x": 1},
        "num_workers": 3,
        "answer_seconds": 10.0,
        "step_seconds": 600.0,
        "memory_bytes": 200 * 2**20,
    }


class Lengths:
    """Scores lengths."""

    name = "lengths"

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        return [Scored(response=each, score=float(len(each.token_ids))) for each in responses]


class EagerLengths(Lengths):
    """Notes when it is told of a response."""

    def __init__(self) -> None:
        self.begun: list[Response] = []
        self.passes_before: list[int] = []
        self.passes = 0

    def begin(self, response: Response) -> None:
        self.begun.append(response)
        self.passes_before.append(self.passes)


def trainer(reward: Lengths, **options: Any) -> PPOTrainer:
    rollout = {"max_new_tokens": 12, "stop_token_ids": range(6, 16)}
    return ppo_trainer(reward=reward, num_steps=3, rollout=rollout, **options)


@pytest.mark.parametrize("options", [{}, {"samples_per_prompt": 3}, {"responses_per_prompt": 2}])
def test_scoring_begins_before_the_last_response_has_ended(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = EagerLengths()
    decode = DecodingCall._decode

    def counted(call: Any) -> Any:
        source.passes += 1
        return decode(call)

    monkeypatch.setattr(DecodingCall, "_decode", counted)
    outcome = trainer(source, **options).run_step(prompts=trainer(source)._prompts(["ab", "c", "de", "f"]))
    assert len(source.begun) == 4 * options.get("samples_per_prompt", options.get("responses_per_prompt", 1))
    assert {id(each) for each in source.begun} == {id(each.response) for each in outcome.sampled}
    early = [passes for passes in source.passes_before if passes < source.passes]
    assert len(early) >= len(source.begun) / 2


def test_beginning_early_changes_no_bit_of_the_training() -> None:
    prompts = ["ab", "cde", "f", "gh", "a"]
    plain, eager = (trainer(source).train(prompts) for source in (Lengths(), EagerLengths()))
    for ours, theirs in zip(plain, eager, strict=True):
        untimed = {name for name in ours if not name.startswith(("time/", "throughput/"))}
        assert {name: ours[name] for name in untimed} == {name: theirs[name] for name in untimed}


def test_the_engine_tells_of_each_response_once_and_returns_the_same_ones() -> None:
    made = trainer(Lengths())
    told: list[Response] = []
    found = made.roles.policy.engine.generate(
        made._prompts(["ab", "cde", "f"]),
        num_samples=3,
        options=sampling_options(made.config),
        key=RandomKey(seed=0, purpose="rollout", step=0),
        on_finished=told.append,
    )
    assert sorted(map(id, told)) == sorted(map(id, found))
    ends = [len(each.token_ids) for each in told]
    assert ends == sorted(ends), "one row for each: the short ones end first"
