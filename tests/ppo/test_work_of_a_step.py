"""What a PPO step costs, counted: a regression that no clock is needed for and no noise moves.

Responses end at different lengths here, so that any padding would be counted too. The model's width is small beside
its vocabulary, so that a head over too many positions would stand out.
"""

from typing import Any

import pytest
import torch
from torch import nn

from builders import tiny_language_model, tiny_tokenizer
from counting import CountedTrainer, LiveBytes, Operations, Passes
from proximo.config.ppo.options import PPOConfig
from proximo.models.heads import CHUNK_TOKENS
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, scalar_from_language_model
from proximo.records import Experience, Prompt
from proximo.rewards.model import ModelReward

VOCABULARY, WIDTH, MLP, LAYERS = 1024, 32, 64, 2
GROUP, NUM_PROMPTS, NEW_TOKENS, EPOCHS, MINIBATCH = 4, 12, 48, 2, 24
LAYER_WEIGHTS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP)
BEHIND_ATTENTION = WIDTH**2 + 3 * WIDTH * MLP
"""Of one layer: in the last one, only what is asked for goes through them."""


def prompts() -> list[Prompt]:
    return [Prompt(id=str(n), token_ids=tuple(range(60, 68 + 2 * n))) for n in range(NUM_PROMPTS)]


