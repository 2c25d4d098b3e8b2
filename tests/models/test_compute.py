"""bf16: which types reach attention and the cache, what is cast and how often, and whose gradient it is."""

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from architectures import build_architecture, random_sequences
from builders import run_through_modules, tiny_language_model, tiny_tokenizer
from dtype_traces import DtypeTrace
from proximo.distributed.world import World
from proximo.learner.update import stepping_in_backward
from proximo.models.attention import varlen
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.attention.packed import AttentionLayout, AttentionOptions, PackedLayout
from proximo.models.attention.varlen import VarlenAttention
from proximo.models.fast_path import paths
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision import compute
from proximo.models.precision.compute import Compute, Products, casting
from proximo.models.precision.placement import Precision
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "mixtral"]
LENGTHS = (7, 5, 9)


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run as on an accelerator, through the modules: `test_fused_half.py` is about those of a CPU."""
    run_through_modules(monkeypatch)


def half(name: str = "llama") -> LanguageModel:
    return LanguageModel(build_architecture(name), precision=Precision.BF16)


def batch(num: int = 3) -> PackedResponses:
    """Prompts of one token share nothing."""
    sequences = random_sequences(list(LENGTHS[:num]))
    return pack_responses([each[:1] for each in sequences], [each[1:] for each in sequences])


def gradients(model: LanguageModel, *batches: PackedResponses) -> list[Tensor]:
    model.model.zero_grad()
    for each in batches:
        model.response_logprobs(each).logprobs.square().sum().backward()
    return [parameter.grad.clone() for _, parameter in model.trainable_parameters()]


class Recorded:
    """The layouts of all passes, in whose place it stands, and what they were handed."""

    def __init__(self, patch: pytest.MonkeyPatch, *kinds: type[AttentionLayout]) -> None:
        self.types: set[tuple[torch.dtype, ...]] = set()
        for kind in kinds:
            plain = kind.attend

            def attend(layout: AttentionLayout, *given: Any, plain: Any = plain) -> Tensor:
                self.types.add(tuple(each.dtype for each in given[:3]))
                return plain(layout, *given)

            patch.setattr(kind, "attend", attend)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_is_handed_one_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions are float32 and would make queries and keys so."""
    recorded = Recorded(monkeypatch, PackedLayout)
    gradients(half(name), batch())
    assert recorded.types == {(torch.bfloat16,) * 3}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_the_cache_keeps_keys_and_values_in_the_compute_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[RowCache] = []
    plain = RowCache.passes
    monkeypatch.setattr(RowCache, "passes", lambda cache, *given: (kept.append(cache), plain(cache, *given))[1])
    recorded = Recorded(monkeypatch, PackedLayout, type(_layout_of_rows()))
    prompts = [Prompt(id=str(n), token_ids=tuple(tokens)) for n, tokens in enumerate(random_sequences([4, 6]))]
    LocalEngine(half(name), tiny_tokenizer(), eos_token_ids=[]).generate(
        prompts, num_samples=2, options=SamplingOptions(max_new_tokens=3), key=RandomKey(seed=0, purpose="test")
    )
    assert recorded.types == {(torch.bfloat16,) * 3}
    assert {each.dtype for pair in kept[-1]._storage.values() for each in pair} == {torch.bfloat16}


def _layout_of_rows() -> AttentionLayout:
    cache = RowCache(num_rows=1, initial_tokens=4, max_tokens=4)
    prompts = PromptCache([2])
    prompts.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), 0)
    cache.place(prompts, 0, [0])
    return cache.advance(1)


def test_one_kernel_for_all_sequences_is_taken_in_training_and_given_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's: it does by the definition what that one does, and looks at what it is handed."""
    calls: list[tuple[torch.dtype, ...]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: object, **given: object) -> Tensor:
        calls.append((query.dtype, key.dtype, value.dtype, bounds.dtype))
        assert query.shape[0] == sum(LENGTHS)
        heads = (each.transpose(0, 1)[None] for each in (query, key, value))
        layout = PackedLayout(bounds.diff().tolist())
        return layout.attend(*heads, AttentionOptions(scaling=given["scale"]))[0]

    model = half()
    expected = gradients(model, batch())
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: kernel)
    monkeypatch.setattr(VarlenAttention, "fits", lambda _, query, *__: query.dtype is torch.bfloat16)
    as_modules = replace(paths()["cuda", Precision.BF16], layers=None, decoder=None)
    monkeypatch.setitem(paths(), ("cpu", Precision.BF16), as_modules)
    found = gradients(model, batch())
    assert calls == [(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)] * 2
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_activation_and_no_weight_is_cast_twice_in_a_pass(name: str) -> None:
    model, packed = half(name), batch().packed
    with DtypeTrace() as trace, torch.no_grad():
        model.hidden_states(packed)
    assert trace.cast_twice == []
    assert trace.narrowed > 0


