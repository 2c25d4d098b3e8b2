"""A whole PPO step in bf16, operator by operator: which kernel sees which types, and what is cast."""

from collections.abc import Iterator

import pytest
import torch

from builders import run_through_modules, tiny_language_model, tiny_tokenizer
from counting import CountedTrainer
from dtype_traces import DtypeTrace, aten
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.records import Prompt
from proximo.rewards.model import ModelReward

HALF, FULL = "bf16", "float32"
LAYERS, HEAD = (HALF, HALF), (FULL, FULL)
FORWARD = {aten.mm: {LAYERS, HEAD}, aten._scaled_dot_product_flash_attention_for_cpu: {(HALF,) * 3, (HALF,) * 4}}
"""In a pass that reads: the products of the layers, the head, attention, which has a mask where a prompt is shared."""
BACKWARD = FORWARD | {
    # The output, and the sums that normalise: torch's kernel keeps these in float32.
    aten._scaled_dot_product_flash_attention_for_cpu_backward: {(*(HALF,) * 5, FULL), (*(HALF,) * 5, FULL, HALF)},
}
KERNELS = {
    "policy_logprobs": FORWARD,
    "reference_logprobs": FORWARD,
    "values": FORWARD,
    "score": FORWARD,
    "train_value": BACKWARD,
    "train_policy": BACKWARD | {aten.mm: {LAYERS, HEAD}, aten.addmm_: {(FULL, FULL, FULL)}},
    "generate": {
        aten.linear: {LAYERS, HEAD},
        aten.scaled_dot_product_attention: {(HALF,) * 3, (HALF,) * 4, (*(HALF,) * 3, "torch.bool")},
    },
}
"""Call -> kernel -> types of what it is given. In a rollout operators are seen before they are taken apart, and the
prompts, which begin alike, have a mask."""


@pytest.fixture(scope="module")
def counts() -> Iterator[dict[str, DtypeTrace]]:
    """Of each call of a step with one update of each model, in several micro-batches, on the path of accelerators."""
    with pytest.MonkeyPatch.context() as patch:
        run_through_modules(patch)
        yield counted_calls()


def counted_calls() -> dict[str, DtypeTrace]:
    policy = LanguageModel(
        tiny_language_model(vocab_size=128, hidden_size=32, intermediate_size=64), precision=Precision.BF16
    )
    config = PPOConfig(
        num_steps=1,
        prompts_per_step=4,
        responses_per_prompt=2,
        epochs_per_step=1,
        minibatch_responses=8,
        tokens_per_microbatch=64,
        rollout={"max_new_tokens": 7},
    )
    reward, value = (scalar_from_language_model(policy, HeadStart.NORMAL, seed=seed) for seed in (1, 2))
    models = {"value": value, "reward": ModelReward(reward)}
    trainer = CountedTrainer(policy, tiny_tokenizer(), config=config, counter=DtypeTrace, **models)
    torch.set_num_threads(1)
    trainer.run_step(prompts=[Prompt(id=str(n), token_ids=tuple(range(60, 69 + 2 * n))) for n in range(4)])
    return trainer.counts


@pytest.mark.parametrize("call", KERNELS)
def test_kernels_see_the_types_of_the_table(counts: dict[str, DtypeTrace], call: str) -> None:
    table = KERNELS[call]
    products = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.linear, aten.matmul} | table.keys()
    assert {kernel: types for kernel, types in counts[call].types.items() if kernel in products} == table


def test_nothing_is_cast_twice(counts: dict[str, DtypeTrace]) -> None:
    assert {call: trace.cast_twice for call, trace in counts.items() if trace.cast_twice} == {}


def test_weights_are_cast_once_in_each_call(counts: dict[str, DtypeTrace]) -> None:
    """7 matrices in each of 2 layers. The reference, a copy that the trainer made, is stored in bf16."""
    of_weights = {(32, 32), (64, 32), (32, 64)}
    wanted = dict.fromkeys(("policy_logprobs", "values", "train_policy", "train_value", "generate"), 14)
    for call, number in {**wanted, "reference_logprobs": 0}.items():
        casts = counts[call].casts.items()
        assert sum(count for key, count in casts if key[2] in of_weights and key[-1] == HALF) == number, call
