"""KL per token: properties of the estimators, and their behaviour far out."""

import pytest
import torch

from proximo.algorithms.kl import absolute, bounded_exp, clamped, full_kl, k1, k2, k3, weighted_k3

GENERATOR = torch.Generator().manual_seed(0)
LOGITS, REFERENCE_LOGITS = torch.randn(2, 3, 5, generator=GENERATOR, dtype=torch.float64)


def test_equal_models_have_no_kl_and_only_k1_has_a_sign():
    logprobs = torch.tensor([-0.1, -3.0, -30.0])
    differences = torch.linspace(-25, 25, 1001, dtype=torch.float64)
    for estimator in (k1, k2, k3, absolute):
        assert estimator(logprobs, logprobs).tolist() == [0, 0, 0]
        assert (estimator(differences, torch.zeros_like(differences)) >= 0).all() == (estimator is not k1)
    assert k1(torch.tensor(-1.0), torch.tensor(-2.0)) == 1, "positive where the policy likes the token more"
    assert k3(torch.tensor([1e-4]), torch.zeros(1)).item() == pytest.approx(0.5e-8, rel=1e-3), "exact in float32"


def test_full_kl_agrees_with_torch_distributions():
    from torch.distributions import Categorical, kl_divergence

    wanted = kl_divergence(Categorical(logits=LOGITS), Categorical(logits=REFERENCE_LOGITS))
    torch.testing.assert_close(full_kl(LOGITS, REFERENCE_LOGITS), wanted, rtol=0, atol=1e-12)


def test_full_kl_leaves_out_what_the_policy_cannot_choose():
    logits = LOGITS.clone().requires_grad_()
    masked = logits.index_fill(-1, torch.tensor([0, 3]), -torch.inf)
    for reference in (REFERENCE_LOGITS, REFERENCE_LOGITS.index_fill(-1, torch.tensor([0]), -torch.inf)):
        found = full_kl(masked, reference)
        others = reference.log_softmax(-1)[..., [1, 2, 4]]
        shares = logits[..., [1, 2, 4]].log_softmax(-1)
        torch.testing.assert_close(found, (shares.exp() * (shares - others)).sum(-1))
        (gradient,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        assert gradient.isfinite().all()
        assert not gradient[..., [0, 3]].any()
    assert full_kl(logits, masked.detach()).isposinf().all()
    assert full_kl(torch.full_like(LOGITS, -torch.inf), REFERENCE_LOGITS).isnan().all()


def test_full_kl_of_half_precision_logits_is_computed_in_float32():
    half = full_kl(LOGITS.bfloat16(), REFERENCE_LOGITS.bfloat16())
    assert half.dtype is torch.float32
    torch.testing.assert_close(half, full_kl(LOGITS.bfloat16().float(), REFERENCE_LOGITS.bfloat16().float()))
    assert full_kl(LOGITS, REFERENCE_LOGITS).dtype is torch.float64


def test_weighted_k3_is_k3_times_the_ratio():
    logprobs, old_logprobs, reference_logprobs = torch.tensor([[-1.0], [-1.5], [-0.5]], dtype=torch.float64)
    ratio, difference = 2.718281828459045**0.5, -0.5
    wanted = ratio * (2.718281828459045**-difference - 1 + difference)
    assert weighted_k3(logprobs, old_logprobs, reference_logprobs).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_far_out_everything_stays_finite_with_its_gradient(log_ratio):
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    zeros = torch.zeros(1)
    for value in (bounded_exp(logprobs), k3(logprobs, zeros), weighted_k3(logprobs, zeros, zeros)):
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        assert value.isfinite().all()
        assert gradient.isfinite().all()


def test_the_kl_of_a_token_is_cut_on_both_sides_and_has_no_gradient_beyond():
    per_token = torch.tensor([0.5, 7.0, -9.0], requires_grad=True)
    assert clamped(per_token, None) is per_token
    found = clamped(per_token, 2.0)
    assert found.tolist() == [0.5, 2.0, -2.0]
    assert torch.autograd.grad(found.sum(), per_token)[0].tolist() == [1, 0, 0]