def test_weights_are_cast_once_for_all_passes_of_an_update() -> None:
    model = half()
    matrices = {
        each.shape for layer in model.base.modules() if isinstance(layer, nn.Linear) for each in (layer.weight,)
    }
    counts = []
    for num_batches in (1, 3):
        with DtypeTrace() as trace, casting():
            gradients(model, *[batch()] * num_batches)
        assert not matrices.intersection(trace.cast_twice)
        counts.append(sum(count for key, count in trace.casts.items() if key[2] in matrices and key[-1] == "bf16"))
    assert counts[0] == counts[1] == 2 * 7 + 1  # and the output layer's


def test_gradients_of_all_micro_batches_are_added_up_in_float32() -> None:
    """Each is rounded to bf16 where it is made, and their sum is not."""
    model = half()
    apart = [sum(each) for each in zip(gradients(model, batch(1)), gradients(model, batch()), strict=True)]
    with casting():
        together = gradients(model, batch(1), batch())
    assert {each.dtype for each in together} == {torch.float32}
    assert all(a.equal(b) for a, b in zip(together, apart, strict=True))


def test_a_pass_without_gradients_leaves_the_next_one_its_gradient() -> None:
    model = half()
    expected = gradients(model, batch())
    with casting():
        with torch.no_grad():
            model.hidden_states(batch().packed)
        assert all(a.equal(b) for a, b in zip(gradients(model, batch()), expected, strict=True))


def test_the_next_update_casts_the_weights_as_they_are_then() -> None:
    model = half()
    for _ in range(2):
        with casting(), torch.no_grad():
            before = model.hidden_states(batch().packed)
        with torch.no_grad():
            for _, parameter in model.trainable_parameters():
                parameter.data.add_(0.1)  # as some optimizers write, unseen by autograd
        with casting(), torch.no_grad():
            assert not model.hidden_states(batch().packed).equal(before)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapter"])
def test_layers_that_run_again_have_the_same_bits_and_cast_no_weight_again(adapted: bool) -> None:
    model = half()
    if adapted:
        model = model.with_adapter(LoRAOptions(rank=2, seed=1))
    model.model.train()
    expected = gradients(model, batch())
    model.use_activation_checkpointing()
    with casting():
        found = gradients(model, batch())
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    with DtypeTrace() as trace, casting():
        gradients(model, batch())
    weights = {tuple(each.shape) for each in model.model.parameters() if each.dim() == 2}
    assert not weights.intersection(trace.cast_twice)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "recomputed"])
def test_weights_that_step_in_the_backward_pass_move_as_they_would_after_it(name: str, checkpointed: bool) -> None:
    after, within = half(name), half(name)
    for model in (after, within):
        optimizer = torch.optim.SGD(model.model.parameters(), lr=0.1)
        model.model.train()
        torch.manual_seed(0)  # GPT-2 has dropout
        if checkpointed:
            model.use_activation_checkpointing()
        if model is after:
            gradients(model, batch())
            optimizer.step()
            continue
        early = stepping_in_backward(optimizer, dict(model.model.named_parameters()), World())
        with casting(frees=True), early:
            model.response_logprobs(batch()).logprobs.square().sum().backward()
    pairs = zip(after.model.parameters(), within.model.parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)


def copies(model: LanguageModel) -> list[Tensor]:
    """The bf16 tensors of this process that are as large as a matrix of the model, also those of other tests."""
    shapes = {frozenset(each.shape) for each in model.model.parameters() if each.dim() == 2}
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    return [each for each in tensors if each.dtype is torch.bfloat16 and frozenset(each.shape) in shapes]


