"""The reward of a PPO run: asks the source for the scores of responses, and of the answers that are their baselines."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from proximo.config.ppo.options import PPOConfig
from proximo.data.rendering import render_for
from proximo.data.tokenise import TextEncoder
from proximo.errors import ConfigError, DataError
from proximo.ppo.selection import check_scored_fraction
from proximo.ppo.train_state import TrainState
from proximo.records import Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.source import EagerSource, NoReward, RewardSource, checked_scores, is_eager

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


class RewardWorker:
    """The worker of the reward: scores responses and the answers that serve as their baselines."""

    role = "reward"

    def __init__(self, source: RewardSource | None, tokenizer: "PreTrainedTokenizerBase", config: PPOConfig) -> None:
        """`source`: None if the caller of the trainer passes scores."""
        self.source = source
        self.tokenizer = tokenizer
        self.config = config

    @property
    def is_scored(self) -> bool:
        """False for `NoReward`, whose scores mean nothing."""
        return not isinstance(self.source, NoReward)

    def score(self, responses: Sequence[Response], greedy: Sequence[Response], state: TrainState) -> list[Scored]:
        """Score the responses, and the baseline answers if the configuration has them.

        `greedy`: the greedy response to each prompt if that is the baseline, else none.

        Raises TrainingError if more than `guards.max_unscored_fraction` of the responses are unscored.
        """
        scored = self._ask(responses)
        if self.config.baseline_answer == "reference":
            prompts = {response.prompt.id: response.prompt for response in responses}
            scored = self.with_answer_scores(scored, answer_responses(list(prompts.values()), self.tokenizer))
        elif self.config.baseline_answer == "greedy":
            scored = self.with_answer_scores(scored, greedy)
        check_scored_fraction(scored, self.config.guards, where=f"step {state.steps_done + 1}")
        return scored

    def with_answer_scores(self, scored: Sequence[Scored], answers: Sequence[Response]) -> list[Scored]:
        """The responses with the score of their prompt's baseline, the first of `answers` to it.

        If a baseline is unscored, its responses become unscored, too.
        """
        once: dict[str, Response] = {}
        for answer in answers:
            once.setdefault(answer.prompt.id, answer)
        known = dict(zip(once, self._ask(list(once.values())), strict=True))
        return [_with_answer(s, known[s.response.prompt.id]) for s in scored]

    def _ask(self, responses: Sequence[Response]) -> list[Scored]:
        if self.source is None:
            raise ConfigError("this trainer has no reward source: pass scores, or pass reward to train")
        return checked_scores(self.source, responses)


def eager_begin(source: RewardSource | None) -> Callable[[Response], None] | None:
    """The callback for complete responses, if the source is eager; else None."""
    return source.begin if isinstance(source, EagerSource) and is_eager(source) else None


def _with_answer(scored: Scored, answer: Scored) -> Scored:
    if answer.valid or not scored.valid:
        return replace(scored, answer_score=answer.score)
    return replace(
        scored,
        state=ScoreState.INFRASTRUCTURE_FAULT,
        reason=f"the answer that it is compared with was not scored: {answer.reason}",
    )


def check_answers(prompts: Sequence[Prompt]) -> None:
    """Raises DataError if a prompt has no reference answer."""
    missing = [prompt.id for prompt in prompts if prompt.answer is None]
    if missing:
        raise DataError(
            f"score.minus_reference_answer needs a reference answer to every prompt, but {len(missing)} of "
            f"{len(prompts)} have none, first of them prompt {missing[0]!r}: name the column that holds it "
            "(in the source: `columns: {answer: <column>}`), or leave those rows out"
        )


def answer_responses(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[Response]:
    """Each prompt's reference answer as a finished response, tokenised as training on it would be.

    Raises DataError if a prompt has no reference answer.
    """
    check_answers(prompts)
    encoder = TextEncoder(tokenizer)
    return [_response(prompt, str(prompt.answer), encoder) for prompt in prompts]


def _response(prompt: Prompt, answer: str, encoder: TextEncoder) -> Response:
    is_readable = prompt.messages is not None or prompt.text is not None
    # Only the answer's tokens are used; what they are depends on what they stand behind.
    readable = prompt if is_readable else replace(prompt, text=encoder.text(prompt.token_ids))
    _, token_ids = render_for(encoder, readable, answer)
    return Response(
        prompt=prompt,
        sample_index=0,
        token_ids=token_ids,
        logprobs=torch.empty(0),
        response_mask=torch.ones(len(token_ids), dtype=torch.bool),
        finish=Finish.EOS,
        policy_version=0,
        text=answer,
    )
