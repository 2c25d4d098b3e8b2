"""Reward functions for other trainers, made of a grader: TRL's and verl's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from proximo_verifiers.errors import DataError
from proximo_verifiers.grader import Grader
from proximo_verifiers.verifier import Answer


def trl_reward(
    grader: Grader, *, reference: str | None = "answer", columns: Iterable[str] | None = None
) -> Callable[..., list[float | None]]:
    """A reward function for TRL: `GRPOTrainer(reward_funcs=[trl_reward(grader)], ...)`.

    TRL calls it as `f(prompts=..., completions=..., **columns)`, with one entry of each list for each completion, texts
    or conversations. `reference` names the column with the reference answer; None, or a row without one, gives none.
    `columns` names those that the verifier gets as metadata: by default all others. A score is None where there is
    none: TRL leaves it out. Each row is checked when it first comes.

    The function raises DataError for a row that cannot be graded, before anything is scored.
    """
    wanted = None if columns is None else frozenset(columns)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **given: Any) -> list[float | None]:
        rows = _rows(given, len(completions))
        answers = [
            _answer(_text_of(completion), prompt, row, reference=reference, columns=wanted)
            for prompt, completion, row in zip(prompts, completions, rows, strict=True)
        ]
        names = [f"row {index} of the batch" for index in range(len(answers))]
        grader.check_rows(answers, names=names)
        return [grade.score if grade.state.has_score else None for grade in grader.grade(answers, names=names)]

    reward.__name__ = grader.name
    return reward


def verl_score(
    grader: Grader,
    *,
    reference: str | None = "ground_truth",
    columns: Iterable[str] | None = None,
    without_grade: float = 0.0,
) -> Callable[..., float]:
    """A function `compute_score(data_source, solution_str, ground_truth, extra_info)` for verl.

    The row of an answer has the columns of `extra_info`, `data_source` and `ground_truth`; `reference` and `columns`
    choose from these as in `trl_reward`. The score is `without_grade` where there is none, since verl demands a number.

    The function raises DataError for a row that cannot be graded.
    """
    wanted = None if columns is None else frozenset(columns)

    def compute_score(
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> float:
        row = {**(extra_info or {}), "data_source": data_source, "ground_truth": ground_truth}
        answers = [_answer(solution_str, "", row, reference=reference, columns=wanted)]
        grader.check_rows(answers, names=[f"an answer of {data_source}"])
        (grade,) = grader.grade(answers)
        return grade.score if grade.state.has_score else without_grade

    return compute_score


def _rows(given: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """One mapping of columns per completion. What is no list of that length is no column, such as `trainer_state`."""
    columns = {
        name: values for name, values in given.items() if isinstance(values, list | tuple) and len(values) == count
    }
    columns.pop("completion_ids", None)
    return [{name: values[index] for name, values in columns.items()} for index in range(count)]


def _answer(
    text: str, prompt: Any, row: Mapping[str, Any], *, reference: str | None, columns: frozenset[str] | None
) -> Answer:
    known = None if reference is None else row.get(reference)
    if not isinstance(known, str | int | float | None):
        raise DataError(
            f"the reference answer in column {reference!r} must be a text or a number, got {known!r:.80}: name another "
            "column with reference=..., or set reference=None if the verifier reads it by its name"
        )
    metadata = {
        name: value.tolist() if hasattr(value, "tolist") else value  # numpy's numbers and arrays
        for name, value in row.items()
        if (name != reference if columns is None else name in columns)
    }
    asked = prompt if isinstance(prompt, str) else [{**turn, "content": _text_in(turn["content"])} for turn in prompt]
    return Answer(text=text, prompt=asked, reference=None if known is None else str(known), metadata=metadata)


def _text_of(completion: Any) -> str:
    """The text of a completion: itself, or that of the last message of a conversation."""
    if isinstance(completion, str):
        return completion
    return _text_in(completion[-1]["content"]) if completion else ""


def _text_in(content: Any) -> str:
    """The text in the content of a message, which may have parts, such as images."""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())
