"""torch.compile changes the speed of training passes alone: gradients, names and sampling stay."""

import gc
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import build_architecture
from builders import tiny_language_model, tiny_tokenizer
from proximo.errors import ConfigError
from proximo.models.attention import compiled as compiled_attention
from proximo.models.backbone import check_compiler
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision import compute
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions


@pytest.fixture(autouse=True)
def _nothing_was_compiled_before() -> None:
    """What another test compiled would serve a model of the same shapes."""
    torch._dynamo.reset()


def batch(count: int) -> PackedResponses:
    """Sequences of different lengths, and another number of them each time."""
    responses = [tuple(range(10, 12 + row)) for row in range(count)]
    return pack_responses([(5, 6, 7 + row) for row in range(count)], responses, device=torch.device("cpu"))


def gradients(model: LanguageModel, packed: PackedResponses) -> dict[str, Tensor]:
    model.model.train().zero_grad()
    (-model.response_logprobs(packed).logprobs.mean()).backward()
    model.model.eval()
    return {name: p.grad.clone() for name, p in model.trainable_parameters() if p.grad is not None}


def counting() -> tuple[Any, list[int]]:
    """A backend, and the calls of attention in each graph that it is given."""
    backend, found = torch._dynamo.lookup_backend("aot_eager"), []

    def counted(module: torch.fx.GraphModule, inputs: list) -> object:
        found.append(sum("proximo.attend" in str(node.target) for node in module.graph.nodes))
        return backend(module, inputs)

    return counted, found


# torch looks at `.grad` of every tensor that enters what it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_has_the_gradients_names_and_samples_of_a_plain_one() -> None:
    """With an adapter; compiled once, whatever comes after."""
    base = tiny_language_model(num_hidden_layers=1)
    model = LanguageModel(base).with_adapter(LoRAOptions(rank=2, alpha=4, target_modules=("q_proj",)))
    names = list(model.model.state_dict())
    expected = [gradients(model, batch(count)) for count in (2, 3, 5)]
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2])
    asked = [Prompt(id="0", token_ids=(5, 6, 7), text="")]
    how = {"num_samples": 2, "options": SamplingOptions(max_new_tokens=6), "key": RandomKey(seed=0, purpose="test")}
    sampled = [(r.token_ids, r.logprobs.tolist()) for r in engine.generate(asked, **how)]

    counted, compiled = counting()
    model.compile(counted)  # ty: ignore[invalid-argument-type]
    assert [(r.token_ids, r.logprobs.tolist()) for r in engine.generate(asked, **how)] == sampled
    assert not compiled, "sampling is not compiled"
    first: list[int] = []
    for count, plain in zip((2, 3, 5), expected, strict=True):
        found = gradients(model, batch(count))
        assert found.keys() == plain.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6, msg=name)
        first = first or compiled.copy()
        assert compiled == first, "another number of sequences was compiled anew"
    assert set(first) == {1}, "the layers are cut into pieces"
    assert list(model.model.state_dict()) == names
    check_two_passes(model, expected)


def check_two_passes(model: LanguageModel, expected: list[dict[str, Tensor]]) -> None:
    """They keep their own sequences until their backward pass, and no longer."""
    model.model.train()
    gc.collect()
    others = set(compiled_attention._LAYOUTS)
    losses = [-model.response_logprobs(batch(count)).logprobs.mean() for count in (2, 3)]
    assert len(set(compiled_attention._LAYOUTS) - others) == 2
    for loss, plain in zip(losses, expected, strict=False):
        model.model.zero_grad()
        loss.backward()
        for name, parameter in model.trainable_parameters():
            torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-5, atol=1e-6, msg=name)
    del loss, losses
    gc.collect()
    assert set(compiled_attention._LAYOUTS) <= others


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_a_soft_cap_windows_and_sinks_are_compiled_too(architecture: str) -> None:
    """Responses share prompts, so that attention copies prefixes."""
    model = LanguageModel(build_architecture(architecture))
    prompts, responses = [(5, 6, 7, 8, 9)] * 3, [tuple(range(10, 10 + n)) for n in (4, 9, 2)]
    packed = pack_responses(prompts, responses)
    expected = gradients(model, packed)
    counted, attended = counting()
    model.compile(counted)
    found = gradients(model, packed)
    if architecture == "gpt_oss":  # torch 2.11 cuts layers at their experts
        assert sum(attended) >= 2
    else:
        assert set(attended) == {2}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


