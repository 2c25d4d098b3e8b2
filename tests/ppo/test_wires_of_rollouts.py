"""Every setting of a rollout reaches the engine, and the temperature every log-prob, by value.

The engine is one that only notes what it was asked for; what it then does is held in tests/rollout. Log-probs and the
KL over the vocabulary are made again from transformers' own logits, with Python's floats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart
from proximo.models.sharing import scalar_on
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.step import Roles
from proximo.ppo.step_arguments import as_prompts
from proximo.ppo.task import evaluate_policy
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Finish, Prompt, Response
from proximo.rewards.function import FunctionReward
from proximo.rollout.engine import Holding, fingerprint
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from records_made import prompt, response
from roles_made import roles_of, state

ROLLOUT: dict[str, Any] = {
    "max_new_tokens": 17,
    "random_limit_min": 11,
    "min_new_tokens": 3,
    "temperature": 0.6,
    "top_k": 23,
    "top_p": 0.85,
    "stop_token_ids": (9, 31),
    "stop_strings": ("ab", "."),
}
KEY = RandomKey(seed=5, purpose="rollout", step=3)


@dataclass
class Noting:
    """An engine that answers everything with one token."""

    max_logprob_error = None
    asked: list[tuple[int, SamplingOptions]] = field(default_factory=list)
    held: Holding | None = None

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.held = Holding(version=version, fingerprint=fingerprint(tensors))

    def holds(self) -> Holding | None:
        return self.held

    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, options: SamplingOptions, **_: Any
    ) -> list[Response]:
        self.asked.append((num_samples, options))
        return [response([2], to=each, finish=Finish.EOS) for each in prompts for _ in range(num_samples)]


def score(prompts: list[str], responses: list[str], metadata: Any) -> list[float]:
    return [0.5 for _ in responses]


def roles_with(engine: Any, **options: Any) -> Roles:
    policy = LanguageModel(tiny_language_model())
    config = PPOConfig(**({"rollout": ROLLOUT} | options))
    return roles_of(config, policy, reference=policy, engine=engine, source=FunctionReward(score, name="half"))


def test_the_engine_is_asked_for_all_that_the_section_says() -> None:
    assert sampling_options(PPOConfig(rollout=ROLLOUT)) == SamplingOptions(**ROLLOUT)
    assert sampling_options(PPOConfig()) == SamplingOptions(max_new_tokens=128)
    alone: dict[str, Any] = {"max_new_tokens": 17, "greedy": True}
    assert sampling_options(PPOConfig(rollout=alone)) == SamplingOptions(**alone)


@pytest.mark.filterwarnings("ignore:ppo.rollout.top_k or top_p is set")
@pytest.mark.parametrize(("options", "count"), [({}, 2), ({"samples_per_prompt": 5}, 5)])
def test_a_rollout_asks_for_its_samples_and_for_the_most_likely_one_beside_them(options: Any, count: int) -> None:
    engine = Noting()
    made = roles_with(engine, responses_per_prompt=2, **options).policy
    made.generate([prompt("a"), prompt("b")], state())
    made.generate_greedy([prompt("a"), prompt("b")], state())
    plain = SamplingOptions(**ROLLOUT)
    assert engine.asked == [(count, plain), (1, replace(plain, greedy=True))]


@pytest.mark.parametrize(
    "options", [{"evaluate_greedy": True}, {"evaluation_samples_per_prompt": 3}, {"samples_per_prompt": 5}]
)
def test_an_evaluation_asks_as_its_own_keys_say(options: dict[str, Any]) -> None:
    engine = Noting()
    made = roles_with(engine, responses_per_prompt=2, **options)
    assert made.reward.source is not None
    evaluate_policy(made, [prompt("a")], reward=made.reward.source, config=made.policy.config, seed=0)
    greedy = replace(SamplingOptions(**ROLLOUT), greedy=options.get("evaluate_greedy", False))
    assert engine.asked == [(options.get("evaluation_samples_per_prompt", 1), greedy)]


def trainer(**options: Any) -> PPOTrainer:
    return PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=PPOConfig(**options))


def test_so_many_responses_grow_at_once_as_the_section_allows() -> None:
    made = trainer(rollout={"max_num_seqs": 5, "max_new_tokens": 2}, prompts_per_step=1, responses_per_prompt=8)
    engine = made.roles.policy.engine
    assert isinstance(engine, LocalEngine)
    scheduler, _ = engine._plan(as_prompts(made.tokenizer, ["ab"]), 8, 2)
    assert scheduler._num_rows == 5


@pytest.mark.parametrize(
    ("options", "serve"),
    [
        ({"rollout": {"temperature": 0.6, "stop_token_ids": [9], "stop_strings": ["a"], "random_limit_min": 3}}, True),
        ({"rollout": {"greedy": True}}, False),
        ({"rollout": {"top_k": 5}}, True),
        ({"rollout": {"top_p": 0.9}}, True),
        ({"rollout": {"min_new_tokens": 1}}, False),
        ({"policy_loss": {"behaviour_weight": "masked"}}, False),
        ({"policy_loss": {"rejection": {"kind": "ratio", "upper": 2.0}}}, False),
    ],
)
def test_what_was_sampled_serves_as_it_is_only_where_the_policy_alone_shaped_it(options: Any, serve: bool) -> None:
    assert trainer(**options).reuses_sampled_logprobs is serve


TEMPERATURE = 0.6
RESPONSES = [
    response([7, 30, 2], to=prompt("a", token_ids=(5, 6))),
    response([9], to=prompt("b", token_ids=(8,))),
    response([44, 3], to=prompt("c", token_ids=(10, 11, 12))),
]


def tables(seed: int) -> list[list[list[float]]]:
    """Response -> token -> log softmax of the logits over the temperature, one float for each token id."""
    model, found = tiny_language_model(seed=seed), []
    for each in RESPONSES:
        asked = each.prompt.token_ids
        logits = model(torch.tensor([[*asked, *each.token_ids]])).logits[0, len(asked) - 1 : -1].double() / TEMPERATURE
        totals = [math.log(sum(math.exp(x) for x in row)) for row in logits.tolist()]
        found.append([[x - total for x in row] for row, total in zip(logits.tolist(), totals, strict=True)])
    return found


def chosen(seed: int) -> list[float]:
    return [
        row[token]
        for rows, each in zip(tables(seed), RESPONSES, strict=True)
        for row, token in zip(rows, each.token_ids, strict=True)
    ]


def two_models(**options: Any) -> Roles:
    policy, reference = (LanguageModel(tiny_language_model(seed=seed)) for seed in (1, 2))
    config = PPOConfig(rollout={"temperature": TEMPERATURE}, **options)
    value = scalar_on(policy, HeadStart.NORMAL, seed=3)
    return roles_of(config, policy, reference=reference, value=value)


def test_the_log_probs_of_policy_and_reference_are_at_the_temperature() -> None:
    made = two_models(guards={"max_mismatch": None})  # these responses have made-up log-probs
    assert made.value is not None
    assert made.policy.logprobs(RESPONSES).tolist() == pytest.approx(chosen(1), abs=1e-5)
    assert made.reference.logprobs(RESPONSES)[0].tolist() == pytest.approx(chosen(2), abs=1e-5)
    both = made.policy.logprobs_and_values(RESPONSES, made.value)
    assert both[0].tolist() == pytest.approx(chosen(1), abs=1e-5)


def test_the_kl_over_the_vocabulary_is_that_of_the_policy_from_the_reference_at_the_temperature() -> None:
    made = two_models(kl={"estimator": "full"})
    logprobs, divergence = made.reference.logprobs(RESPONSES, made.policy)
    wanted = [
        sum(math.exp(p) * (p - q) for p, q in zip(ours, theirs, strict=True))
        for one, other in zip(tables(1), tables(2), strict=True)
        for ours, theirs in zip(one, other, strict=True)
    ]
    assert divergence.tolist() == pytest.approx(wanted, abs=1e-5)
    assert logprobs.tolist() == pytest.approx(chosen(2), abs=1e-5)


def test_what_is_sampled_has_its_log_prob_at_the_temperature() -> None:
    made = trainer(rollout={"temperature": TEMPERATURE, "max_new_tokens": 5}, prompts_per_step=2)
    sampled = made.generate(["ab", "cde"])
    wanted = made.roles.policy.logprobs(sampled)
    torch.testing.assert_close(torch.cat([each.logprobs for each in sampled]), wanted, rtol=0, atol=1e-5)
