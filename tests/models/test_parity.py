"""Every supported architecture, packed, against its own attention run on one sequence at a time."""

import copy

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, build_architecture, random_sequences
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack, pack_responses
from proximo.models.probe import probe_language_model

LENGTHS = [9, 3, 14, 6]
PROMPT_LENGTH = 2
TEMPERATURE = 0.8


def batch() -> PackedResponses:
    sequences = random_sequences(LENGTHS)
    return pack_responses([each[:PROMPT_LENGTH] for each in sequences], [each[PROMPT_LENGTH:] for each in sequences])


def own_logprobs(model: nn.Module) -> Tensor:
    """log softmax of the model's full logits, gathered at the responses, one sequence after the other."""
    pieces = []
    for sequence in random_sequences(LENGTHS):
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0] / TEMPERATURE
        shares = logits.log_softmax(dim=-1)[PROMPT_LENGTH - 1 : -1]
        pieces.append(shares.gather(1, torch.tensor(sequence[PROMPT_LENGTH:])[:, None])[:, 0])
    return torch.cat(pieces)


def random_weights() -> Tensor:
    return torch.randn(sum(LENGTHS) - PROMPT_LENGTH * len(LENGTHS), generator=torch.Generator().manual_seed(3))


def assert_gradients_agree(ours: nn.Module, own: nn.Module, tolerance: float) -> None:
    """Relative L2 per tensor. Where the exact gradient is 0 (biases of keys), both must be rounding noise."""
    expected = {name: tensor.grad for name, tensor in own.named_parameters()}
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, tensor in ours.named_parameters():
        size = expected[name].norm()
        noise = 1e-6 * whole
        if size < noise:
            assert tensor.grad.norm() < noise, name
        else:
            assert (tensor.grad - expected[name]).norm() <= tolerance * size, name


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def test_packed_equals_one_by_one_forward_and_gradient(architecture: str):
    model = build_architecture(architecture)
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    language_model = LanguageModel(model)
    weights = random_weights()

    ours = language_model.response_logprobs(batch(), temperature=TEMPERATURE).logprobs
    (ours * weights).sum().backward()
    theirs = own_logprobs(own)
    (theirs * weights).sum().backward()

    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert_gradients_agree(language_model.model, own, tolerance=1e-5)


def test_attention_matters_in_these_models(architecture: str):
    """Guards the test above: a model whose tokens hardly see each other would pass it with any attention."""
    language_model = LanguageModel(build_architecture(architecture))
    sequences = random_sequences([9])
    changed = [[(sequences[0][0] + 1) % 50 + 3, *sequences[0][1:]]]
    with torch.no_grad():
        apart = language_model.hidden_states(pack(sequences)) - language_model.hidden_states(pack(changed))
    assert apart[3].norm() > 1e-2, "the fourth token does not notice the first"


def test_the_probe_accepts_it_and_leaves_it_as_it_was(architecture: str):
    language_model = LanguageModel(build_architecture(architecture))
    before = copy.deepcopy(language_model.model.state_dict())
    config = copy.deepcopy(language_model.model.config.to_dict())
    with torch.no_grad():
        hidden = language_model.hidden_states(pack([[3, 4, 5]]))
    language_model.model.train()
    probe_language_model(language_model)
    assert all(tensor.equal(before[name]) for name, tensor in language_model.model.state_dict().items())
    assert language_model.model.config.to_dict() == config
    assert all(module.training for module in language_model.model.modules())
    assert all(parameter.grad is None for parameter in language_model.model.parameters())
    language_model.model.eval()
    with torch.no_grad():
        assert language_model.hidden_states(pack([[3, 4, 5]])).equal(hidden)
