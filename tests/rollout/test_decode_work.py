"""What the engine adds to the model's own passes, counted in operators: time would be noise."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from architectures import ARCHITECTURES, build_architecture, random_sequences
from builders import tiny_language_model, tiny_tokenizer
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.records import Prompt, Response
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions


class Operators(TorchDispatchMode):
    """How often each operator was called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


def prompts_of(lengths: list[int]) -> list[Prompt]:
    sequences = random_sequences(lengths, seed=1)
    return [Prompt(id=str(index), token_ids=tuple(tokens)) for index, tokens in enumerate(sequences)]


def generate(model: LanguageModel, prompts: list[Prompt], *, num_samples: int = 1, new_tokens: int) -> list[Response]:
    return LocalEngine(model, tiny_tokenizer(), eos_token_ids=[]).generate(
        prompts,
        num_samples=num_samples,
        options=SamplingOptions(max_new_tokens=new_tokens),
        key=RandomKey(seed=0, purpose="test"),
    )


def operators_of(run: Callable[[], Any]) -> Counter[str]:
    with Operators() as operators:
        run()
    return operators.calls


def test_a_decoding_pass_has_as_many_operators_for_one_row_as_for_many() -> None:
    model = LanguageModel(tiny_language_model())

    def decoding(num_rows: int) -> Counter[str]:
        prompts = prompts_of([5] * num_rows)
        calls = operators_of(lambda: generate(model, prompts, new_tokens=4))
        calls.subtract(operators_of(lambda: generate(model, prompts, new_tokens=2)))
        return calls

    assert decoding(1) == decoding(9)


def test_a_prompt_is_placed_by_copies_alone_and_an_unused_row_is_not_cleared() -> None:
    """One copy of keys and one of values for each layer and row; indexing with lists would go element by element."""
    prompts = PromptCache([3, 2])
    for layer in range(2):
        prompts.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), layer)
    cache = RowCache(num_rows=4, initial_tokens=6, max_tokens=6)
    cache.place(prompts, 1, [3])
    calls = operators_of(lambda: cache.place(prompts, 0, [0, 1, 2]))
    assert calls["aten::copy_"] == 2 * 2 * 3
    assert {name for name in calls if "index" in name or "fill" in name or "zero" in name} == set()
    calls = operators_of(lambda: cache.place(prompts, 1, [0]))
    assert calls["aten::fill_"] == 2 * 2, "the third token of the row's last prompt is forgotten"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_that_was_sampled_still_learns(name: str) -> None:
    """Inference mode leaves no tensor of its own behind in the model."""
    model = LanguageModel(build_architecture(name))
    responses = generate(model, prompts_of([4, 7]), num_samples=2, new_tokens=5)
    held = [*model.model.named_parameters(), *model.model.named_buffers()]
    assert [name for name, tensor in held if tensor.is_inference()] == []
    assert not any(response.logprobs.is_inference() for response in responses)
    batch = pack_responses([r.prompt.token_ids for r in responses], [r.token_ids for r in responses])
    model.response_logprobs(batch).logprobs.sum().backward()
    gradients = [tensor.grad for _, tensor in model.trainable_parameters() if tensor.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
