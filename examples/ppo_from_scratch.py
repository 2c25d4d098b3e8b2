"""PPO for language models on one page: rollout, scores, KL, advantages, two clipped updates.

    python examples/ppo_from_scratch.py

It trains a tiny Llama to repeat the digit of its prompt, in some ten seconds on a laptop. The parts are those of the
library: the engine, packed passes, the functions of `proximo.algorithms`. A test holds this page to the same weights,
bit for bit, as `PPOTrainer`, which adds everything else: guards, metrics, checkpoints, other losses.

Shapes: R responses of a step, T tokens of all of them, laid end to end without padding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from proximo.algorithms import kl, objectives
from proximo.algorithms.advantages import gae, shape_rewards
from proximo.algorithms.losses import clipped_value_loss
from proximo.algorithms.masking import standardise, value_positions
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses, plan_batches
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.records import Prompt, Response
from proximo.rollout.engine import Engine
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers of a run. `PPOConfig` has the same ones, and many more."""

    seed: int = 0
    responses_per_prompt: int = 4
    max_new_tokens: int = 8
    epochs_per_step: int = 2
    minibatch_responses: int = 16
    tokens_per_microbatch: int = 512
    policy_learning_rate: float = 1e-3
    value_learning_rate: float = 1e-3
    max_gradient_norm: float = 1.0
    kl_coefficient: float = 0.01
    gamma: float = 1.0
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step learns from."""

    responses: list[Response]
    old_logprobs: Tensor
    """[T] of the policy that wrote the tokens."""
    old_values: Tensor
    """[T] of the critic at the state before each token, before it learned."""
    advantages: Tensor
    """[T] mean 0 and variance 1."""
    returns: Tensor
    """[T] what the values should have been."""


class PPO:
    """A policy, the frozen copy of it that the KL pulls towards, a critic, and an optimizer for each that learns."""

    def __init__(self, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.settings = settings
        self.policy = policy
        self.reference = policy.frozen_copy()
        self.value = scalar_from_language_model(policy, HeadStart.ZERO, seed=settings.seed)  # its first values are 0
        self.engine: Engine = LocalEngine(policy, tokenizer, eos_token_ids=[tokenizer.convert_tokens_to_ids("<eos>")])
        self.policy_optimizer = adamw(policy, settings.policy_learning_rate)
        self.value_optimizer = adamw(self.value, settings.value_learning_rate)
        self.steps_done = 0

    def step(self, prompts: Sequence[Prompt], reward: Callable[[Sequence[Response]], list[float]]) -> float:
        """Sample, score (one number for each response), learn; returns the mean score."""
        responses = self.engine.generate(
            prompts,
            num_samples=self.settings.responses_per_prompt,
            options=SamplingOptions(temperature=1.0, max_new_tokens=self.settings.max_new_tokens),
            key=RandomKey(seed=self.settings.seed, purpose="rollout", step=self.steps_done),
        )
        scores = torch.tensor(reward(responses))
        batch = self.make_batch(responses, scores)
        for members in self.minibatches(len(responses)):
            self.update_value(batch, members)
            self.update_policy(batch, members)
        self.steps_done += 1
        return scores.mean().item()

    @torch.no_grad()
    def make_batch(self, responses: list[Response], scores: Tensor) -> Batch:
        """From scores [R] to advantages and returns."""
        settings, lengths = self.settings, [len(response.token_ids) for response in responses]
        # In float32 the sampler's log-probs are the policy's own, so there is no pass for them.
        old = torch.cat([response.logprobs for response in responses])
        reference = self.over_batches(responses, lambda packed: self.reference.response_logprobs(packed).logprobs)
        values = self.over_batches(responses, self.value.response_values, extra=1)
        mask = torch.ones(len(old), dtype=torch.bool)  # the policy wrote every token; a tool's would be False
        # The score comes with the last token, and every token pays for its distance from the reference.
        rewards = shape_rewards(kl.k1(old, reference), scores, mask, lengths, kl_coefficient=settings.kl_coefficient)
        advantages, returns = gae(
            rewards,
            values,
            mask,
            lengths,
            bootstrap=torch.zeros(len(responses), dtype=torch.bool),  # the length limit is a part of this task
            gamma=settings.gamma,
            lam=settings.gae_lambda,
        )
        return Batch(
            responses=responses,
            old_logprobs=old,
            old_values=values[value_positions(lengths)],
            advantages=standardise(advantages, mask),
            returns=returns,
        )

    def minibatches(self, num_responses: int) -> list[list[int]]:
        """The responses of each update: a new permutation in every epoch, as a function of its position in the run."""
        plan, size = [], self.settings.minibatch_responses
        for epoch in range(self.settings.epochs_per_step):
            generator = np.random.Generator(np.random.Philox(key=[self.settings.seed, (self.steps_done << 16) + epoch]))
            order = generator.permutation(num_responses).tolist()
            plan += [order[start : start + size] for start in range(0, num_responses, size)]
        return plan

    def update_policy(self, batch: Batch, members: Sequence[int]) -> None:
        """One step on the clipped objective."""

        def losses(packed: PackedResponses, tokens: Tensor) -> Tensor:
            logprobs = self.policy.response_logprobs(packed).logprobs
            old, advantages, clip = batch.old_logprobs[tokens], batch.advantages[tokens], self.settings.clip
            return objectives.ppo(logprobs, old, advantages, clip_low=clip, clip_high=clip).loss

        self.update(self.policy, self.policy_optimizer, batch, members, losses)

    def update_value(self, batch: Batch, members: Sequence[int]) -> None:
        """One step of the critic towards the returns."""

        def losses(packed: PackedResponses, tokens: Tensor) -> Tensor:
            values = self.value.token_scores(packed.packed, rows=packed.predictors)
            old, returns = batch.old_values[tokens], batch.returns[tokens]
            return clipped_value_loss(values, old, returns, clip=self.settings.value_clip)

        self.update(self.value, self.value_optimizer, batch, members, losses)

    def update(
        self,
        model: LanguageModel | ScalarModel,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        members: Sequence[int],
        losses: Callable[[PackedResponses, Tensor], Tensor],
    ) -> None:
        """One optimizer step. `losses` gives one number for each token of a micro-batch, whose indices are `tokens`.

        The denominator counts the tokens of the whole update, so that the gradient does not depend on the cut.
        """
        responses = [batch.responses[index] for index in members]
        starts = [0, *accumulate(len(each.token_ids) for each in batch.responses)]
        num_tokens = sum(len(each.token_ids) for each in responses)
        optimizer.zero_grad()
        model.model.train()
        for indices, packed in packed_batches(responses, self.settings.tokens_per_microbatch):
            tokens = torch.cat([torch.arange(starts[members[i]], starts[members[i] + 1]) for i in indices])
            (losses(packed, tokens).sum() / num_tokens).backward()
        model.model.eval()
        clip_gradients(model.model, self.settings.max_gradient_norm)
        optimizer.step()

    def over_batches(
        self, responses: Sequence[Response], run: Callable[[PackedResponses], Tensor], *, extra: int = 0
    ) -> Tensor:
        """`run` over packed batches of at most `tokens_per_microbatch`; its results in the order of the responses.

        `run` returns one number for each token of a response, and `extra` more behind them.
        """
        pieces: dict[int, Tensor] = {}
        for indices, packed in packed_batches(responses, self.settings.tokens_per_microbatch):
            sizes = [len(responses[index].token_ids) + extra for index in indices]
            pieces |= zip(indices, run(packed).split(sizes), strict=True)
        return torch.cat([pieces[index] for index in range(len(responses))])


def packed_batches(responses: Sequence[Response], token_budget: int) -> Iterator[tuple[list[int], PackedResponses]]:
    """The responses behind their prompts, end to end, in batches of at most so many tokens; each with its indices."""
    lengths = [len(response.prompt.token_ids) + len(response.token_ids) for response in responses]
    for indices in plan_batches(lengths, token_budget=token_budget):
        chosen = [responses[index] for index in indices]
        yield indices, pack_responses([r.prompt.token_ids for r in chosen], [r.token_ids for r in chosen])


def adamw(model: LanguageModel | ScalarModel, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW without weight decay."""
    weights = [weight for _, weight in model.trainable_parameters()]
    return torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)


