"""What the decoding kernel promises beyond the right numbers: bits that nothing else in the batch can move."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from architectures import build_architecture, random_sequences
from proximo.errors import ModelError
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.models.precision.products import linear
from proximo.models.probe import probe_language_model
from proximo_cpu import decode_call, decoder
from proximo_cpu.decoder import KernelDecoder
from proximo_cpu.library import library
from proximo_cpu.model_reader import LayerParts
from proximo_cpu.row_kernels import row_kernels_for

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@torch.inference_mode()
def last_states(model: LanguageModel, rows: list[int], *, num_threads: int = 1) -> dict[int, Tensor]:
    """Of some of nine prompts, after six more tokens each."""
    sequences = random_sequences([7, 2, 4, 9, 1, 3, 8, 5, 6])
    packed = [pack([sequences[row]]) for row in rows]
    cache = RowCache(num_rows=len(rows), initial_tokens=16, max_tokens=40)
    for i, each in enumerate(packed):
        captured = PromptCache(each.lengths)
        model.prefill(each, captured)
        cache.place(captured, 0, [i])
    decoder = model.decoder()
    torch.set_num_threads(num_threads)
    for i in range(6):
        layout = cache.advance(len(rows))
        hidden = decoder(torch.tensor([(5 * row + i) % 61 for row in rows]), layout.positions, cache, layout)
    return dict(zip(rows, hidden, strict=True))


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "gemma2", "gpt2", "olmo2"])
def test_the_bits_of_a_row_depend_on_neither_its_neighbours_nor_the_threads(name: str) -> None:
    model = LanguageModel(build_architecture(name))
    together = last_states(model, list(range(9)))
    for other in (
        last_states(model, [3]),
        last_states(model, [8, 3]),
        last_states(model, list(range(9)), num_threads=3),
    ):
        assert all(torch.equal(state, together[row]) for row, state in other.items())


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gpt2"])
@torch.inference_mode()
def test_tokens_read_at_once_are_the_bits_of_one_after_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the tokens of a pass, and some attend to what others store. A pass may be cut into calls."""
    model = LanguageModel(build_architecture(name))
    sequences = random_sequences([40, 25, 33])
    packed = pack([sequence[:1] for sequence in sequences])
    captured = PromptCache(packed.lengths)
    model.prefill(packed, captured)

    def states_of(counts: list[list[int]]) -> list[list[Tensor]]:
        """Of the tokens of each sequence. `counts`: of the tokens that the rows read in each pass."""
        cache = RowCache(num_rows=3, initial_tokens=8, max_tokens=40)
        for row in range(3):
            cache.place(captured, row, [row])
        found: list[list[Tensor]] = [[], [], []]
        decode = model.decoder()
        for each in counts:
            rows = [row for row, count in enumerate(each) if count]
            ids = [token for row in rows for token in sequences[row][cache.lengths[row] :][: each[row]]]
            layout = cache.extend(rows, [each[row] for row in rows])
            hidden = decode(torch.tensor(ids), layout.positions, cache, layout)
            for row, states in zip(rows, hidden.split([each[row] for row in rows]), strict=True):
                found[row] += states
        return found

    expected = states_of([[1, 1, 1]] * 24 + [[1, 0, 1]] * 8 + [[1, 0, 0]] * 7)
    torch.set_num_threads(3)
    for at_once in (128, 7):
        monkeypatch.setattr(decoder, "_AT_ONCE", at_once)
        for counts in ([[39, 24, 32]], [[3, 20, 0], [30, 4, 31], [6, 0, 1]]):
            for ours, theirs in zip(states_of(counts), expected, strict=True):
                assert torch.stack(ours).equal(torch.stack(theirs))


def test_the_kernel_is_what_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = decode_call.decode
    monkeypatch.setattr(decode_call, "decode", lambda *given, **more: (calls.append(1), plain(*given, **more)))
    last_states(LanguageModel(build_architecture("llama")), [0, 1])
    assert len(calls) == 6


def test_the_probe_holds_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KernelDecoder._layer

    def wrongly_scaled(decoder: KernelDecoder, layer: LayerParts) -> decode_call.LayerPointers:
        found = plain(decoder, layer)
        found.scaling *= 1.01
        return found

    monkeypatch.setattr(KernelDecoder, "_layer", wrongly_scaled)
    with pytest.raises(ModelError, match="hidden states decoded with a cache differ by"):
        probe_language_model(LanguageModel(build_architecture("llama")))


@torch.inference_mode()
def test_a_number_that_is_none_stays_none() -> None:
    for where in ("q_proj", "v_proj", "gate_proj"):
        model = LanguageModel(build_architecture("llama"))
        weights = {name: each for name, each in model.backbone.layers.named_parameters() if where in name}
        next(iter(weights.values())).view(-1)[0] = float("nan")
        assert all(state.isnan().all() for state in last_states(model, [0, 1]).values()), where


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (2, 7, 3), (3, 16, 8), (5, 45, 61), (64, 800, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_a_product_of_few_rows(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=random) for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    found = linear(x, weight, bias if has_bias else None)
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    assert (found - expected).abs().max() <= 4e-6 * inputs**0.5
    for num_threads in (2, 5):
        torch.set_num_threads(num_threads)
        assert torch.equal(linear(x, weight, bias if has_bias else None), found)
    assert torch.equal(linear(x[:1].clone(), weight, bias if has_bias else None), found[:1])


def test_products_outside_of_inference_are_torchs() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    linear(torch.ones(2, 4), weight, None).sum().backward()
    assert weight.grad is not None
    kernels = row_kernels_for(torch.ones(2, 4))
    assert kernels is not None
    with torch.no_grad():
        assert kernels.linear(torch.ones(2, 4), weight, None) is None
    with torch.inference_mode():
        assert kernels.linear(torch.ones(2, 4), weight, None) is not None


@torch.inference_mode()
def test_what_does_not_fit_is_torchs_to_refuse() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.ones(2, 64), torch.ones(3, 32), None)
    with pytest.raises(RuntimeError):
        linear(torch.ones(2, 4, dtype=torch.float64), torch.ones(3, 4), None)
    assert linear(torch.ones(2, 0), torch.ones(3, 0), None).tolist() == [[0.0] * 3] * 2
    bias = torch.ones(3, 2)[:, 0]
    assert linear(torch.ones(2, 4), torch.ones(3, 4), bias).tolist() == [[5.0] * 3] * 2


def test_other_default_types_change_nothing() -> None:
    model = LanguageModel(build_architecture("llama"))
    before = last_states(model, [0, 1])
    torch.set_default_dtype(torch.float64)
    try:
        after = last_states(model, [0, 1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(before[row], after[row]) for row in before)


def test_what_a_hook_on_the_embeddings_keeps_stays_as_it_was() -> None:
    model, kept = LanguageModel(build_architecture("llama")), []
    embeddings = model.backbone.layers.get_input_embeddings()
    embeddings.register_forward_hook(lambda *given: kept.append((given[2], given[2].clone())))
    last_states(model, [0, 1])
    assert len(kept) > 6
    assert all(torch.equal(each, copy) for each, copy in kept)


@pytest.mark.parametrize("indices", [(0, 0), (1, 0)])
def test_layers_that_are_not_numbered_in_order_decode_as_modules(
    indices: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_call, "decode", None)
    model = LanguageModel(build_architecture("llama"))
    for layer, index in zip(model.backbone.layers.get_submodule("layers").children(), indices, strict=True):
        layer.self_attn.layer_idx = index
    if indices == (1, 0):
        last_states(model, [0, 1])
    assert model.decoder() == model.backbone.decode
