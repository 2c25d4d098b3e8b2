"""The gradients of the production functions against those of the definition, on a language model small enough to list.

Three tokens, one of them EOS, at most three of them: 15 responses over 7 states. Every expectation is a sum over all
responses weighted by their probability, so nothing here is an estimate, and 1e-10 is a tolerance for rounding only.
gamma = lambda = 1, no standardising, and the policy is the one that sampled: the first minibatch of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from proximo.algorithms.advantages import gae, prefix_deltas, returns_to_go, shape_rewards
from proximo.algorithms.kl import absolute, full_kl, k1, k2, k3, weighted_k3
from proximo.algorithms.losses import clipped_value_loss
from proximo.algorithms.masking import broadcast_to_tokens, segment_sum, sum_per_token, value_positions
from proximo.algorithms.objectives import TokenLosses, cispo, gspo, ppo, sapo

EOS, NUM_TOKENS, MAX_TOKENS = 2, 3, 3
BETA = 0.7
PREFIXES = [prefix for n in range(MAX_TOKENS) for prefix in product((0, 1), repeat=n)]
RESPONSES = [(*prefix, EOS) for prefix in PREFIXES] + list(product((0, 1), repeat=MAX_TOKENS))
LENGTHS = [len(response) for response in RESPONSES]
STATES = torch.tensor([PREFIXES.index(response[:t]) for response in RESPONSES for t in range(len(response))])
TOKENS = torch.tensor([token for response in RESPONSES for token in response])
EVERYTHING = torch.ones(len(TOKENS), dtype=torch.bool)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Network:
    """Logits of every state from its fixed features, through weights that all states share."""

    hidden: Tensor
    output: Tensor

    @classmethod
    def random(cls, seed: int) -> "Network":
        return cls(random(4, 5, seed=seed).requires_grad_(), random(5, NUM_TOKENS, seed=seed + 1).requires_grad_())

    def logits(self) -> Tensor:
        """[states, tokens]"""
        return torch.tanh(random(len(PREFIXES), 4, seed=0) @ self.hidden) @ self.output

    def token_logprobs(self) -> Tensor:
        """[T] over all responses, end to end."""
        return self.logits().log_softmax(-1)[STATES, TOKENS]

    def gradient(self, scalar: Tensor) -> Tensor:
        parts = torch.autograd.grad(scalar, (self.hidden, self.output), retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])


POLICY, REFERENCE, OTHER_POLICY = Network.random(1), Network.random(3), Network.random(5)
SCORES = random(len(RESPONSES), seed=7)


# The definition, written out response by response and state by state, without the production functions.


def sequence_logprob(network: Network, response: tuple[int, ...]) -> Tensor:
    table = network.logits().log_softmax(-1)
    return sum((table[PREFIXES.index(response[:t]), token] for t, token in enumerate(response)), torch.zeros(()))


def exact_objective(beta: float) -> Tensor:
    """E[score] - beta KL(policy || reference), both of whole responses."""
    total = torch.zeros((), dtype=torch.float64)
    for response, score in zip(RESPONSES, SCORES, strict=True):
        logprob = sequence_logprob(POLICY, response)
        log_ratio = logprob - sequence_logprob(REFERENCE, response).detach()
        total = total + logprob.exp() * (score - beta * log_ratio)
    return total


def visits(network: Network) -> Tensor:
    """[states]: how often a response passes through each state."""
    table = network.logits().softmax(-1)
    chances = []
    for prefix in PREFIXES:
        steps = [table[PREFIXES.index(prefix[:t]), token] for t, token in enumerate(prefix)]
        chances.append(torch.stack([torch.ones((), dtype=torch.float64), *steps]).prod())
    return torch.stack(chances)


def state_kl(of: Network, other: Network) -> Tensor:
    """[states]: KL(of || other) at each state."""
    p, q = of.logits().softmax(-1), other.logits().softmax(-1)
    return (p * (p / q).log()).sum(-1)


def kl_at_visited_states() -> Tensor:
    """The KL at each state, in the share in which states are visited now; which are visited is not differentiated."""
    return (visits(POLICY).detach() * state_kl(POLICY, REFERENCE)).sum()


# The production side: per-token losses, expected over all responses.


def expected(per_token: Tensor, sampler: Network = POLICY) -> Tensor:
    chances = torch.stack([sequence_logprob(sampler, response).exp().detach() for response in RESPONSES])
    return sum_per_token(broadcast_to_tokens(chances, LENGTHS) * per_token, EVERYTHING, denominator=1)


def arbitrary_values() -> Tensor:
    """[T + R] a baseline that knows the state and nothing else, and noise after the last token."""
    values = random(len(TOKENS) + len(RESPONSES), seed=11)
    values[value_positions(LENGTHS)] = random(len(PREFIXES), seed=13)[STATES]
    return values


def expected_policy_loss(kl_per_token: Tensor, *, beta: float) -> Tensor:
    rewards = shape_rewards(kl_per_token.detach(), SCORES, EVERYTHING, LENGTHS, kl_coefficient=beta)
    no_future = torch.zeros(len(RESPONSES), dtype=torch.bool)
    advantages, _ = gae(rewards, arbitrary_values(), EVERYTHING, LENGTHS, bootstrap=no_future, gamma=1.0, lam=1.0)
    logprobs = POLICY.token_logprobs()
    return expected(ppo(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2).loss)


def whole_response(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    return gspo(logprobs, old_logprobs, advantages, EVERYTHING, LENGTHS, clip_low=0.2, clip_high=0.2)


def weight_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    return cispo(logprobs, old_logprobs, advantages, clip_low=1.0, clip_high=0.2)


def soft_gate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    return sapo(logprobs, old_logprobs, advantages, gate_positive=1.0, gate_negative=3.0)


def kl_of_tokens(estimator: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return estimator(POLICY.token_logprobs(), REFERENCE.token_logprobs().detach())


def full_kl_of_tokens() -> Tensor:
    return full_kl(POLICY.logits()[STATES], REFERENCE.logits()[STATES].detach())


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert wanted.abs().max() > 1e-2, "the test would hold for a gradient of nothing"
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def assert_far(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() > 0.05 * wanted.norm()


def test_the_listed_responses_are_all_there_are():
    assert (len(PREFIXES), len(RESPONSES), len(set(RESPONSES))) == (7, 15, 15)
    total = torch.stack([sequence_logprob(POLICY, response).exp() for response in RESPONSES]).sum()
    assert total.item() == pytest.approx(1, abs=1e-14)


def test_without_kl_the_policy_gradient_is_that_of_the_expected_score():
    loss = expected_policy_loss(torch.zeros(len(TOKENS), dtype=torch.float64), beta=0.0)
    assert_same(-POLICY.gradient(loss), POLICY.gradient(exact_objective(0.0)))


def test_a_score_given_out_as_what_each_token_adds_to_it_has_the_same_gradient():
    """Whatever prompt and prefixes are worth: the last one is worth the score. No critic, which would hide it."""
    worth = {prefix: float(value) for prefix, value in zip(PREFIXES, random(len(PREFIXES), seed=17), strict=True)}
    scores = dict(zip(RESPONSES, SCORES.tolist(), strict=True))
    ends = [response[:t] for response in RESPONSES for t in range(len(response) + 1)]
    prefix_scores = torch.tensor([scores.get(end) or worth[end] for end in ends], dtype=torch.float64)
    earned = prefix_deltas(prefix_scores, LENGTHS)
    no_kl = torch.zeros(len(TOKENS), dtype=torch.float64)
    total = segment_sum(earned, LENGTHS)
    torch.testing.assert_close(total, SCORES - worth[()])
    rewards = shape_rewards(no_kl, total, EVERYTHING, LENGTHS, kl_coefficient=0.0, token_rewards=earned)
    assert (rewards - shape_rewards(no_kl, SCORES, EVERYTHING, LENGTHS, kl_coefficient=0.0)).abs().max() > 0.1
    logprobs = POLICY.token_logprobs()
    advantages = returns_to_go(rewards, EVERYTHING, LENGTHS, gamma=1.0)
    loss = expected(ppo(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2).loss)
    assert_same(-POLICY.gradient(loss), POLICY.gradient(exact_objective(0.0)))
    short_sighted = returns_to_go(rewards, EVERYTHING, LENGTHS, gamma=0.5)
    loss = expected(ppo(logprobs, logprobs.detach(), short_sighted, clip_low=0.2, clip_high=0.2).loss)
    assert_far(-POLICY.gradient(loss), POLICY.gradient(exact_objective(0.0)))


@pytest.mark.parametrize("objective", [whole_response, weight_clip, soft_gate])
def test_before_any_update_the_other_objectives_have_the_gradient_of_the_expected_score_too(objective):
    """With the score of a response as the advantage of all its tokens, which needs no critic."""
    logprobs = POLICY.token_logprobs()
    losses = objective(logprobs, logprobs.detach(), broadcast_to_tokens(SCORES, LENGTHS)).loss
    assert_same(-POLICY.gradient(expected(losses)), POLICY.gradient(exact_objective(0.0)))


def test_k1_in_the_reward_gives_the_gradient_of_score_minus_sequence_kl():
    loss = expected_policy_loss(kl_of_tokens(k1), beta=BETA)
    assert_same(-POLICY.gradient(loss), POLICY.gradient(exact_objective(BETA)))


def test_full_kl_in_the_reward_and_in_the_loss_gives_the_gradient_of_score_minus_sequence_kl():
    loss = expected_policy_loss(full_kl_of_tokens(), beta=BETA) + BETA * expected(full_kl_of_tokens())
    assert_same(-POLICY.gradient(loss), POLICY.gradient(exact_objective(BETA)))


def test_full_kl_in_the_reward_alone_moves_only_which_states_are_visited():
    with_kl = expected_policy_loss(full_kl_of_tokens(), beta=BETA)
    through_visits = (visits(POLICY) * state_kl(POLICY, REFERENCE).detach()).sum()
    exact_part = POLICY.gradient(exact_objective(0.0)) - BETA * POLICY.gradient(through_visits)
    assert_same(-POLICY.gradient(with_kl), exact_part)
    assert_far(-POLICY.gradient(with_kl), POLICY.gradient(exact_objective(BETA)))


@pytest.mark.parametrize("estimator", [k2, k3, absolute])
def test_other_measures_in_the_reward_are_biased(estimator):
    loss = expected_policy_loss(kl_of_tokens(estimator), beta=BETA)
    assert_far(-POLICY.gradient(loss), POLICY.gradient(exact_objective(BETA)))


def test_k2_in_the_loss_gives_the_gradient_at_the_visited_states():
    assert_same(POLICY.gradient(expected(kl_of_tokens(k2))), POLICY.gradient(kl_at_visited_states()))


def test_weighted_k3_in_the_loss_gives_the_gradient_at_the_visited_states():
    logprobs, reference_logprobs = POLICY.token_logprobs(), REFERENCE.token_logprobs().detach()
    loss = expected(weighted_k3(logprobs, logprobs.detach(), reference_logprobs))
    assert_same(POLICY.gradient(loss), POLICY.gradient(kl_at_visited_states()))


def test_full_kl_in_the_loss_gives_the_gradient_at_the_visited_states():
    assert_same(POLICY.gradient(expected(full_kl_of_tokens())), POLICY.gradient(kl_at_visited_states()))


def test_weighted_k3_stays_exact_when_another_policy_sampled():
    old_logprobs = OTHER_POLICY.token_logprobs().detach()
    loss = expected(
        weighted_k3(POLICY.token_logprobs(), old_logprobs, REFERENCE.token_logprobs().detach()), OTHER_POLICY
    )
    wanted = (visits(OTHER_POLICY).detach() * state_kl(POLICY, REFERENCE)).sum()
    assert_same(POLICY.gradient(loss), POLICY.gradient(wanted))
    assert_far(POLICY.gradient(expected(kl_of_tokens(k2), OTHER_POLICY)), POLICY.gradient(wanted))


def test_k1_in_the_loss_has_no_gradient_at_all():
    gradient = POLICY.gradient(expected(kl_of_tokens(k1)))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-10)


def test_plain_k3_in_the_loss_is_the_gradient_of_the_opposite_kl():
    gradient = POLICY.gradient(expected(kl_of_tokens(k3)))
    opposite = (visits(POLICY).detach() * state_kl(REFERENCE, POLICY)).sum()
    assert_same(gradient, POLICY.gradient(opposite))
    assert_far(gradient, POLICY.gradient(kl_at_visited_states()))


@pytest.mark.parametrize("estimator", [k1, k3])
def test_the_unbiased_estimators_have_the_mean_of_the_sequence_kl(estimator):
    exact_kl = exact_objective(0.0) - exact_objective(1.0)
    torch.testing.assert_close(expected(kl_of_tokens(estimator)), exact_kl, rtol=0, atol=1e-12)
    torch.testing.assert_close(expected(full_kl_of_tokens()), exact_kl, rtol=0, atol=1e-12)


def test_the_value_loss_rests_at_the_expected_return_of_each_state():
    chances = torch.stack([sequence_logprob(POLICY, response).exp().detach() for response in RESPONSES])
    members = torch.tensor([[response[: len(prefix)] == prefix for response in RESPONSES] for prefix in PREFIXES])
    table = ((members * chances * SCORES).sum(1) / (members * chances).sum(1)).requires_grad_()
    rewards = shape_rewards(torch.zeros_like(SCORES[STATES]), SCORES, EVERYTHING, LENGTHS, kl_coefficient=0.0)
    no_future = torch.zeros(len(RESPONSES), dtype=torch.bool)
    _, returns = gae(rewards, arbitrary_values(), EVERYTHING, LENGTHS, bootstrap=no_future, gamma=1.0, lam=1.0)

    loss = expected(clipped_value_loss(table[STATES], table[STATES].detach(), returns, clip=0.2))
    (gradient,) = torch.autograd.grad(loss, table)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-10)
