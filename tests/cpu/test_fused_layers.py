import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from architectures import build_architecture
from proximo.models.attention.packed import PackedLayout
from proximo.models.backbone import Backbone, checkpoint_activations
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import Packed, pack
from proximo.models.precision.placement import Precision
from proximo_cpu.fused_layers import FusedLayers

FUSED = ("llama", "mistral_window", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "opt", "phi3", "olmo2", "smollm3")
ROWS = torch.tensor([1, 2, 7, 8, 15])


def sequences() -> Packed:
    """16 tokens, longer than the window."""
    return pack([[(5 * i + n) % 50 + 3 for i in range(n)] for n in (9, 7)])


def model_of(
    name: str,
    *,
    adapter: bool = False,
    dtype: torch.dtype = torch.float32,
    precision: Precision = Precision.FLOAT32,
) -> LanguageModel:
    """With an adapter that does something: B, which is 0 at first, is drawn at random."""
    model = LanguageModel(build_architecture(name, dtype=dtype), precision=precision)
    if not adapter:
        return model
    model = model.with_adapter(LoRAOptions(rank=4, alpha=8.0))
    random = torch.Generator().manual_seed(1)
    for path, weight in model.trainable_parameters():
        if "lora_B" in path:
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=random))
    model.model.to(dtype)
    return model


def as_modules(model: LanguageModel, packed: Packed) -> Tensor:
    """Hidden states by the model's own code."""
    layout = PackedLayout(packed.lengths, model.backbone.path.attention)
    return model.backbone.run(packed.token_ids[None], packed.position_ids[None], layout=layout)[0]


def gradients(model: LanguageModel, hidden: Tensor) -> dict[str, Tensor]:
    """Of every weight below the head that trains, from a gradient that differs in every entry.

    The bias of keys adds the same number to all scores of a query: its gradient is 0 but for rounding, and left out.
    """
    weights = {name: each for name, each in model.backbone.layers.named_parameters() if each.requires_grad}
    weights = {name: each for name, each in weights.items() if not name.endswith("k_proj.bias")}
    given = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).cos().view_as(hidden)
    return dict(zip(weights, torch.autograd.grad(hidden, list(weights.values()), given), strict=True))


def bytes_kept(run: Callable[[], Tensor]) -> int:
    """What autograd holds between the forward and the backward pass, weights aside: each storage once."""
    kept: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values() if not isinstance(tensor, nn.Parameter))


