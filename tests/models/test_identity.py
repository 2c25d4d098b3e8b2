"""A model or tokenizer has one digest wherever it lies, and another one has another."""

import copy

import pytest
import torch
from torch import nn

from builders import tiny_language_model, tiny_tokenizer
from proximo.run.resumption import model_digest, tokenizer_digest


def test_copies_have_one_digest_however_they_lie_and_other_weights_another() -> None:
    model = tiny_language_model()
    assert model_digest(copy.deepcopy(model)) == model_digest(model)
    assert model_digest(tiny_language_model(seed=1)) != model_digest(model)
    plain, transposed = nn.Linear(3, 4), nn.Linear(3, 4)
    transposed.weight.data = plain.weight.data.T.contiguous().T
    transposed.bias.data = plain.bias.data
    assert model_digest(plain) == model_digest(transposed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_bit_of_every_value_enters(dtype: torch.dtype) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(n, 70, dtype=dtype), requires_grad=False) for n in (3, 70)])
    seen = {model_digest(module)}
    for parameter in module:
        for index, bit in ((0, 0), (67, 3), (-1, 7)):
            parameter.flatten().view(torch.uint8)[index] ^= 1 << bit
            seen.add(model_digest(module))
    assert len(seen) == 7


@pytest.mark.parametrize("other", [nn.Linear(4, 3), nn.Linear(3, 4).double(), nn.Sequential(nn.Linear(3, 4))])
def test_names_types_and_shapes_enter(other: nn.Module) -> None:
    def filled(module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        return module

    assert model_digest(filled(other)) != model_digest(filled(nn.Linear(3, 4)))


def test_a_tokenizer_used_and_saved_keeps_its_digest(tmp_path) -> None:
    used, fresh = tiny_tokenizer(), tiny_tokenizer()
    used(["abc", "a"], truncation=True, max_length=2)
    assert tokenizer_digest(used) == tokenizer_digest(fresh)
    used.save_pretrained(tmp_path)
    assert tokenizer_digest(type(used).from_pretrained(tmp_path)) == tokenizer_digest(fresh)


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens(["new"]),
        lambda tokenizer: setattr(tokenizer, "chat_template", "{{ messages }}"),
        lambda tokenizer: setattr(tokenizer, "eos_token", "<|user|>"),
    ],
)
def test_what_decides_ids_enters(change) -> None:
    tokenizer = tiny_tokenizer()
    change(tokenizer)
    assert tokenizer_digest(tokenizer) != tokenizer_digest(tiny_tokenizer())
