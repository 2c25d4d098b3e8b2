"""The generators of reasoning-gym: one question, one answer."""

from collections.abc import Mapping
from typing import Any

from proximo.environments.adapters import package

reasoning_gym = package("reasoning_gym", "reasoning-gym")
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError)
"""What scorers raise for answers that they cannot read."""


class ReasoningGym:
    """Questions of a generator, by its name. The seed says which."""

    def __init__(self, id: str, kwargs: Mapping[str, Any]) -> None:
        self._id, self._kwargs = id, dict(kwargs)
        self.reset(0, {})  # settings that a generator refuses are an error before the first episode

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Asks the one question that the generator makes of this seed."""
        self._questions = reasoning_gym.create_dataset(self._id, seed=seed, size=1, **self._kwargs)
        self._entry = self._questions[0]
        return self._entry["question"], {}

    def step(self, text: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Scores the text between the last <answer> and </answer>; the whole text where there are none."""
        found = reasoning_gym.utils.extract_answer(text)
        answer = text.strip() if found is None else found
        try:
            score, unreadable = float(self._questions.score_answer(answer, self._entry)), 0
        except UNREADABLE:
            score, unreadable = 0.0, 1
        return "", score, True, False, {"correct": float(score == 1.0), "unreadable_answers": unreadable}
