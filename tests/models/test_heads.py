"""The fused head against full logits and log_softmax, and its gradients against finite differences and autograd."""

import math

import pytest
import torch
from torch import Tensor, nn

from architectures import build_architecture
from proximo.errors import ModelError
from proximo.models.heads import OutputHead, full_divergence, token_logprobs
from proximo.records import SamplingMask

NUM_TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 11, 6, 9, 0.7
FORMS = {
    "plain": {},
    "scaled": {"logit_scale": 0.4},
    "capped": {"softcap": 2.0},
    "scaled and capped": {"logit_scale": 3.0, "softcap": 1.5},
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


TARGETS = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=torch.Generator().manual_seed(9))


def head_of(form: dict, *, bias: bool, dtype: torch.dtype = torch.float64) -> OutputHead:
    weight = drawn(VOCABULARY, WIDTH, seed=1, dtype=dtype).requires_grad_()
    return OutputHead(
        weight=weight, bias=drawn(VOCABULARY, seed=2, dtype=dtype).requires_grad_() if bias else None, **form
    )


def full_log_shares(hidden: Tensor, head: OutputHead, form: dict) -> Tensor:
    """log softmax of all logits, written out."""
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = logits * form.get("logit_scale", 1.0)
    if "softcap" in form:
        logits = form["softcap"] * torch.tanh(logits / form["softcap"])
    return (logits / TEMPERATURE).log_softmax(dim=-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_values_and_gradients_are_those_of_full_logits(form: dict, bias: bool, chunk_tokens: int):
    results = []
    for fused in (True, False):
        hidden, head = drawn(NUM_TOKENS, WIDTH).requires_grad_(), head_of(form, bias=bias)
        if fused:
            options = {"temperature": TEMPERATURE, "entropy": True, "chunk_tokens": chunk_tokens}
            found = token_logprobs(hidden, head, TARGETS, **options)
            logprobs, entropy = found.logprobs, found.entropy
        else:
            shares = full_log_shares(hidden, head, form)
            logprobs = shares.gather(1, TARGETS[:, None])[:, 0]
            entropy = -(shares.exp() * shares).sum(dim=-1)
        loss = (logprobs * drawn(NUM_TOKENS, seed=3)).sum() + (entropy * drawn(NUM_TOKENS, seed=4)).sum()
        loss.backward()
        results.append([logprobs, entropy, hidden.grad, head.weight.grad, *([head.bias.grad] if bias else [])])
    for fused, full in zip(*results, strict=True):
        torch.testing.assert_close(fused, full, rtol=1e-12, atol=1e-12)


MASK = [[t, (t + 3) % VOCABULARY] if n % 3 else [] for n, t in enumerate(TARGETS.tolist())]
"""Every third draw was from all tokens."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "kernels"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_softmax_over_what_was_drawn_from(form: dict, chunk_tokens: int, dtype: torch.dtype):
    ids = torch.tensor([token for each in MASK for token in each], dtype=torch.int32)
    mask = SamplingMask(token_ids=ids, counts=torch.tensor([len(each) for each in MASK]))
    left_out = torch.tensor([[bool(each) and v not in each for v in range(VOCABULARY)] for each in MASK])
    results = []
    for fused in (True, False):
        hidden, head = drawn(NUM_TOKENS, WIDTH, dtype=dtype).requires_grad_(), head_of(form, bias=True, dtype=dtype)
        if fused:
            options = {"entropy": True, "chunk_tokens": chunk_tokens, "sampling_mask": mask}
            found = token_logprobs(hidden, head, TARGETS, temperature=TEMPERATURE, **options)
            logprobs, entropy = found.logprobs, found.entropy
        else:
            # The log of a share that is left out is as good as -inf, and has a gradient.
            shares = full_log_shares(hidden, head, form).masked_fill(left_out, -1e4).log_softmax(dim=-1)
            logprobs = shares.gather(1, TARGETS[:, None])[:, 0]
            entropy = -(shares.exp() * shares).sum(dim=-1)
        loss = (logprobs * drawn(NUM_TOKENS, seed=3)).sum() + (entropy * drawn(NUM_TOKENS, seed=4)).sum()
        loss.backward()
        results.append([logprobs, entropy, hidden.grad, head.weight.grad, head.bias.grad])
    error = 1e-12 if dtype is torch.float64 else 1e-5
    for fused, full in zip(*results, strict=True):
        torch.testing.assert_close(fused, full, rtol=error, atol=error)


def test_the_score_function_has_no_mean_over_what_was_drawn_from():
    """The sum of p grad log p is the gradient of 1. Of the softmax over all tokens it is another vector."""
    among = [1, 4, 6]
    mask = SamplingMask(token_ids=torch.tensor(among * 3, dtype=torch.int32), counts=torch.tensor([3] * 3))
    means = []
    for given in (mask, None):
        hidden, head = drawn(1, WIDTH).requires_grad_(), head_of({}, bias=False)
        logprobs = token_logprobs(hidden.expand(3, -1), head, torch.tensor(among), sampling_mask=given).logprobs
        (logprobs.detach().exp() * logprobs).sum().backward()
        means.append(hidden.grad.abs().max().item())
    assert means[0] < 1e-15
    assert means[1] > 0.01


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_gradients_agree_with_finite_differences(form: dict):
    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        head = OutputHead(weight=weight, bias=bias, **form)
        found = token_logprobs(hidden, head, TARGETS, temperature=TEMPERATURE, entropy=True, chunk_tokens=4)
        return found.logprobs, found.entropy

    head = head_of(form, bias=True)
    assert torch.autograd.gradcheck(outputs, (drawn(NUM_TOKENS, WIDTH).requires_grad_(), head.weight, head.bias))


def test_without_entropy_none_comes_and_the_gradient_is_of_the_logprobs_alone():
    gradients = []
    for entropy in (False, True):
        hidden, head = drawn(NUM_TOKENS, WIDTH).requires_grad_(), head_of({}, bias=False)
        found = token_logprobs(hidden, head, TARGETS, temperature=TEMPERATURE, entropy=entropy, chunk_tokens=4)
        assert (found.entropy is None) is not entropy
        found.logprobs.sum().backward()
        gradients.append((hidden.grad, head.weight.grad))
    for without, with_entropy in zip(*gradients, strict=True):
        torch.testing.assert_close(without, with_entropy, rtol=1e-12, atol=1e-14)


def test_a_head_that_is_the_embedding_collects_both_gradients():
    embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
    tokens = torch.arange(NUM_TOKENS) % VOCABULARY
    token_logprobs(embedding(tokens), OutputHead(weight=embedding.weight), TARGETS).logprobs.sum().backward()
    fused = embedding.weight.grad
    embedding.weight.grad = None
    shares = (embedding(tokens) @ embedding.weight.T).log_softmax(dim=-1)
    shares.gather(1, TARGETS[:, None]).sum().backward()
    torch.testing.assert_close(fused, embedding.weight.grad, rtol=1e-12, atol=1e-12)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    head = OutputHead(weight=torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True))
    found = token_logprobs(hidden, head, torch.tensor([0, 0]), entropy=True)
    assert found.logprobs.tolist() == [0.0, -2e4]
    assert found.entropy.tolist() == [0.0, 0.0]
    (found.logprobs.sum() + found.entropy.sum()).backward()
    assert hidden.grad.isfinite().all()


def test_no_position_at_all_is_no_error():
    hidden, head = drawn(0, WIDTH).requires_grad_(), head_of({}, bias=False)
    found = token_logprobs(hidden, head, TARGETS[:0], entropy=True)
    assert found.logprobs.shape == (0,)
    found.logprobs.sum().backward()
    assert not head.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_arithmetic_is_at_least_float32_even_inside_autocast(dtype: torch.dtype):
    hidden, weight = drawn(NUM_TOKENS, WIDTH, dtype=dtype), drawn(VOCABULARY, WIDTH, seed=1, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_logprobs(hidden, OutputHead(weight=weight), TARGETS, entropy=True)
        logits = OutputHead(weight=weight).logits(hidden)
    expected = hidden.to(wide) @ weight.to(wide).T
    assert found.logprobs.dtype == logits.dtype == wide
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    shares = expected.log_softmax(dim=-1).gather(1, TARGETS[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, shares, rtol=1e-6, atol=1e-6)


def test_logits_of_all_positions_never_exist_at_once():
    num_tokens, vocabulary = 512, 4096

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else [result]:
                if isinstance(tensor, Tensor):
                    self.entries = max(self.entries, tensor.numel())
            return result

    hidden = drawn(num_tokens, 4, dtype=torch.float32).requires_grad_()
    head = OutputHead(weight=drawn(vocabulary, 4, dtype=torch.float32).requires_grad_())
    targets = torch.zeros(num_tokens, dtype=torch.long)
    with Largest() as seen:
        found = token_logprobs(hidden, head, targets, entropy=True, chunk_tokens=32)
        (found.logprobs.sum() + found.entropy.sum()).backward()
    assert seen.entries == 32 * vocabulary


def test_an_output_layer_that_is_not_linear_is_refused():
    model = build_architecture("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match="must be a linear layer without adapter, but it is Sequential"):
        OutputHead.of(model)


@pytest.mark.parametrize("chunk_tokens", [3, 100])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_full_kl_is_the_sum_over_the_vocabulary_and_so_is_its_gradient(form: dict, chunk_tokens: int):
    reference_hidden = drawn(NUM_TOKENS, WIDTH, seed=5)
    reference = OutputHead(weight=drawn(VOCABULARY, WIDTH, seed=6))
    results = []
    for fused in (True, False):
        hidden, head = drawn(NUM_TOKENS, WIDTH).requires_grad_(), head_of(form, bias=True)
        if fused:
            options = {"temperature": TEMPERATURE, "chunk_tokens": chunk_tokens}
            divergence = full_divergence(hidden, head, reference_hidden, reference, **options).kl
        else:
            shares = full_log_shares(hidden, head, form)
            others = full_log_shares(reference_hidden, reference, {})
            divergence = torch.zeros(NUM_TOKENS, dtype=torch.float64)
            for token in range(VOCABULARY):
                divergence = divergence + shares[:, token].exp() * (shares[:, token] - others[:, token])
        (divergence * drawn(NUM_TOKENS, seed=7)).sum().backward()
        results.append([divergence, hidden.grad, head.weight.grad, head.bias.grad])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


IMPOSSIBLE = torch.tensor([1, 4, 5])
"""Tokens whose logit is -inf, by their bias."""
POSSIBLE = torch.tensor([0, 2, 3, 6, 7, 8])


def two_heads(dtype: torch.dtype) -> tuple[OutputHead, OutputHead]:
    """One over the vocabulary in which some tokens are impossible, and one over the rest alone."""
    whole = head_of({}, bias=True, dtype=dtype)
    rest = OutputHead(
        weight=whole.weight.detach()[POSSIBLE].clone().requires_grad_(),
        bias=whole.bias.detach()[POSSIBLE].clone().requires_grad_(),
    )
    with torch.no_grad():
        whole.bias[IMPOSSIBLE] = -math.inf
    return whole, rest


def assert_gradients_are_those_of_the_rest(heads: tuple[OutputHead, OutputHead], hidden: list[Tensor]) -> None:
    whole, rest = heads
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(hidden[0].grad, hidden[1].grad, **tolerance)
    for ours, expected in ((whole.weight, rest.weight), (whole.bias, rest.bias)):
        assert not ours.grad[IMPOSSIBLE].any()
        torch.testing.assert_close(ours.grad[POSSIBLE], expected.grad, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_a_logit_of_minus_infinity_leaves_everything_to_the_rest(dtype: torch.dtype, scale: float):
    """In float32 by the kernels where there are any. Far gradients, too, meet no infinity."""
    heads, targets, found, states = two_heads(dtype), TARGETS % len(POSSIBLE), [], []
    for head, given in zip(heads, (POSSIBLE[targets], targets), strict=True):
        hidden = drawn(NUM_TOKENS, WIDTH, dtype=dtype).requires_grad_()
        judged = token_logprobs(hidden, head, given, temperature=TEMPERATURE, entropy=True)
        loss = (judged.logprobs * drawn(NUM_TOKENS, seed=3, dtype=dtype)).sum()
        ((loss + (judged.entropy * drawn(NUM_TOKENS, seed=4, dtype=dtype) * scale).sum()) / scale).backward()
        found.append((judged.logprobs.detach(), judged.entropy.detach()))
        states.append(hidden)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert_gradients_are_those_of_the_rest(heads, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biases", [[-math.inf] * VOCABULARY, [math.inf], [math.nan]])
def test_a_row_without_a_distribution_has_no_log_prob_and_no_entropy(dtype: torch.dtype, biases: list[float]):
    head = head_of({}, bias=True, dtype=dtype)
    with torch.no_grad():
        head.bias[: len(biases)] = torch.tensor(biases, dtype=dtype)
    found = token_logprobs(drawn(NUM_TOKENS, WIDTH, dtype=dtype), head, TARGETS, entropy=True)
    assert found.entropy.isnan().all()
    assert not found.logprobs.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_full_kl_is_over_the_tokens_that_can_come(dtype: torch.dtype):
    """Whether the reference could choose the others or not. What only the policy can choose makes it infinite."""
    reference_hidden, found, states = drawn(NUM_TOKENS, WIDTH, seed=5, dtype=dtype), [], []
    heads, references = two_heads(dtype), two_heads(dtype)
    for head, reference in zip(heads, references, strict=True):
        hidden = drawn(NUM_TOKENS, WIDTH, dtype=dtype).requires_grad_()
        divergence = full_divergence(hidden, head, reference_hidden, reference).kl
        (divergence * drawn(NUM_TOKENS, seed=7, dtype=dtype)).sum().backward()
        found.append(divergence.detach())
        states.append(hidden)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert_gradients_are_those_of_the_rest(heads, states)
    open_head = head_of({}, bias=True, dtype=dtype)
    assert full_divergence(states[0], heads[0], reference_hidden, open_head).kl.isfinite().all()
    assert full_divergence(states[0], open_head, reference_hidden, references[0]).kl.isposinf().all()


def test_the_full_kl_of_a_model_to_itself_is_zero_and_the_reference_gets_no_gradient():
    hidden, head = drawn(NUM_TOKENS, WIDTH).requires_grad_(), head_of({}, bias=False)
    reference_hidden, reference = hidden.detach().clone().requires_grad_(), head_of({}, bias=False)
    divergence = full_divergence(hidden, head, reference_hidden, reference).kl
    assert divergence.abs().max() < 1e-14
    divergence.sum().backward()
    assert reference_hidden.grad is None
    assert reference.weight.grad is None
    narrow = drawn(NUM_TOKENS, WIDTH, dtype=torch.float32)
    head = OutputHead(weight=head.weight.detach().float())
    assert not full_divergence(narrow.clone().requires_grad_(), head, narrow, head).kl.any(), (
        "both sides take the same product"
    )


def test_the_full_kl_is_refused_across_devices_and_vocabularies():
    hidden, head = drawn(2, WIDTH), head_of({}, bias=False)
    with pytest.raises(ModelError, match="on one device, not on cpu and meta"):
        full_divergence(hidden, head, hidden.to("meta"), head)
    with pytest.raises(ModelError, match="for 8 tokens, the policy for 9"):
        full_divergence(hidden, head, hidden, OutputHead(weight=head.weight[:8]))