def clip_gradients(module: nn.Module, limit: float) -> None:
    """Scale all gradients so that the norm over all of them is at most `limit`."""
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if norm > limit:
        torch._foreach_mul_(gradients, limit / norm)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Ten digits and an end, one token each."""
    vocabulary = {str(digit): digit for digit in range(10)} | {"<eos>": 10}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def make_policy() -> LanguageModel:
    """A Llama of 100,000 weights, at random."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LanguageModel(LlamaForCausalLM(LlamaConfig(vocab_size=11, eos_token_id=10, bos_token_id=None, **sizes)))


def repeats(responses: Sequence[Response]) -> list[float]:
    """The share of a response's tokens that repeat the digit of its prompt."""
    return [response.token_ids.count(response.prompt.token_ids[0]) / len(response.token_ids) for response in responses]


def main() -> None:
    """Train, and say how it goes."""
    torch.set_num_threads(1)  # so small a model gains nothing from a second one
    prompts = [Prompt(id=str(digit), token_ids=(digit,), text=str(digit)) for digit in range(10)]
    ppo = PPO(make_policy(), make_tokenizer(), Settings())
    for step in range(60):
        print(f"step {step + 1}: mean score {ppo.step(prompts, repeats):.2f}")


if __name__ == "__main__":
    main()