LENGTHS = ([4, 5], [2, 9, 3], [7], [5] * 6)
"""Of responses: other numbers of them, other lengths, and equal ones."""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_in_bf16_other_lengths_compile_nothing_and_weights_are_cast_once_for_an_update() -> None:
    """Log-probs without gradients are those of the update to the bit."""
    model = LanguageModel(tiny_language_model(num_hidden_layers=1), precision=Precision.BF16)
    batches = [pack_responses([(5, 6, 7)] * len(each), [tuple(range(10, 10 + n)) for n in each]) for each in LENGTHS]
    expected = [gradients(model, each) for each in batches]
    backend, compiled = torch._dynamo.lookup_backend("aot_eager"), []
    shapes = {each.shape for each in model.backbone.matrices}
    types: set[torch.dtype] = set()

    def counted(module: torch.fx.GraphModule, inputs: list) -> object:
        compiled.append(module)
        types.update(each.dtype for each in inputs if isinstance(each, Tensor) and each.shape in shapes)
        return backend(module, inputs)

    model.compile(counted)  # ty: ignore[invalid-argument-type]
    gradients(model, batches[0])
    once = len(compiled)
    with casting():
        found = [gradients(model, each) for each in batches]
        casts = compute._CASTS.get()
    assert len(compiled) == once
    assert types == {torch.bfloat16}, "a weight that is not cast yet is cast by what was compiled, in each pass"
    assert casts is not None
    assert {key[0] for key in casts._kept if key[1] is torch.bfloat16} == set(map(id, model.backbone.matrices))
    for ours, plain in zip(found, expected, strict=True):
        assert ours.keys() == plain.keys()
        for name, gradient in ours.items():
            assert (gradient - plain[name]).norm() <= 0.02 * plain[name].norm(), name
    assert all(isinstance(each, torch.nn.Parameter) for each in model.backbone.layers.parameters())
    assert len(list(model.backbone.layers.parameters())) == 9 + 2
    updated = model.response_logprobs(batches[0]).logprobs
    with torch.no_grad():
        assert model.response_logprobs(batches[0]).logprobs.equal(updated)


def test_a_model_with_activation_checkpointing_is_not_compiled() -> None:
    model = LanguageModel(tiny_language_model(num_hidden_layers=1))
    model.use_activation_checkpointing()
    model.compile("aot_eager")
    assert not model.backbone.is_compiled


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.filterwarnings("ignore")  # whatever torch says of the machine's compiler
def test_inductor_computes_what_the_layers_compute() -> None:
    model = LanguageModel(tiny_language_model(num_hidden_layers=1))
    batches = [batch(count) for count in (2, 3)]
    expected = [(model.response_logprobs(each).logprobs.detach(), gradients(model, each)) for each in batches]
    model.compile("inductor")
    for each, (logprobs, plain) in zip(batches, expected, strict=True):
        torch.testing.assert_close(model.response_logprobs(each).logprobs.detach(), logprobs, rtol=1e-5, atol=1e-5)
        found = gradients(model, each)
        assert found.keys() == plain.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6, msg=name)


def test_inductor_on_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"none of g\+\+, clang\+\+, c\+\+ is installed"):
        check_compiler("inductor", torch.device("cpu"))
    check_compiler("aot_eager", torch.device("cpu"))
    check_compiler("inductor", torch.device("cuda"))
