"""Shapes and dtypes in annotations are held in the tests, and nobody forgets to state them."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

import proximo.algorithms
from proximo.algorithms.advantages import gae
from proximo.algorithms.kl import k1
from proximo.algorithms.masking import standardise
from proximo.algorithms.objectives import TokenLosses

GAE: dict[str, Any] = {
    "rewards": torch.zeros(5),
    "values": torch.zeros(7),
    "mask": torch.ones(5, dtype=torch.bool),
    "lengths": (2, 3),
    "bootstrap": torch.zeros(2, dtype=torch.bool),
    "gamma": 1.0,
    "lam": 0.95,
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mask", torch.ones(4, dtype=torch.bool)),
        ("mask", torch.ones(5)),
        ("rewards", torch.zeros(1, 5)),
        ("lam", torch.zeros(3)),
    ],
    ids=["another size", "another dtype", "another rank", "another number of responses"],
)
def test_an_argument_of_another_shape_is_refused_by_name(name: str, wrong: Tensor) -> None:
    gae(**GAE)
    with pytest.raises(TypeCheckError, match=f"typechecking parameter '{name}'"):
        gae(**GAE | {name: wrong})


def test_a_result_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction that loses all tokens but one on its way."""
    x, mask = torch.tensor([1.0, 2.0] * 7), torch.tensor([True, True] * 7)
    standardise(x[2:], mask[2:])
    monkeypatch.setattr("proximo.algorithms.masking._deviations", lambda x, mask: x[:1])
    with pytest.raises(TypeCheckError, match="checking the return value of .*standardise"):
        standardise(x, mask)


def test_fields_of_a_record_have_one_size() -> None:
    TokenLosses(loss=torch.zeros(3), clipped=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(TypeCheckError, match="TokenLosses"):
        TokenLosses(loss=torch.zeros(3), clipped=torch.zeros(2, dtype=torch.bool))


def test_a_compiled_function_is_traced_without_its_checks() -> None:
    compiled = torch.compile(lambda x: k1(x, x + 1), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(3)).tolist() == [-1.0] * 3


def public_functions(package: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                yield f"{found.name}.{name}", function


def test_every_public_function_of_the_mathematics_states_the_shapes_of_its_tensors() -> None:
    """But for what takes a tensor of any kind, to ask for its device or to read the numbers off."""
    silent = [
        name
        for name, function in public_functions(proximo.algorithms)
        if any(_is_a_tensor(hint) for hint in inspect.get_annotations(function).values())
    ]
    assert silent == ["proximo.algorithms.advantages.goes_by_scan"]


def _is_a_tensor(hint: Any) -> bool:
    return hint is Tensor or any(_is_a_tensor(part) for part in getattr(hint, "__args__", ()))