def make_trainer(counter: type[Any], *, vocabulary: int = VOCABULARY) -> CountedTrainer:
    sizes = {"hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS}
    policy = LanguageModel(tiny_language_model(vocab_size=vocabulary, **sizes))
    config = PPOConfig(
        num_steps=2,
        prompts_per_step=NUM_PROMPTS,
        responses_per_prompt=GROUP,
        epochs_per_step=EPOCHS,
        minibatch_responses=MINIBATCH,
        keep_groups_together=True,
        # A random model draws nearly evenly, so that one token in twenty ends a response.
        rollout={"max_new_tokens": NEW_TOKENS, "stop_token_ids": tuple(range(vocabulary // 20))},
    )
    reward = scalar_from_language_model(policy, HeadStart.NORMAL, seed=1)
    value = scalar_from_language_model(policy, HeadStart.NORMAL, seed=2)
    models = {"value": value, "reward": ModelReward(reward)}
    return CountedTrainer(policy, tiny_tokenizer(), config=config, counter=counter, **models)


def role_models(trainer: CountedTrainer) -> dict[str, nn.Module]:
    source = trainer.roles.reward.source
    assert isinstance(source, ModelReward)
    reference, value = trainer.roles.reference, trainer.roles.value
    return {
        "policy": trainer.policy.base,
        "reference": reference.model.base,
        "value": value.model.base,
        "reward": source.model.base,
    }


def sequence_lengths(experience: Experience) -> tuple[list[int], list[int]]:
    """Of prompts and of responses."""
    responses = [scored.response for scored in experience.scored]
    return [len(each.prompt.token_ids) for each in responses], [len(each.token_ids) for each in responses]


@pytest.fixture(scope="module")
def counted() -> tuple[CountedTrainer, Passes, list[int], list[int]]:
    """A trainer after one step, the tokens of its passes, and the lengths of its prompts and responses."""
    torch.set_num_threads(1)
    trainer = make_trainer(Operations)
    passes = Passes(**role_models(trainer))
    outcome = trainer.run_step(prompts=prompts())
    lengths = sequence_lengths(outcome.experience)
    mean = sum(lengths[1]) / len(lengths[1])
    assert 12 < mean < 28, f"the responses should end after about 20 tokens and not at the limit, not after {mean:.1f}"
    return trainer, passes, *lengths


def products(tokens: int, asked: int) -> int:
    """Of layer weights and tokens, where the hidden states of `asked` of them are read."""
    return LAYER_WEIGHTS * tokens - BEHIND_ATTENTION * (tokens - asked)


def computed(prompt_lengths: list[int], response_lengths: list[int]) -> int:
    """Tokens that a pass over all responses computes: of a prompt, only the last token once for each response."""
    return sum(length - 1 for length in prompt_lengths[::GROUP]) + sum(length + 1 for length in response_lengths)


def squares(prompt_lengths: list[int], response_lengths: list[int]) -> int:
    """Operations of attention, as torch counts them: of prompts, and of responses over both."""
    own = sum((after + 1) * (before + after) for before, after in zip(prompt_lengths, response_lengths, strict=True))
    return 4 * LAYERS * WIDTH * (sum((length - 1) ** 2 for length in prompt_lengths[::GROUP]) + own)


def test_training_costs_the_operations_of_the_tokens_that_are_there(counted):
    """6 per weight and token, 8 in the output layer, whose logits are made twice so as never to be kept.

    A prompt is computed once for its group. Nothing that only a prompt's own tokens would need is computed behind the
    last attention.
    """
    trainer, _, prompt_lengths, response_lengths = counted
    tokens, targets = computed(prompt_lengths, response_lengths), sum(response_lengths)
    of_policy = EPOCHS * (6 * products(tokens, targets) + 8 * WIDTH * VOCABULARY * targets)
    of_value = EPOCHS * (6 * products(tokens, targets) + 6 * WIDTH * targets)
    assert trainer.counts["train_policy"].matrices == pytest.approx(of_policy, rel=0.03)
    assert trainer.counts["train_value"].matrices == pytest.approx(of_value, rel=0.03)


def test_attention_in_training_reads_each_sequence_alone_and_no_padding(counted):
    """In torch's kernel the scores are made twice: 2.5 times as much backwards as forward."""
    trainer, _, *lengths = counted
    for call in ("train_policy", "train_value"):
        assert trainer.counts[call].attention == pytest.approx(EPOCHS * 3.5 * squares(*lengths), rel=1e-6)


def test_a_rollout_runs_each_prompt_once_for_its_group_and_each_token_once(counted):
    _, passes, prompt_lengths, response_lengths = counted
    once = prompt_lengths[::GROUP]
    decoded = sum(response_lengths) - len(response_lengths)  # the last token of a response goes through no layer
    trained = EPOCHS * computed(prompt_lengths, response_lengths)
    assert passes.tokens["policy"][0] == sum(once)
    assert sum(passes.tokens["policy"]) == sum(once) + decoded + trained


def test_sampling_costs_the_operations_of_the_tokens_that_are_sampled(counted):
    trainer, _, prompt_lengths, response_lengths = counted
    through_layers = sum(prompt_lengths[::GROUP]) + sum(response_lengths) - len(response_lengths)
    heads = sum(response_lengths) - len(response_lengths) + NUM_PROMPTS
    only_read = sum(prompt_lengths[::GROUP]) - NUM_PROMPTS  # all of a prompt but its last token
    expected = 2 * products(through_layers, through_layers - only_read) + 2 * WIDTH * VOCABULARY * heads
    assert trainer.counts["generate"].matrices == pytest.approx(expected, rel=0.03)


def test_a_rollout_takes_as_many_passes_as_its_longest_response_has_tokens(counted):
    _, passes, _, response_lengths = counted
    updates = EPOCHS * -(-len(response_lengths) // MINIBATCH)
    assert len(passes.tokens["policy"]) == max(response_lengths) + updates


@pytest.mark.parametrize("role", ["reference", "reward"])
def test_a_model_that_only_judges_reads_every_token_once(counted, role):
    _, passes, prompt_lengths, response_lengths = counted
    assert passes.tokens[role] == [computed(prompt_lengths, response_lengths)]


def test_the_value_model_reads_every_token_once_and_then_once_in_each_epoch(counted):
    _, passes, prompt_lengths, response_lengths = counted
    tokens = computed(prompt_lengths, response_lengths)
    assert passes.tokens["value"][0] == tokens
    assert sum(passes.tokens["value"][1:]) == EPOCHS * tokens


def test_the_reference_makes_logits_of_response_tokens_alone(counted):
    trainer, _, prompt_lengths, response_lengths = counted
    targets = sum(response_lengths)
    expected = 2 * products(computed(prompt_lengths, response_lengths), targets) + 2 * WIDTH * VOCABULARY * targets
    assert trainer.counts["reference_logprobs"].matrices == pytest.approx(expected, rel=0.03)


@pytest.fixture(scope="module")
def live() -> dict[str, LiveBytes]:
    """Of each call of a step: the bytes and elements of what it makes."""
    return live_of_a_step(VOCABULARY)


def live_of_a_step(vocabulary: int) -> dict[str, LiveBytes]:
    torch.set_num_threads(1)
    trainer = make_trainer(LiveBytes, vocabulary=vocabulary)
    _, response_lengths = sequence_lengths(trainer.run_step(prompts=prompts()).experience)
    mean = sum(response_lengths) / len(response_lengths)
    assert MINIBATCH * mean > 1.25 * CHUNK_TOKENS, "the minibatches are too small to tell a chunk from a batch"
    return trainer.counts


def test_no_tensor_of_a_step_has_the_vocabulary_at_more_positions_than_one_chunk(live):
    """Rows of a decoding pass and chunks of the head are all that meets the vocabulary; weights are smaller here."""
    for call in ("train_policy", "reference_logprobs"):
        assert live[call].largest == CHUNK_TOKENS * VOCABULARY, call
    assert max(each.largest for each in live.values()) == CHUNK_TOKENS * VOCABULARY


@pytest.fixture(scope="module")
def grown(live: dict[str, LiveBytes]) -> dict[str, float]:
    """Call -> by how many float32 numbers its peak grows for each token that the vocabulary grows by."""
    added = 3 * VOCABULARY
    larger = live_of_a_step(VOCABULARY + added)
    return {call: (larger[call].peak - live[call].peak) / (4 * added) for call in live}


def test_a_larger_vocabulary_adds_gradients_moments_and_two_chunks_of_logits_to_training(grown):
    """Embedding and output layer of the policy: three numbers each per weight. Two chunks live at a time."""
    assert 0 < grown["train_policy"] < 1.2 * (3 * 2 * WIDTH + 2 * CHUNK_TOKENS)


def test_a_larger_vocabulary_adds_to_a_critic_the_gradient_and_moments_of_its_embedding(grown):
    assert 0 < grown["train_value"] <= 3 * WIDTH


def test_a_larger_vocabulary_adds_two_chunks_of_logits_to_the_reference_and_nothing_to_judging(grown):
    assert 0 < grown["reference_logprobs"] < 2 * CHUNK_TOKENS + 1
    assert max(grown[call] for call in ("score", "values", "experience")) < 1


def test_a_larger_vocabulary_adds_a_few_numbers_for_each_row_to_sampling(grown):
    """Logits, noise, and what is made of both; never those of more than one pass."""
    assert 0 < grown["generate"] <= 6 * NUM_PROMPTS * GROUP
