"""The calls of a PPO step: what they read, how they are timed, and functions of the user's at them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_trainers import PROMPTS, all_weights, lengths, ppo_trainer
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError, TrainingError
from proximo.metrics.catalogue import catalogue
from proximo.ppo import calls
from proximo.ppo.calls import Calls, OwnCall, TracedCall
from proximo.ppo.step import trace_step
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Scored
from proximo.rewards.function import FunctionReward

BASE: dict[str, Any] = {"num_steps": 2, "prompts_per_step": 4, "rollout": {"max_new_tokens": 5}}
FULL_KL = {"kl": {"kind": "loss", "estimator": "full"}}
GROUPS = {"responses_per_prompt": 2, "advantage": "group_centred"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "groups": GROUPS,
    "resampled groups": {**GROUPS, "advantage": {"kind": "group_centred", "zero_variance_groups": "resample"}},
    "best of n": {"samples_per_prompt": 3},
    "greedy baseline": {"advantage": "greedy_baseline"},
    "full KL in the loss": FULL_KL,
    "full KL in the reward": {"kl": {"estimator": "full"}},
    "no KL": {"kl": "none"},
    "warm-up": {"critic_warmup_steps": 1},
    "followers": {"average_decay": 0.9, "kl": {"reference_every_steps": 1}},
    "recomputed log-probs": {"rollout": {"max_new_tokens": 5, "min_new_tokens": 2}},
}


def trainer(*own: OwnCall, **options: Any) -> PPOTrainer:
    return ppo_trainer(own_calls=own, **(BASE | options))


def seen_by(made: PPOTrainer) -> tuple[TracedCall, ...]:
    """In its second step, after the critic's warm-up."""
    made.roles.reward.source = FunctionReward(lengths)
    made.state = replace(made.state, steps_done=1)
    outcome = made.run_step(prompts_of=lambda _: made._prompts(PROMPTS))
    assert not outcome.calls._made, "an outcome that is kept holds the values of all calls"
    return outcome.trace


