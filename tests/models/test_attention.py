"""Attention over packed sequences against its definition, written as a loop over queries."""

import math

import pytest
import torch
from torch import Tensor, nn

from architectures import build_architecture, random_sequences
from proximo.errors import ModelError
from proximo.models.attention.packed import (
    ATTENTION,
    AttentionOptions,
    PackedLayout,
    attending,
    layout_attention,
    no_mask,
    register_attention,
)
from proximo.models.attention.varlen import VarlenAttention
from proximo.models.backbone import checkpoint_activations
from proximo.models.packing import pack

LENGTHS = (5, 1, 7)
CASES = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scaling=0.3),
    "window": AttentionOptions(sliding_window=3),
    "window of one": AttentionOptions(sliding_window=1),
    "capped": AttentionOptions(softcap=0.5),
    "sinks": AttentionOptions(sinks=torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)),
    "everything": AttentionOptions(
        scaling=0.7,
        sliding_window=4,
        softcap=1.5,
        sinks=torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64),
    ),
}


def random_inputs(*, key_heads: int = 2, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, heads, sum(lengths), 6) for heads in (4, key_heads, key_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) * 2 for shape in shapes]


def by_definition(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """One query of one head at a time, over the keys of its own sequence that it may see."""
    groups = query.shape[1] // key.shape[1]
    scaling = options.scaling if options.scaling is not None else 1 / math.sqrt(query.shape[3])
    output = torch.zeros(1, query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype)
    start = 0
    for length in LENGTHS:
        for i in range(length):
            first = 0 if options.sliding_window is None else max(0, i - options.sliding_window + 1)
            for head in range(query.shape[1]):
                keys = key[0, head // groups, start + first : start + i + 1]
                scores = keys @ query[0, head, start + i] * scaling
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                weights = scores.exp()
                total = weights.sum()
                if options.sinks is not None:
                    total = total + options.sinks[head].exp()
                values = value[0, head // groups, start + first : start + i + 1]
                output[0, start + i, head] = (weights[:, None] * values).sum(dim=0) / total
        start += length
    return output


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_each_token_attends_to_its_own_sequence_as_the_definition_says(options: AttentionOptions, key_heads: int):
    query, key, value = random_inputs(key_heads=key_heads)
    result = PackedLayout(LENGTHS).attend(query, key, value, options)
    torch.testing.assert_close(result, by_definition(query, key, value, options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_gradients_are_those_of_the_definition(options: AttentionOptions):
    ours, theirs = ([each.requires_grad_() for each in random_inputs()] for _ in range(2))
    weights = torch.randn(1, sum(LENGTHS), 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (PackedLayout(LENGTHS).attend(*ours, options) * weights).sum().backward()
    (by_definition(*theirs, options) * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_poisoned_sequence_leaves_its_neighbours_clean(options: AttentionOptions):
    clean = PackedLayout(LENGTHS).attend(*random_inputs(), options)
    poisoned = random_inputs()
    for tensor in poisoned:
        tensor[:, :, 5:6] = math.nan
        tensor.requires_grad_()
    result = PackedLayout(LENGTHS).attend(*poisoned, options)
    kept = torch.ones(sum(LENGTHS), dtype=torch.bool)
    kept[5] = False
    assert result[:, kept].equal(clean[:, kept])
    result[:, kept].sum().backward()
    assert all(tensor.grad is not None and tensor.grad[:, :, kept].isfinite().all() for tensor in poisoned)


def test_dropout_of_weights_keeps_the_mean_and_is_off_at_zero():
    query, key, value = random_inputs()
    plain = PackedLayout(LENGTHS).attend(query, key, value, AttentionOptions())
    torch.manual_seed(0)
    dropped = [PackedLayout(LENGTHS).attend(query, key, value, AttentionOptions(dropout=0.3)) for _ in range(1000)]
    assert not dropped[0].equal(dropped[1])
    assert (torch.stack(dropped).mean(dim=0) - plain).abs().max() < 0.35


def test_a_model_called_without_layout_or_with_another_number_of_tokens_is_a_clear_error():
    model = build_architecture("llama")
    register_attention()
    model.set_attn_implementation(ATTENTION)
    with pytest.raises(ModelError, match="LlamaAttention was called without a layout"):
        model(input_ids=torch.tensor([[3, 4]]))
    with pytest.raises(ModelError, match="13 queries and 13 keys for 12 packed tokens"):
        PackedLayout((5, 7)).attend(*random_inputs(), AttentionOptions())
    assert no_mask(batch_size=1) is None
    with pytest.raises(ModelError, match="adds its own mask function"):
        no_mask(batch_size=1, use_vmap=True)


@pytest.mark.parametrize(
    ("given", "mask", "message"),
    [
        ({}, torch.zeros(1, 1, 13, 13), "makes its own attention mask or position bias"),
        ({"position_bias": torch.zeros(1)}, None, "makes its own attention mask or position bias"),
        ({"is_causal": False}, None, "both directions"),
    ],
)
def test_what_a_layout_cannot_honour_is_refused(given: dict, mask: Tensor | None, message: str):
    layout = PackedLayout(LENGTHS)
    with pytest.raises(ModelError, match=message), attending(layout):
        layout_attention(nn.Identity(), *random_inputs(), mask, **given)
    assert layout.num_calls == 0


@pytest.mark.parametrize("architecture", ["gemma2", "stablelm", "mixtral"])
def test_activation_checkpointing_gives_the_same_gradients(architecture: str):
    packed = pack(random_sequences(list(LENGTHS)))
    gradients = []
    for checkpointing in (False, True):
        model = build_architecture(architecture).train()
        register_attention()
        model.set_attn_implementation(ATTENTION)
        if checkpointing:
            checkpoint_activations(model)
        layout = PackedLayout(packed.lengths)
        with attending(layout):
            output = model(input_ids=packed.token_ids[None], position_ids=packed.position_ids[None], use_cache=False)
        output.logits.square().mean().backward()  # beyond the layout, as a trainer does it
        assert layout.num_calls == (4 if checkpointing else 2), "checkpointing runs each layer twice"
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.equal(recomputed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel needs a CUDA device")
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_varlen_kernel_agrees_with_the_loop_over_sequences(window: int | None, key_heads: int):
    options = AttentionOptions(scaling=0.3, sliding_window=window)
    results = []
    for dtype, device in ((torch.bfloat16, "cuda"), (torch.float64, "cpu")):
        generator = torch.Generator().manual_seed(5)
        inputs = [torch.randn(1, n, sum(LENGTHS), 16, generator=generator) for n in (4, key_heads, key_heads)]
        inputs = [each.to(torch.bfloat16).to(device, dtype).requires_grad_() for each in inputs]
        assert VarlenAttention(LENGTHS).fits(*inputs, options) is (device == "cuda")
        output = PackedLayout(LENGTHS, VarlenAttention).attend(*inputs, options)
        output.square().sum().backward()
        results.append([output, *(each.grad for each in inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double().cpu(), expected, rtol=0.05, atol=0.05)
