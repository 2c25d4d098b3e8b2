"""Scoring what was sampled, and keeping the best of it. Not what becomes of a score: that is shaped_scores.py."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from proximo.errors import DataError
from proximo.ppo.experience import counts
from proximo.ppo.reference_answers import answer_responses, with_answer_scores
from proximo.ppo.roles.inference import InferenceCalls
from proximo.ppo.score_guards import refuse_faulty
from proximo.ppo.shaped_scores import has_score
from proximo.records import Response, Scored


def score_responses(
    responses: Sequence[Response],
    calls: InferenceCalls,
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
    greedy: Sequence[Response] = (),
) -> list[Scored]:
    """Each response with its score, and with that of the answer that the run compares it with, if it does.

    `greedy`: the most likely response to each prompt, where that is the answer. Raises TrainingError where more of the
    responses than `guards.max_faulty_fraction` could not be scored.
    """
    (scored,) = calls.score(responses)
    if calls.config.baseline_answer == "reference":
        prompts = {response.prompt.id: response.prompt for response in responses}
        scored = with_answer_scores(scored, answer_responses(list(prompts.values()), tokenizer), calls)
    elif calls.config.baseline_answer == "greedy":
        scored = with_answer_scores(scored, greedy, calls)
    refuse_faulty(scored, calls.config.guards, where=f"step {step}")
    return scored


def keep_best(candidates: Sequence[Scored], calls: InferenceCalls) -> list[Scored]:
    """Of the `samples_per_prompt` responses to each prompt the `responses_per_prompt` best, in the order sampled.

    The best by the score as the sources gave it; what would count nowhere or has no score comes last. Raises DataError
    where a prompt has another number of responses.
    """
    config = calls.config
    size = config.sampled_per_prompt
    groups = [candidates[start : start + size] for start in range(0, len(candidates), size)]
    if any(len(group) != size or len({s.response.prompt.id for s in group}) > 1 for group in groups):
        raise DataError(
            f"with samples_per_prompt = {size} a step chooses among {size} responses to each prompt, one prompt after "
            f"the other; it was given {len(candidates)} responses that do not come in such groups"
        )
    kept = [
        best_of(group, config.responses_per_prompt, lambda s: counts(s, config) and has_score(s, config))
        for group in groups
    ]
    return [each for group in kept for each in group]


def best_of(group: Sequence[Scored], num_kept: int, has_say: Callable[[Scored], bool]) -> list[Scored]:
    """The `num_kept` with the highest scores, in their own order; of equals the first, and last what has no say."""

    def rank(index: int) -> tuple[bool, float]:
        has = has_say(group[index])
        return not has, -group[index].score if has else 0.0

    best = sorted(range(len(group)), key=rank)[:num_kept]
    return [group[index] for index in sorted(best)]