@pytest.mark.parametrize("shares_trunk", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_traced_step_makes_the_calls_that_a_real_one_makes(name: str, shares_trunk: bool) -> None:
    options = CONFIGURATIONS[name]
    if shares_trunk and ("advantage" in options or "critic_warmup_steps" in options):
        pytest.skip("covered without a trunk")
    made = trainer(value="trunk" if shares_trunk else None, **options)
    planned = trace_step(
        made.config, reuses_sampled_logprobs=made.reuses_sampled_logprobs, shares_trunk=made.roles.shares_trunk
    )
    assert unrepeated(seen_by(made)) == unrepeated(planned)


def unrepeated(trace: Any) -> list[TracedCall]:
    """Each call once: a step may sample several times."""
    return list({call.name: call for call in trace}.values())


def test_the_table_of_the_page_has_what_the_steps_of_all_configurations_read() -> None:
    everything: list[TracedCall] = []
    for options in CONFIGURATIONS.values():
        for reuses, shares, steps_done in product((True, False), (True, False), (0, 1)):
            config = PPOConfig(**(BASE | options))
            everything += trace_step(config, reuses_sampled_logprobs=reuses, shares_trunk=shares, steps_done=steps_done)
    page = (Path(__file__).parents[2] / "docs" / "dataflow.md").read_text()
    rows = {cells[1].strip(" `"): cells for line in page.splitlines() if len(cells := line.split("|")) == 6}
    assert {call.name for call in everything} | {"release_cache"} == rows.keys() - {"call", "---"}
    for name, cells in rows.items():
        made = [call for call in everything if call.name == name]
        reads, roles = ({word.strip(" `") for word in re.split(r",|beside", cell)} - {""} for cell in cells[2:4][::-1])
        if made:
            assert reads == {read for call in made for read in call.reads}, name
            assert roles == {role for call in made for role in (call.role, *call.beside) if role}, name


def test_a_trace_is_of_a_step_after_the_warm_up_of_the_critic_unless_it_is_told_of_one_within() -> None:
    config = PPOConfig(critic_warmup_steps=2)
    for steps_done, learns in ((0, False), (1, False), (2, True), (None, True)):
        trace = trace_step(config, reuses_sampled_logprobs=True, steps_done=steps_done)
        assert ("train_policy" in {call.name for call in trace}) == learns


def test_what_a_call_reads_is_in_the_trace() -> None:
    reads = {call.name: call.reads for call in trace_step(PPOConfig(), reuses_sampled_logprobs=False)}
    assert reads["score"] == ("generate", "state")
    assert reads["experience"] == ("select", "policy_logprobs", "reference_logprobs", "values", "state")
    assert reads["train_policy"] == reads["train_value"] == ("experience", "state")
    beside = {call.name: call.beside for call in trace_step(PPOConfig(**FULL_KL), reuses_sampled_logprobs=False)}
    assert beside["train_policy"] == ("reference",)
    assert beside["reference_logprobs"] == beside["train_value"] == ()


def test_equal_numbers_are_not_taken_for_one_value() -> None:
    call = Calls(step=1, memory_settings="", models={})
    for name, value in (("one", 1), ("text", "a"), ("nothing", None), ("none", ())):
        assert call.input(name, value) is value
    made = call("first", None, lambda: [])
    call("second", None, lambda *given: None, 1, "a", None, (), made)
    assert [each.reads for each in call.trace] == [(), ("first",)]


def test_the_seconds_of_calls_add_up_and_repeated_ones_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read."""
    readings = iter(range(100))
    monkeypatch.setattr(calls.time, "perf_counter", lambda: float(next(readings)))
    own = [OwnCall(at="a", does="measure", function=lambda result: {"found": result})]
    call = Calls(step=1, memory_settings="", models={}, own=own)
    assert [call("a", None, lambda: 5), call("b", None, lambda: 6), call("a", None, lambda: 7)] == [5, 6, 7]
    assert call.seconds == {"a": 2.0, "b": 1.0}
    assert (call.own_seconds, call.measured) == (2.0, {"found": 7.0})


def test_a_call_that_measures_changes_nothing_and_its_numbers_are_metrics() -> None:
    def longest(scored: list[Scored], *inputs: Any) -> dict[str, float]:
        return {"longest": max(len(each.response.token_ids) for each in scored)}

    watched, plain = trainer(OwnCall(at="score", does="measure", function=longest)), trainer()
    (line, _), (expected, _) = (made.train(PROMPTS, reward=lengths) for made in (watched, plain))
    assert line["extra/longest"] == line["response/tokens_max"]
    assert line["time/extra_seconds"] >= 0
    assert torch.equal(all_weights(watched.policy.model), all_weights(plain.policy.model))
    own = catalogue().repeatable(line)
    del own["extra/longest"]
    assert own == catalogue().repeatable(expected)


def test_a_call_that_amends_scores_does_what_another_reward_would() -> None:
    def tripled(scored: list[Scored], *inputs: Any) -> list[Scored]:
        return [replace(each, score=3 * each.score) for each in scored]

    def triple_length(prompts, responses, metadata) -> list[float]:
        return [3.0 * len(text) for text in responses]

    amended, other, plain = trainer(OwnCall(at="score", function=tripled)), trainer(), trainer()
    amended.train(PROMPTS, reward=lengths)
    other.train(PROMPTS, reward=triple_length)
    plain.train(PROMPTS, reward=lengths)
    assert torch.equal(all_weights(amended.policy.model), all_weights(other.policy.model))
    assert not torch.equal(all_weights(amended.policy.model), all_weights(plain.policy.model))


def test_advantages_can_be_amended_before_anything_is_learned_from_them() -> None:
    def silenced(made: Any, *inputs: Any) -> Any:
        experience = replace(made.experience, advantages=torch.zeros_like(made.experience.advantages))
        return made._replace(experience=experience)

    made = trainer(OwnCall(at="experience", function=silenced), kl="none")
    before = all_weights(made.policy.model)
    made.train(PROMPTS, reward=lengths)
    assert torch.equal(all_weights(made.policy.model), before)


def test_a_call_that_replaces_runs_in_the_place_of_the_steps_own() -> None:
    def score(responses, greedy, state) -> list[Scored]:
        return [Scored(response=each, score=float(len(each.text))) for each in responses]

    replaced, plain = trainer(OwnCall(at="score", does="replace", function=score)), trainer()
    replaced.train(PROMPTS)
    plain.train(PROMPTS, reward=lengths)
    assert torch.equal(all_weights(replaced.policy.model), all_weights(plain.policy.model))


def test_calls_at_one_place_run_in_their_order() -> None:
    own = [
        OwnCall(at="a", function=lambda result: [*result, 1]),
        OwnCall(at="a", does="replace", function=lambda: [0]),
        OwnCall(at="a", function=lambda result: [*result, 2]),
        OwnCall(at="b", function=lambda result: [*result, 3]),
    ]
    call = Calls(step=1, memory_settings="", models={}, own=own)
    assert call("a", None, lambda: [9]) == [0, 1, 2]


def test_a_call_at_what_a_step_leaves_out_is_left_out_too() -> None:
    seen: list[Any] = []
    late = OwnCall(at="train_policy", does="measure", function=lambda report, *_: seen.append(report.refusals))
    made = trainer(late, critic_warmup_steps=1)
    made.train(PROMPTS, reward=lengths)
    assert seen == [()]


def test_an_error_names_the_call_and_nothing_has_changed() -> None:
    def broken(scored, *inputs) -> None:
        raise OSError("no disk")

    made = trainer(OwnCall(at="score", function=broken))
    before = all_weights(made.policy.model)
    with pytest.raises(TrainingError, match=r"the call broken of yours at score raised OSError: no disk"):
        made.train(PROMPTS, reward=lengths)
    assert made.state.steps_done == 0
    assert torch.equal(all_weights(made.policy.model), before)


def length_of(*_: object) -> None:
    return None


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"at": "scores"}, "have no call 'scores'; they have generate, score, select"),
        ({"at": "generate_greedy"}, "have no call 'generate_greedy'"),
        ({"at": "score", "does": "watch"}, "replace, amend or measure, got 'watch'"),
        ({"at": "score", "function": 3}, "it is a int"),
        ({"at": "score", "function": lambda scored: scored}, "at score: it gets 4 values, but its signature is"),
    ],
)
def test_calls_that_do_not_fit_are_refused_when_the_trainer_is_made(own: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(OwnCall(**{"function": length_of, **own}))
    with pytest.raises(ConfigError, match="two of them replace the call score"):
        trainer(*(OwnCall(at="score", does="replace", function=length_of) for _ in range(2)))


@pytest.mark.parametrize(
    ("found", "message"),
    [(3.0, "numbers by names .*got 3.0"), ({"two words": 1}, "got {'two words"), ({"a": "b"}, "got {'a': 'b'}")],
)
def test_what_measures_must_return_numbers_by_name(found: Any, message: str) -> None:
    made = trainer(OwnCall(at="score", does="measure", function=lambda scored, *inputs: found))
    with pytest.raises(ConfigError, match=message):
        made.train(PROMPTS, reward=lengths)


def test_another_class_of_calls_runs_the_steps_to_the_same_bits() -> None:
    ran: list[str] = []

    class Listing(Calls):
        def run(self, name: str, function: Any, *inputs: Any) -> Any:
            ran.append(name)
            return super().run(name, function, *inputs)

    listed, plain = trainer(), trainer()
    listed.calls_type = Listing
    for made in (listed, plain):
        made.train(PROMPTS, reward=lengths)
    assert ran[:3] == ["generate", "score", "select"]
    assert ran.count("push_weights") == 2
    assert torch.equal(all_weights(listed.policy.model), all_weights(plain.policy.model))
