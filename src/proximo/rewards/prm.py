"""The reward source of a process reward model: the probability that each step of a response is right."""

import math
from typing import TYPE_CHECKING

import torch

from proximo.algorithms.process_rewards import Aggregate, running_aggregate, step_deltas
from proximo.data.formats.prompt_response import Exchange
from proximo.data.step_examples import is_right
from proximo.data.steps import (
    DEFAULT_SEPARATOR,
    StepFinder,
    check_separator,
    encode_steps,
    split_steps,
)
from proximo.data.templates.limits import RenderingError, TemplateLimitError
from proximo.data.tokenise import TextEncoder
from proximo.errors import ConfigError, DataError
from proximo.models.scalar import ScalarModel, step_separator_of
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.model import Dense, ModelReward, Reading
from proximo.rewards.source import scored_by_token

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

COMPONENTS = ("solution", "steps", "right_steps")
"""Components logged besides the score: the aggregate over the steps, their number, and how many have a probability of
at least 1/2."""


class ProcessReward(ModelReward):
    """Judges the steps of responses with a process reward model.

    A response's text is split into steps, and the model reads them as in training: its own tokens of the whole
    solution, each step followed by the separator. Without `dense` the score is an aggregate of the steps'
    probabilities. With it each step is rewarded at the token of the response that ends it, the last step at the last
    token.

    `tokenizer` is the model's, `policy_tokenizer` the policy's; None where responses come as text only.
    """

    def __init__(
        self,
        model: ScalarModel,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        policy_tokenizer: "PreTrainedTokenizerBase | None" = None,
        step_separator: str | None = None,
        aggregate: Aggregate = "min",
        dense: Dense = "none",
        name: str = "prm",
        tokens_per_microbatch: int = 8192,
    ) -> None:
        """`step_separator`: None for the one that the model was trained with.

        Raises ConfigError for a model without one, a separator that a tokenizer cannot show, and `dense` without
        `policy_tokenizer`; ModelError for a tokenizer that is larger than the embedding of the model.
        """
        super().__init__(model, name=name, tokenizer=tokenizer, tokens_per_microbatch=tokens_per_microbatch)
        separator = step_separator or step_separator_of(model.base.config)
        if separator is None:
            raise ConfigError(
                f"the process reward model {name!r} does not say what separates steps (step_separator in its "
                f"config.json, which `proximo prm` writes): set step_separator, such as {DEFAULT_SEPARATOR!r}, or use "
                "kind: model if it judges whole responses"
            )
        if dense != "none" and policy_tokenizer is None:
            raise ConfigError(
                f"{name!r} has dense: {dense}, which rewards tokens of the policy, but responses come as text: give "
                "policy_tokenizer, or set dense: none (a reward service can only do that)"
            )
        self.separator = separator
        self.aggregate: Aggregate = aggregate
        self.step_dense: Dense = dense
        self._own = TextEncoder(tokenizer)
        self._own_finder = StepFinder(tokenizer=tokenizer, separator=separator)
        check_separator(self._own, separator)
        self._policy_finder = None
        self._shares_ids = False
        if policy_tokenizer is not None:
            check_separator(TextEncoder(policy_tokenizer), separator)
            self._policy_finder = StepFinder(tokenizer=policy_tokenizer, separator=separator)
            self._shares_ids = tokenizer.get_vocab() == policy_tokenizer.get_vocab()

    def _reading(self, response: Response) -> Reading:
        """The tokens of prompt and solution, and those that end its steps; no places for a response without a step."""
        steps = split_steps(response.text, self.separator)
        prompt = response.prompt
        asked = prompt.text if prompt.messages is None else prompt.messages
        if asked is None and not self._shares_ids:
            raise DataError(
                f"prompt '{prompt.id}' has token ids only; the tokenizer '{self._own.name}' of {self.name!r} is not "
                "the policy's, so it needs text or messages"
            )
        if not steps:
            return Reading()
        exchange = Exchange(
            origin=f"prompt '{prompt.id}'",
            prompt=self._own.text(prompt.token_ids) if asked is None else asked,
            template_variables=prompt.template_variables,
        )
        try:
            (encoded,) = encode_steps(self._own, [(exchange, steps)], self._own_finder)
        except (RenderingError, TemplateLimitError) as error:
            return Reading(refusal=f"{self.name}: {error}")
        if encoded is None:
            return Reading(refusal=f"{self.name}: the tokenizer '{self._own.name}' puts two steps into one token")
        prompt_ids = prompt.token_ids if asked is None else encoded.prompt_ids
        places = [len(prompt_ids) + end for end in encoded.ends]
        return Reading(prompt_ids=prompt_ids, response_ids=encoded.response_ids, places=places)

    def _scored(self, response: Response, scores: list[float], reason: str) -> Scored:
        if not split_steps(response.text, self.separator):
            nothing = dict.fromkeys(COMPONENTS, 0.0)
            reason, fault = "the response has no step", ScoreState.MODEL_FAULT
            return Scored(response=response, score=0.0, components=nothing, state=fault, reason=reason)
        if not scores or not all(map(math.isfinite, scores)):
            reason = f"{self.name} gave a step a score that is not a finite number" if scores else reason
            return Scored(response=response, score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason=reason)
        probabilities = torch.tensor(scores, dtype=torch.float64).sigmoid()
        aggregates = running_aggregate(probabilities, self.aggregate)
        solution, num_right = aggregates[-1].item(), sum(map(is_right, probabilities.tolist()))
        components = dict(zip(COMPONENTS, (solution, float(len(scores)), float(num_right)), strict=True))
        if self.step_dense == "none" or not response.token_ids:
            return Scored(response=response, score=solution, components=components)
        earned = (step_deltas(aggregates) if self.step_dense == "deltas" else probabilities).tolist()
        rewards = [0.0] * len(response.token_ids)
        for place, reward in zip(self._places(response, len(earned)), earned, strict=True):
            rewards[place] += reward
        return scored_by_token(response, rewards, name=self.name, components=components)

    def _places(self, response: Response, num_steps: int) -> list[int]:
        """For each step the index of the response's token that ends it; that of the last step is the last token."""
        assert self._policy_finder is not None, "dense rewards need the policy's tokenizer"
        last = len(response.token_ids) - 1
        found = self._policy_finder.ends(response.token_ids)[: num_steps - 1]
        return [*found, *[last] * (num_steps - len(found))]
