"""torch.compile changes the speed of training passes alone: gradients, names and sampling stay."""

import shutil

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from proximo.errors import ConfigError
from proximo.models.compilation import check_compiler
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import PackedResponses, pack_responses
from proximo.records import Prompt
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions


def batch(count: int) -> PackedResponses:
    """Sequences of different lengths, and another number of them each time."""
    responses = [tuple(range(10, 12 + row)) for row in range(count)]
    return pack_responses([(5, 6, 7 + row) for row in range(count)], responses, device=torch.device("cpu"))


def gradients(model: LanguageModel, packed: PackedResponses) -> dict[str, Tensor]:
    model.model.train().zero_grad()
    (-model.response_logprobs(packed).logprobs.mean()).backward()
    model.model.eval()
    return {name: p.grad.clone() for name, p in model.trainable_parameters() if p.grad is not None}


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

    compiled: list[int] = []
    backend = torch._dynamo.lookup_backend("aot_eager")

    def counted(module: torch.fx.GraphModule, inputs: list) -> object:
        compiled.append(len(module.graph.nodes))
        return backend(module, inputs)

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
    assert sum(compiled) > 20
    assert list(model.model.state_dict()) == names


def test_inductor_on_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"none of g\+\+, clang\+\+, c\+\+ is installed"):
        check_compiler("inductor", torch.device("cpu"))
    check_compiler("aot_eager", torch.device("cpu"))
    check_compiler("inductor", torch.device("cuda"))
