"""What a caller of the library may get wrong: one clear ProximoError, and nothing learned from it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import all_weights, lengths
from proximo.config.ppo.options import PPOConfig
from proximo.errors import DataError, ProximoError
from proximo.learner.optimizers import OwnOptimizer
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.calls import OwnCall
from proximo.ppo.trainer import PPOTrainer

PROMPTS = ["ab", "cd"]


def trainer(**given: Any) -> PPOTrainer:
    config = PPOConfig(num_steps=1, prompts_per_step=2, rollout={"max_new_tokens": 4})
    return PPOTrainer(**({"policy": tiny_language_model(), "tokenizer": tiny_tokenizer(), "config": config} | given))


def scores_later(prompts, responses, metadata):
    yield [1.0 for _ in responses]


async def told_later(*_: Any) -> None:
    pass


def calling(function: Callable[..., Any]) -> OwnCall:
    return OwnCall(at="score", function=function)


def twice(made: PPOTrainer) -> None:
    made.train(PROMPTS, reward=lengths)
    made.train(PROMPTS, reward=lengths)


def itself_as_reference() -> None:
    policy = tiny_language_model()
    try:
        trainer(policy=policy, reference=policy)
    finally:
        assert all(each.requires_grad for each in policy.model.parameters()), "it was left frozen"


def other_prompts() -> None:
    made = trainer()
    made.step(["other", "prompts"], made.generate(PROMPTS), [1.0, 2.0])


MISTAKES: list[tuple[str, Callable[[], Any], str]] = [
    ("path as policy", lambda: trainer(policy="owner/model"), "policy must be a model of transformers.*got str"),
    ("frozen policy", lambda: trainer(policy=tiny_language_model().requires_grad_(False)), "no weight that requires"),
    ("bf16", lambda: trainer(policy=tiny_language_model(dtype=torch.bfloat16)), "policy model has weights in bfloat16"),
    ("dict as config", lambda: trainer(config={"num_steps": 1}), "must be a PPOConfig, got {.num_steps"),
    ("negative seed", lambda: trainer(seed=-1), "seed must be a whole number of at least 0 .*got -1"),
    ("itself as reference", itself_as_reference, "reference is the policy itself"),
    ("prompts of other responses", other_prompts, "response 0 was generated to another prompt"),
    ("text as reference", lambda: trainer(reference="a/b"), "the reference must be a model of transformers"),
    ("language model as value", lambda: trainer(value=tiny_language_model()), "score"),
    ("number as value", lambda: trainer(value=3), "value must be a ScalarModel or a sequence classifier, got int"),
    ("no prompts", lambda: trainer().train([], reward=lengths), "no prompts to train on"),
    (
        "one text as prompts",
        lambda: trainer().train("hello", reward=lengths),
        r"prompts must be a list .*got str: write \[text\]",
    ),
    ("messages", lambda: trainer().train([[{"role": "user"}]], reward=lengths), "apply_chat_template"),
    ("number as reward", lambda: trainer().train(PROMPTS, reward=3), "must be a function or a source.*got int$"),
    ("reward of other arguments", lambda: trainer().train(PROMPTS, reward=lambda texts: texts), "parameter 'texts'"),
    ("reward of a yield", lambda: trainer().train(PROMPTS, reward=scores_later), "it has a yield"),
    ("on_step of one argument", lambda: trainer().train(PROMPTS, reward=lengths, on_step=lambda line: None), "on_step"),
    ("on_step that is none", lambda: trainer().train(PROMPTS, reward=lengths, on_step=3), "it is a int"),
    ("async on_step", lambda: trainer().train(PROMPTS, reward=lengths, on_step=told_later), "on_step.*it is async"),
    (
        "async own call",
        lambda: trainer(own_calls=[calling(told_later)]),
        "own call told_later at score: it gets 4 values, but it is async",
    ),
    ("optimizer of no arguments", lambda: OwnOptimizer(make=lambda: 0), r"make\(parameters\), but its signature"),
    ("schedule of one", lambda: OwnOptimizer(make=list, schedule=lambda update: 1.0), r"schedule\(update, num_upd"),
    ("misspelt setting", lambda: PPOConfig(num_step=3), "PPOConfig: num_step is not.*did you mean num_steps"),
    ("two wrong settings", lambda: PPOConfig(num_steps=0, kl={"x": 1}), "PPOConfig has 2 mistakes"),
    ("bytes as scores", lambda: trainer().step(PROMPTS, [[5], [6]], b"11"), "scores must be a list"),
    ("bytes as responses", lambda: trainer().step(PROMPTS, [b"a", b"b"], [1.0, 1.0]), "list of token ids, got b'a'"),
    ("train twice", lambda: twice(trainer()), "the run has taken its 1 step:"),
    ("scores too few", lambda: trainer().step(PROMPTS, [[5], [6]], [1.0]), "got 1 for 2 responses"),
    ("responses too few", lambda: trainer().step(PROMPTS, [[5]], [1.0]), "1 response cannot be shared out among 2"),
    ("no responses", lambda: trainer().step(PROMPTS, [], []), "0 responses cannot be shared out among 2"),
    ("6 for 4", lambda: trainer().step(PROMPTS * 2, [[5]] * 6, [0.0] * 6), "6 responses cannot be shared out among 4"),
    ("texts as responses", lambda: trainer().step(PROMPTS, ["a", "b"], [1.0, 1.0]), "list of token ids, got 'a'"),
    ("ids beyond", lambda: trainer().step(PROMPTS, [[5], [99]], [1.0, 1.0]), "token id 99, but the policy has 64"),
]


@pytest.mark.parametrize(("mistake", "message"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_of_the_caller_is_named(mistake: Callable[[], Any], message: str) -> None:
    with pytest.raises(ProximoError, match=f"(?s){message}"):
        mistake()


def test_models_of_transformers_serve_as_reference_and_as_value() -> None:
    classifier = scalar_from_language_model(LanguageModel(tiny_language_model(seed=3)), HeadStart.NORMAL).model
    made = trainer(reference=tiny_language_model(seed=2), value=classifier)
    (line,) = made.train(PROMPTS, reward=lengths)
    assert abs(line["kl/sequence"]) > 1e-3
    assert made.roles.value.model.model is classifier


def test_a_response_without_a_score_is_left_out_and_counted() -> None:
    with_none, with_nan = trainer(), trainer()
    prompts = [*PROMPTS, "ef", "gh", "ab", "cd"]
    for made, missing in ((with_none, None), (with_nan, float("nan"))):
        responses = made.generate(prompts)
        line = made.step(prompts, responses, [missing, *(float(i) for i in range(5))])
        assert line["response/unscored"] == 1
        assert line["score/mean"] == 2.0
        assert line["policy/skipped_updates"] == 0
    assert torch.equal(all_weights(with_none.policy.model), all_weights(with_nan.policy.model))


@pytest.mark.parametrize("rollout", [{}, {"min_new_tokens": 1}], ids=["of the softmax", "computed anew"])
def test_stale_responses_are_refused_before_anything_is_learned_from_them(rollout: dict[str, int]) -> None:
    """Also where the old log-probs are computed anew, so that every ratio would be 1."""
    made = trainer(config=PPOConfig(prompts_per_step=2, policy_optimizer={"learning_rate": 0.1}, rollout=rollout))
    responses = made.generate(PROMPTS)
    made.step(PROMPTS, responses, [0.0, 1.0])
    before, version = all_weights(made.policy.model), made.policy_version
    with pytest.raises(DataError, match=rf"generated by version 0 of the policy, which is at version {version} now"):
        made.step(PROMPTS, responses, [0.0, 1.0])
    assert torch.equal(all_weights(made.policy.model), before)
    assert made.policy_version == version
