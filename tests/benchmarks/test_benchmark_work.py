"""The work of the benchmarks: responses end where the job says, and the floor counts what a model does."""

from dataclasses import replace

import pytest
import torch
from endings import EOS_ID, FIRST_ID, PAD_ID, count_down, forbid_ends, geometric_lengths, set_stop_probability
from floor import Lengths, Rates, backbone_flops, floor_seconds, flops, training_flops
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM
from work import SIZES, Job, model_config


def random_policy(size: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(model_config(SIZES[size])).eval()


@torch.no_grad()
def sampled_length(policy, prompt: list[int], *, at_most: int) -> int:
    """Of a response drawn token by token, each from a pass over all before it."""
    ids = list(prompt)
    while len(ids) - len(prompt) < at_most and ids[-1] != EOS_ID:
        shares = policy(torch.tensor([ids])).logits[0, -1].softmax(dim=0)
        ids.append(int(torch.multinomial(shares, 1)))
    return len(ids) - len(prompt)


def test_a_policy_that_counts_down_writes_responses_of_the_lengths_of_the_job():
    job = Job(models="", size="tiny", regime="eos", num_prompts=8, prompt_tokens=6, new_tokens=12)
    policy = random_policy("tiny")
    count_down(policy)
    torch.manual_seed(1)
    lengths = [sampled_length(policy, prompt, at_most=job.new_tokens) for prompt in job.prompts()]
    assert lengths == job.response_lengths()
    assert set(lengths) == {2, 5, 8, 12}


def test_a_model_that_is_too_narrow_to_count_down_is_refused():
    with pytest.raises(ValueError, match="output layer of its own"):
        count_down(random_policy("tiny-qwen"))


def test_the_lengths_of_a_job_have_the_mean_of_a_geometric_distribution_that_is_cut():
    lengths = Job(models="", size="S", regime="eos").response_lengths()
    assert lengths is not None
    probability = 0.0475
    assert sum(lengths) / len(lengths) == pytest.approx((1 - (1 - probability) ** 64) / probability, rel=0.01)
    assert max(lengths) == 64


def test_quantiles_of_a_geometric_distribution_are_those_of_its_definition():
    found = geometric_lengths(4, longest=64)
    for place, length in enumerate(found):
        quantile = (place + 0.5) / 4
        assert 1 - (1 - 0.0475) ** length >= quantile > 1 - (1 - 0.0475) ** (length - 1)


def test_every_response_to_a_prompt_of_a_group_has_its_length():
    lengths = Job(models="", size="S", regime="eos", num_prompts=3, group=2).response_lengths()
    assert lengths[::2] == lengths[1::2]
    assert len(lengths) == 6


@pytest.mark.parametrize("size", ["tiny", "tiny-qwen"])
@torch.no_grad()
def test_where_ends_are_forbidden_stop_and_padding_are_never_drawn(size):
    policy = random_policy(size)
    forbid_ends(policy)
    contexts = torch.randint(FIRST_ID, 256, (4, 20), generator=torch.Generator().manual_seed(3))
    assert policy(contexts).logits.softmax(dim=2)[..., [PAD_ID, EOS_ID]].max() < 1e-9


def test_stop_tokens_are_not_drawn_from_a_deep_model():
    torch.manual_seed(0)
    deep = replace(SIZES["tiny-qwen"], layers=24)
    policy = AutoModelForCausalLM.from_config(model_config(deep)).eval()
    forbid_ends(policy)
    contexts = torch.randint(FIRST_ID, 256, (16, 60), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert policy(contexts).logits.softmax(dim=2)[..., [PAD_ID, EOS_ID]].max() < 1e-9


@pytest.mark.parametrize("size", ["tiny", "tiny-qwen"])
@torch.no_grad()
def test_a_stop_probability_is_that_of_contexts_it_was_not_set_on(size):
    policy = random_policy(size)
    set_stop_probability(policy, 1 / 50)
    contexts = torch.randint(FIRST_ID, 256, (16, 40), generator=torch.Generator().manual_seed(3))
    found = policy(contexts).logits[:, 8:].softmax(dim=2)[..., EOS_ID].mean().item()
    assert found == pytest.approx(1 / 50, rel=0.2)


@pytest.mark.parametrize("size", ["tiny", "tiny-qwen"])
def test_the_operations_of_the_layers_are_those_that_torch_counts(size):
    model = AutoModel.from_config(model_config(SIZES[size]), attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(FIRST_ID, 256, (1, 24)))
    counted = sum(number for name, number in counter.get_flop_counts()["Global"].items() if "bmm" not in str(name))
    assert backbone_flops(SIZES[size], 24, 0) == counted


def test_the_operations_of_a_step_are_those_of_its_definition():
    size = SIZES["tiny-qwen"]
    job = Job(models="", size="tiny-qwen", regime="none", num_prompts=1, group=2, epochs=3)
    lengths = Lengths(prompts=[5, 5], responses=[4, 7])
    layer = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 128)

    def passes(tokens: int, pairs: int) -> int:
        return size.layers * (layer * tokens + 4 * 128 * pairs)

    whole = passes(9 + 12, 45 + 78)
    head = 2 * 128 * 256 * 11
    rollout = passes(5, 15) + passes(3 + 6, 45 + 78 - 2 * 15) + head
    trained = 3 * 3 * (2 * whole + head)
    assert training_flops(job, lengths) == trained
    assert flops(job, lengths) == rollout + 3 * whole + head + trained


def test_the_floor_of_an_adapter_has_no_gradients_of_frozen_matrices_but_all_of_attention():
    size = SIZES["tiny"]
    job = Job(models="", size="tiny", regime="none", num_prompts=1, epochs=1)
    adapted = replace(job, adapter_rank=16)
    lengths = Lengths(prompts=[5], responses=[4])
    matrices = 2 * size.layers * (2 * 4 * 128 * 128 + 2 * 3 * 128 * 128) * 9 + 2 * 128 * 256 * 4
    assert training_flops(job, lengths) - training_flops(adapted, lengths) == matrices
    seconds = {f"{kind} 128x{out}": 1.0 for kind in ("decode", "forward", "backward") for out in (128, 256)}
    rates = Rates(seconds=seconds, best=1.0)
    whole, of_adapter = (floor_seconds(each, lengths, rates) for each in (job, adapted))
    assert whole["training"] - of_adapter["training"] == (2 * size.layers * 7 * 9 + 4) / 2
    assert (whole["rollout"], whole["scoring"]) == (of_adapter["rollout"], of_adapter["scoring"])
