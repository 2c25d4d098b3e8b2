"""Options that must not change what is learned, and what they are for: memory, measured as live bytes of tensors.

The optimizer in the backward has its bits in learner/test_in_backward.py, checkpointing in models/test_language.py.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from counting import LiveBytes
from ppo_trainers import PROMPTS, count_a
from proximo.config.ppo.options import PPOConfig
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import PackedResponses, pack_responses
from proximo.models.precision.placement import Precision
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.ppo.trainer import PPOTrainer

LORA = LoRAOptions(rank=2, alpha=4)


def batch(*, rows: int, tokens: int) -> PackedResponses:
    ids = [tuple((row + token) % 60 + 3 for token in range(tokens)) for row in range(rows)]
    return pack_responses([(5, 6)] * rows, ids, device=torch.device("cpu"))


def peak_of_an_update(model: LanguageModel, packed: PackedResponses, **options: Any) -> int:
    """Peak bytes above weights and moments: the second update, in which the moments are there already."""
    given = {"learning_rate": 1e-3, "max_gradient_norm": None, "non_finite_gradient": "stop"} | options
    learner = Learner(model.model, OptimizerOptions(**given), num_updates=2)

    def loss(packed: PackedResponses) -> tuple[Tensor, None]:
        return -model.response_logprobs(packed).logprobs.mean(), None

    learner.update([packed], loss)
    with LiveBytes() as live:
        learner.update([packed], loss)
    return live.peak


def test_activation_checkpointing_lowers_the_peak_of_an_update() -> None:
    """Six layers, many tokens: what is kept of all layers becomes what is kept of one, and their inputs."""
    sizes = {"num_hidden_layers": 6, "intermediate_size": 64}
    plain, checkpointed = (LanguageModel(tiny_language_model(**sizes)) for _ in range(2))
    checkpointed.use_activation_checkpointing()
    packed = batch(rows=8, tokens=60)
    peaks = [peak_of_an_update(model, packed) for model in (plain, checkpointed)]
    assert peaks[1] < 0.5 * peaks[0], peaks


def test_an_optimizer_in_the_backward_saves_the_memory_of_the_gradients() -> None:
    """Wide layers, few tokens: the peak is that of the gradients, of which one is left."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
    models = [LanguageModel(tiny_language_model(**sizes)) for _ in range(2)]
    num_bytes = sum(parameter.nbytes for parameter in models[0].model.parameters())
    packed = batch(rows=1, tokens=3)
    ordinary, early = (
        peak_of_an_update(model, packed, in_backward=flag) for model, flag in zip(models, (False, True), strict=True)
    )
    assert ordinary > num_bytes
    assert early < 0.3 * num_bytes, (ordinary, early, num_bytes)


def trainer(policy: LanguageModel, *, value: Any = None, **options: Any) -> PPOTrainer:
    base = {"num_steps": 2, "prompts_per_step": 4, "rollout": {"max_new_tokens": 6}}
    return PPOTrainer(policy, tiny_tokenizer(), value=value, config=PPOConfig(**(base | options)))


RATES = {"policy_optimizer": {"learning_rate": 1e-2}, "value_optimizer": {"learning_rate": 1e-2}}


def test_the_base_below_an_adapter_is_the_reference_that_a_frozen_copy_would_be() -> None:
    frozen = LanguageModel(tiny_language_model())
    made = trainer(LanguageModel(copy.deepcopy(frozen.model)).with_adapter(LORA), **RATES)
    made.train(PROMPTS, reward=count_a)
    responses = made.generate(PROMPTS)
    (own, _) = made.roles.reference.logprobs(responses)
    packed = pack_responses([r.prompt.token_ids for r in responses], [r.token_ids for r in responses])
    with torch.no_grad():
        expected = frozen.response_logprobs(packed).logprobs
        moved = made.policy.response_logprobs(packed).logprobs
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-6)
    assert (moved - expected).abs().max() > 1e-3


@pytest.mark.parametrize("adapters", [False, True])
def test_one_step_gives_every_trainable_tensor_of_every_role_a_gradient_and_moves_it(adapters: bool) -> None:
    policy = LanguageModel(tiny_language_model())
    value = scalar_from_language_model(policy, HeadStart.ZERO, seed=1)
    if adapters:
        policy, value = policy.with_adapter(LORA), value.with_adapter(LORA)
    made = trainer(policy, value=value, **RATES)
    before = {role: copy.deepcopy(learner.parameters) for role, learner in made.learners.items()}
    frozen = {name: p.detach().clone() for name, p in made.policy.model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == adapters
    made.step(PROMPTS, made.generate(PROMPTS), [0.0, 1.0, 2.0, 0.0])
    for role, learner in made.learners.items():
        assert set(learner.parameters) == {n for n, p in learner.module.named_parameters() if p.requires_grad}
        without = [name for name, parameter in learner.parameters.items() if parameter not in learner.optimizer.state]
        still = [name for name, parameter in learner.parameters.items() if torch.equal(parameter, before[role][name])]
        assert (without, still) == ([], []), role
    assert all(torch.equal(tensor, dict(made.policy.model.named_parameters())[n]) for n, tensor in frozen.items())


def moved_norm(precision: Precision) -> float:
    """How far one step of the default learning rate moves the policy, from given responses."""
    policy = LanguageModel(tiny_language_model(), precision=precision)
    made = trainer(policy, epochs_per_step=1, minibatch_responses=4)
    before = [parameter.detach().clone() for parameter in made.policy.model.parameters()]
    line = made.step(PROMPTS, [[10, 11, 2], [12, 13], [14, 15, 16, 2], [17]], [1.0, -1.0, 0.5, 0.0])
    assert line["policy/learning_rate"] == 1e-6
    after = [parameter.detach() for parameter in made.policy.model.parameters()]
    return float(torch.cat([(new - old).flatten() for new, old in zip(after, before, strict=True)]).norm())


def test_at_a_rate_of_1e_6_bf16_moves_the_weights_as_far_as_float32() -> None:
    """Plain bfloat16 weights would stay where they are: half a unit in the last place of 0.02 is 6e-5."""
    float32, bf16 = moved_norm(Precision.FLOAT32), moved_norm(Precision.BF16)
    assert float32 > 1e-6
    assert bf16 == pytest.approx(float32, rel=0.05)