class Counted(TorchDispatchMode):
    """The operators that compute something, and not just look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        self.operators += not any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("rows", [None, ROWS], ids=["all tokens", "some tokens"])
def test_fused_layers_compute_what_the_modules_compute(name: str, rows: Tensor | None, adapter: bool) -> None:
    """In float64, where the norms of Gemma compute in float32, and in float32."""
    for dtype, allowed in ((torch.float64, 1e-6 if "gemma" in name else 1e-12), (torch.float32, 1e-4)):
        model, packed = model_of(name, adapter=adapter, dtype=dtype), sequences()
        assert FusedLayers.of(model.backbone.layers) is not None
        expected, ours = as_modules(model, packed), model.hidden_states(packed, rows)
        if rows is not None:
            expected = expected[rows]
        assert (ours - expected).abs().max() <= allowed * expected.abs().max()
        found = gradients(model, ours)
        for weight, gradient in gradients(model, expected).items():
            assert (found[weight] - gradient).norm() <= allowed * gradient.norm(), weight


@pytest.mark.parametrize("name", FUSED)
def test_a_pass_without_gradients_computes_the_same_bits(name: str) -> None:
    model, packed = model_of(name), sequences()
    with torch.no_grad():
        silent = model.hidden_states(packed, ROWS)
    assert torch.equal(silent, model.hidden_states(packed, ROWS))


@pytest.mark.parametrize(("name", "adapter"), [("llama", False), ("llama", True), ("gemma3", False), ("gpt2", False)])
def test_frozen_weights_get_no_gradient_and_the_others_get_the_same(name: str, adapter: bool) -> None:
    model, packed = model_of(name, adapter=adapter), sequences()
    whole = gradients(model, model.hidden_states(packed))
    for part in range(7):
        frozen = {name for i, name in enumerate(whole) if i % 7 == part}
        for path, weight in model.backbone.layers.named_parameters():
            weight.requires_grad_(path in whole and path not in frozen)
        model.hidden_states(packed).backward(torch.linspace(-1, 1, 16 * 32).cos().view(16, 32))
        for path, weight in model.backbone.layers.named_parameters():
            assert (weight.grad is None) == (path in frozen or path not in whole), path
            assert weight.grad is None or torch.equal(weight.grad, whole[path]), path
            weight.grad = None


def test_checkpointed_layers_may_be_computed_again_while_operators_are_counted() -> None:
    packed, gradients = sequences(), []
    for counting in (False, True):
        model = model_of("llama")
        model.use_activation_checkpointing()
        model.model.train()
        loss = model.hidden_states(packed).square().mean()
        with FlopCounterMode(display=False) if counting else nullcontext():
            loss.backward()
        gradients.append([each.grad for _, each in model.trainable_parameters() if each.grad is not None])
    for plain, counted in zip(*gradients, strict=True):
        torch.testing.assert_close(counted, plain, rtol=1e-4, atol=1e-6)


def test_checkpointed_layers_run_fused_and_keep_their_input_alone() -> None:
    model, packed = model_of("llama"), sequences()
    plain = gradients(model, model.hidden_states(packed, ROWS))
    checkpoint_activations(model.base)
    model.model.train()
    assert FusedLayers.of(model.backbone.layers) is not None
    found = gradients(model, model.hidden_states(packed, ROWS))
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())
    assert bytes_kept(lambda: model.hidden_states(packed)) < 0.5 * bytes_kept(
        lambda: model_of("llama").hidden_states(packed)
    )


def test_no_rows_at_all_make_no_hidden_states_and_gradients_of_zero() -> None:
    model = model_of("llama")
    hidden = model.hidden_states(sequences(), torch.tensor([], dtype=torch.long))
    assert hidden.shape == (0, 32)
    hidden.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.backbone.layers.parameters())


def test_a_pass_takes_fewer_operators_and_keeps_half_the_bytes() -> None:
    model, packed = model_of("llama"), pack([list(range(3, 60)) for _ in range(8)])
    operators, kept = [], []
    for run in (lambda: as_modules(model, packed), lambda: model.hidden_states(packed)):
        with Counted() as counted:
            gradients(model, run())
        operators.append(counted.operators)
        kept.append(bytes_kept(run))
    assert operators[1] < 0.85 * operators[0], operators
    assert kept[1] < 0.6 * kept[0], kept


def add_hook(model: PreTrainedModel) -> None:
    model.base_model.layers[0].mlp.register_forward_hook(lambda *_: None)


def drop_out(model: PreTrainedModel) -> None:
    model.train()
    assert FusedLayers.of(model.model) is not None
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1


def put_something_else(model: PreTrainedModel) -> None:
    layer = model.base_model.layers[1].mlp
    layer.act_fn = nn.Mish()


def test_a_class_of_ones_own_runs_as_it_is_written() -> None:
    model = build_architecture("llama")
    own = type("OwnModel", (type(model.model),), {})
    model.model.__class__ = own
    assert FusedLayers.of(Backbone(model, precision=Precision.FLOAT32).layers) is None


@pytest.mark.parametrize("change", [add_hook, drop_out, put_something_else])
def test_what_someone_has_changed_runs_as_modules(change) -> None:
    model = build_architecture("llama")
    backbone = Backbone(model, precision=Precision.FLOAT32)
    assert FusedLayers.of(backbone.layers) is not None
    change(model)
    assert FusedLayers.of(backbone.layers) is None


def test_a_hook_of_a_module_is_called_in_a_packed_pass() -> None:
    model, seen = model_of("llama"), []
    model.base.base_model.layers[1].mlp.register_forward_hook(lambda *given: seen.append(given[2].shape))
    model.hidden_states(sequences())
    assert seen == [(1, 16, 32)]


def test_an_adapter_keeps_little_more_than_no_training_of_its_base_needs() -> None:
    """What a layer keeps for the gradients of an adapter is what it keeps for its activations."""
    packed = pack([list(range(3, 60)) for _ in range(8)])
    full, adapted = (model_of("llama", adapter=adapter) for adapter in (False, True))
    assert bytes_kept(lambda: adapted.hidden_states(packed)) <= bytes_kept(lambda: full.hidden_states(packed))


def change_dropout(model: LanguageModel) -> None:
    for module in model.model.modules():
        if isinstance(module, nn.ModuleDict) and "default" in module and isinstance(module["default"], nn.Identity):
            module["default"] = nn.Dropout(0.1)
    model.model.train()


def merge_adapters(model: LanguageModel) -> None:
    assert isinstance(model.model, PeftModel)
    model.model.merge_adapter()


@pytest.mark.parametrize("change", [change_dropout, merge_adapters])
def test_an_adapter_in_another_state_runs_as_modules(change: Callable[[LanguageModel], None]) -> None:
    model = model_of("llama", adapter=True)
    assert FusedLayers.of(model.backbone.layers) is not None
    change(model)
    assert FusedLayers.of(model.backbone.layers) is None


def test_attributes_that_a_layer_reads_are_noticed_when_they_change() -> None:
    model, packed = model_of("gemma2"), sequences()
    before = model.hidden_states(packed)
    layers: Any = model.backbone.layers
    for layer in layers.layers:
        layer.self_attn.attn_logit_softcapping = None
        layer.input_layernorm.eps = 0.5
    after = model.hidden_states(packed)
    assert (after - before).abs().max() > 0.01
    assert (after - as_modules(model, packed)).abs().max() <= 1e-5 * after.abs().max()


def test_an_adapter_that_is_switched_off_or_scaled_is_noticed() -> None:
    model, packed = model_of("llama", adapter=True), sequences()
    assert isinstance(model.model, PeftModel)
    on = model.hidden_states(packed)
    with model.model.disable_adapter():
        off = model.hidden_states(packed)
        assert (off - as_modules(model, packed)).abs().max() <= 1e-5
    assert (on - off).abs().max() > 0.01
    for module in model.model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2
    scaled = model.hidden_states(packed)
    assert (scaled - as_modules(model, packed)).abs().max() <= 1e-4
    assert (scaled - on).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen3_moe", "granite", "gpt_neox", "cohere"])
def test_other_architectures_run_as_modules_and_still_give_the_rows_that_are_asked_for(name: str) -> None:
    model, packed = model_of(name), sequences()
    assert FusedLayers.of(model.backbone.layers) is None
    assert torch.equal(model.hidden_states(packed, ROWS), as_modules(model, packed)[ROWS])


def test_what_is_remembered_of_a_model_does_not_keep_it() -> None:
    model = build_architecture("llama")
    assert FusedLayers.of(LanguageModel(model).backbone.layers) is not None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