@pytest.mark.parametrize("frees", [False, True], ids=["kept", "freed"])
def test_between_forward_and_backward_pass_there_is_no_copy_of_a_weight(frees: bool) -> None:
    model = half()
    before = copies(model)
    with casting(frees=frees):
        total = model.response_logprobs(batch()).logprobs.sum()
        assert all(any(each is one for one in before) for each in copies(model)) is frees
        total.backward()


def test_a_weight_that_changes_before_its_backward_pass_is_an_error() -> None:
    model = half()
    with casting(frees=True):
        total = model.response_logprobs(batch()).logprobs.sum()
        with torch.no_grad():
            next(iter(model.base.model.layers)).mlp.up_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="a weight stepped too early"):
            total.backward()


def test_nothing_stays_with_the_model() -> None:
    """Its modules are transformers' own again after a pass, also after one that failed."""
    model = half()
    untouched = copy.deepcopy(model.base)

    def forwards(of: nn.Module) -> Iterator[bool]:
        return ("forward" in module.__dict__ for module in of.modules())

    gradients(model, batch())
    broken = model.base.get_submodule("model.layers.1.mlp").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients(model, batch())
    broken.remove()
    assert not any(forwards(model.base))
    assert model.base.state_dict().keys() == untouched.state_dict().keys()


def test_a_forward_of_somebody_elses_stays_in_its_place() -> None:
    model = half()
    layer = model.base.get_submodule("model.layers.0.self_attn.q_proj")
    calls: list[torch.dtype] = []
    plain = layer.forward
    layer.forward = lambda given: (calls.append(given.dtype), plain(given))[1]
    gradients(model, batch())
    assert calls == [torch.float32]
    assert "forward" in layer.__dict__


def test_what_is_float64_stays_so() -> None:
    model = LanguageModel(tiny_language_model(dtype=torch.float64), precision=Precision.BF16)
    with torch.no_grad():
        assert model.hidden_states(batch().packed).dtype == torch.float64


def test_a_cast_that_two_products_read_is_made_once_and_let_go() -> None:
    compute, given = Compute(torch.bfloat16, Products(nn.Identity())), torch.randn(3)
    first = compute.narrow(given)
    assert first.dtype is torch.bfloat16
    assert compute.narrow(given) is first
    assert compute.narrow(given.clone()) is not first
    compute.forget()
    assert compute.narrow(given) is not first


def test_a_later_backward_pass_lets_go_of_each_gradient_before_it_goes_on() -> None:
    """What is cast once serves all passes of an update, but no gradient of a copy waits for the end of a pass."""
    model = half()
    layers = list(model.base.model.layers)
    order: list[str] = []
    for index, layer in enumerate(layers):
        layer.mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(f"w{index}"))
        layer.register_full_backward_hook(lambda *_, index=index: order.append(f"layer {index}"))
    model.model.train()
    with casting():
        for _ in range(2):
            order.clear()
            model.response_logprobs(batch()).logprobs.sum().backward()
    assert order.index(f"w{len(layers) - 1}") < order.index("layer 0"), order


@pytest.mark.parametrize(("name", "stands_in"), [("llama", True), ("qwen3", True), ("gemma2", False), ("gpt2", False)])
def test_norms_in_one_kernel_have_the_bits_of_the_modules(
    name: str, stands_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU. Gemma's norm is another formula and stays what it is, as do norms of numbers in bf16."""
    model = half(name)
    kinds = {forward.func for _, forward in model.backbone._products._forwards}
    assert (compute._rms_norm in kinds) is stands_in
    ours = model.hidden_states(batch().packed), gradients(model, batch())
    monkeypatch.setattr(compute, "_is_rms_norm", lambda _: False)
    plain = half(name)
    assert ours[0].equal(plain.hidden_states(batch().packed))
    assert all(map(torch.equal, ours[1], gradients(plain, batch())))


def test_a_norm_with_code_of_its_own_keeps_it() -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    Doubled.__module__ = LlamaRMSNorm.__module__
    assert compute._is_rms_norm(LlamaRMSNorm(4))
    assert not compute._is_rms_norm(Doubled(4))
    assert not compute._is_rms_norm(nn.RMSNorm(4))
