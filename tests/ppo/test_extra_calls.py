"""Calls of the caller's own in the graph of a PPO step: they add, amend and replace, and their names are checked."""

from dataclasses import replace

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.metrics.catalogue import catalogue
from proximo.ppo.extra_calls import ExtraCall
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Experience, Scored

PROMPTS = ["ab", "cde", "f", "gh"]
BASE = {
    "num_steps": 2,
    "prompts_per_step": 4,
    "rollout": {"max_new_tokens": 5},
    "policy_optimizer": {"learning_rate": 1e-2},
}


def length(prompts, responses, metadata) -> list[float]:
    return [float(len(text)) for text in responses]


def trainer(*extra: ExtraCall, **options) -> PPOTrainer:
    return PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=PPOConfig(**(BASE | options)), extra_calls=extra)


def weights(made: PPOTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in made.policy.model.parameters()])


def tripled(scored: list[Scored]) -> list[Scored]:
    return [replace(each, score=3 * each.score) for each in scored]


TRIPLE = ExtraCall(name="triple", reads=("scored",), writes=("scored",), function=tripled)


def test_a_call_that_adds_is_run_with_what_it_reads_and_its_numbers_are_metrics() -> None:
    longest = ExtraCall(
        name="lengths",
        reads=("responses",),
        writes=("longest", "texts"),
        function=lambda responses: (max(len(r.token_ids) for r in responses), [r.text for r in responses]),
    )
    watched, plain = trainer(longest), trainer()
    (line, _), (expected, _) = (made.train(PROMPTS, reward=length) for made in (watched, plain))
    assert line["extra/longest"] == line["response/tokens_max"]
    assert "extra/texts" not in line
    assert line["time/extra_seconds"] >= 0
    assert torch.equal(weights(watched), weights(plain))
    own = catalogue().repeatable(line)
    del own["extra/longest"]
    assert own == catalogue().repeatable(expected)


def test_what_a_call_wrote_is_in_the_outcome_of_the_step() -> None:
    texts = ExtraCall(name="t", reads=("responses",), writes=("texts",), function=lambda rs: [r.text for r in rs])
    made = trainer(texts)
    responses = made.generate(PROMPTS)
    outcome = made.run_step(scored=[Scored(response=each, score=1.0) for each in responses])
    assert outcome.extra == {"texts": [each.text for each in responses]}


def test_a_call_that_amends_scores_does_what_another_reward_would() -> None:
    def triple_length(prompts, responses, metadata) -> list[float]:
        return [3.0 * len(text) for text in responses]

    amended, other, plain = trainer(TRIPLE), trainer(), trainer()
    amended.train(PROMPTS, reward=length)
    other.train(PROMPTS, reward=triple_length)
    plain.train(PROMPTS, reward=length)
    assert torch.equal(weights(amended), weights(other))
    assert not torch.equal(weights(amended), weights(plain))


def test_scores_that_are_brought_are_amended_too() -> None:
    amended, plain = trainer(TRIPLE), trainer()
    for made, factor in ((amended, 1.0), (plain, 3.0)):
        responses = made.generate(PROMPTS)
        made.step(PROMPTS, responses, [factor * i for i in range(4)])
    assert torch.equal(weights(amended), weights(plain))


def test_advantages_can_be_amended_before_anything_is_learned_from_them() -> None:
    def silenced(experience: Experience) -> Experience:
        return replace(experience, advantages=torch.zeros_like(experience.advantages))

    call = ExtraCall(name="silence", reads=("experience",), writes=("experience",), function=silenced)
    made = trainer(call, kl={"apply_to": "none"})
    before = weights(made)
    made.train(PROMPTS, reward=length)
    assert torch.equal(weights(made), before)


def test_a_call_of_a_known_name_runs_in_its_place() -> None:
    def score(responses) -> list[Scored]:
        return [Scored(response=each, score=float(len(each.text))) for each in responses]

    replaced = trainer(ExtraCall(name="score", reads=("responses",), writes=("scored",), function=score))
    plain = trainer()
    replaced.train(PROMPTS)
    plain.train(PROMPTS, reward=length)
    assert torch.equal(weights(replaced), weights(plain))


def test_a_call_without_a_place_in_a_step_is_left_out_of_that_step() -> None:
    seen = []
    late = ExtraCall(name="late", reads=("policy_report",), function=lambda report: seen.append(report.refusals))
    asked = ExtraCall(name="asked", reads=("prompts",), writes=("count",), function=len)
    doubled = ExtraCall(name="doubled", reads=("count",), writes=("twice",), function=lambda count: 2 * count)
    made = trainer(doubled, late, asked, critic_warmup_steps=1)
    line, _ = made.train(PROMPTS, reward=length)
    assert seen == [()]
    assert (line["extra/count"], line["extra/twice"]) == (4.0, 8.0)
    assert "extra/twice" not in made.step(PROMPTS, made.generate(PROMPTS), [1.0, 2.0, 3.0, 4.0])
    assert len(seen) == 2


def nothing(*given: object) -> None:
    return None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "x", "reads": ("respones",)}, "'x': ..respones.*values of a step:.* responses"),
        ({"name": "x", "writes": ("responses",)}, "more than once: responses"),
        ({"name": "x", "reads": ("policy_report", "scored"), "writes": ("scored",)}, "no call can run next"),
        ({"name": "score", "reads": ("responses",)}, "must write the same values: scored; got nothing"),
        ({"name": "x", "writes": ("two words",)}, "letters, digits.*'two words'"),
        ({"name": "x", "reads": "responses"}, "tuples of names"),
    ],
)
def test_names_that_do_not_fit_are_refused_when_the_trainer_is_made(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(ExtraCall(**given, function=nothing))


def test_a_call_that_this_configuration_lacks_cannot_be_replaced() -> None:
    call = ExtraCall(name="values", reads=("responses",), writes=("values",), function=nothing)
    with pytest.raises(ConfigError, match="no call with that name to replace"):
        trainer(call, advantage="group_centred", responses_per_prompt=2)
