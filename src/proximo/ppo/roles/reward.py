"""The reward of a PPO run: a source of scores, asked in each step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from proximo.config.ppo.options import PPOConfig
from proximo.dataflow.executor import Handler
from proximo.errors import ConfigError
from proximo.ppo.reference_answers import answer_responses
from proximo.ppo.scores import refuse_faulty
from proximo.ppo.train_state import TrainState
from proximo.records import Response, Scored, ScoreState
from proximo.rewards.source import EagerSource, RewardSource
from proximo.run.user_code import ask


class RewardWorker:
    """Gives responses their scores, and those of the answers that they are compared with."""

    role = "reward"

    def __init__(self, source: RewardSource | None, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> None:
        """`source`: None where whoever drives the trainer brings scores."""
        self.source = source
        self.tokenizer = tokenizer
        self.config = config

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """See `dataflow/executor.py::Worker`."""
        return {"score": self.score}

    def begin(self, response: Response) -> None:
        """Tell a source that can start on it of a response that has ended."""
        if (begin := eager_begin(self.source)) is not None:
            begin(response)

    def score(
        self, state: TrainState, responses: Sequence[Response], greedy: Sequence[Response] = ()
    ) -> tuple[list[Scored]]:
        """Each response with its score, and with that of the answer that the run compares it with, if it does.

        `greedy`: the most likely response to each prompt, where that is the answer. Raises TrainingError where more of
        the responses than `guards.max_unscored_fraction` could not be scored.
        """
        scored = self._ask(responses)
        if self.config.baseline_answer == "reference":
            prompts = {response.prompt.id: response.prompt for response in responses}
            scored = self.with_answer_scores(scored, answer_responses(list(prompts.values()), self.tokenizer))
        elif self.config.baseline_answer == "greedy":
            scored = self.with_answer_scores(scored, greedy)
        refuse_faulty(scored, self.config.guards, where=f"step {state.steps_done + 1}")
        return (scored,)

    def with_answer_scores(self, scored: Sequence[Scored], answers: Sequence[Response]) -> list[Scored]:
        """The same, each with the score of its prompt's answer, the first of `answers` to it.

        Where that could not be scored there is nothing to compare with: the responses count as not scored either.
        """
        once: dict[str, Response] = {}
        for answer in answers:
            once.setdefault(answer.prompt.id, answer)
        known = dict(zip(once, self._ask(list(once.values())), strict=True))
        return [_with_answer(each, known[each.response.prompt.id]) for each in scored]

    def _ask(self, responses: Sequence[Response]) -> list[Scored]:
        if self.source is None:
            raise ConfigError("this trainer has no reward source: pass scores, or pass reward to train")
        return ask(self.source, responses)


def eager_begin(source: RewardSource | None) -> Callable[[Response], None] | None:
    """What an engine tells of each response that has ended; None where nobody wants to know."""
    return source.begin if isinstance(source, EagerSource) else None


def _with_answer(scored: Scored, answer: Scored) -> Scored:
    if answer.valid or not scored.valid:
        return replace(scored, answer_score=answer.score)
    return replace(
        scored,
        state=ScoreState.INFRASTRUCTURE_FAULT,
        reason=f"the answer that it is compared with was not scored: {answer.reason}",
    )
