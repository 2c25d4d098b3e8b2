"""The rules for DPO. Not those that every run has: see alarms_other."""

from proximo.metrics.alarms import Rule, Severity
from proximo.metrics.declared.alarms_other import (
    HELD_OUT_RULE,
    UNLEARNED,
    UNLIKELY,
    coin_rule,
    gap_rule,
    leap_rule,
    still_rule,
)
from proximo.metrics.declared.supervised_checks import STILL_PAIRS, newest_evaluation
from proximo.metrics.formatting import format_number as number
from proximo.metrics.run_files import Run


def _chosen_become_unlikely(run: Run) -> str | None:
    logprobs, newest = run.series("evaluation/logprob_chosen"), newest_evaluation(run, "evaluation/logprob_chosen")
    if len(logprobs) < 2 or newest is None:
        return None
    first, last = logprobs.values[0], newest[1]
    if last >= 1.25 * first:  # both are negative
        return None
    return f"From {number(first)} to {number(last)} nats per answer at step {newest[0]}."


DPO_RULES = (
    leap_rule("dpo/loss", "dpo.optimizer"),
    still_rule("dpo/loss", "dpo.optimizer", STILL_PAIRS),
    coin_rule(
        UNLEARNED,
        "Nothing that holds beyond the training pairs was learned: raise the learning rate if the margin stays near 0; "
        "else check that chosen and rejected are not mixed up, and that both survive the length limit.",
        "dpo/accuracy",
        *("dpo", "optimizer", "learning_rate"),
    ),
    gap_rule("dpo/accuracy", "Fewer epochs, a lower learning rate, a larger dpo.beta, label smoothing, or more pairs."),
    Rule(
        title=UNLIKELY,
        when="in the second half of the run evaluation/logprob_chosen is more than a quarter of its size below its "
        "start",
        advice="The margin was won by pushing both answers down, and the likelihood went to texts that are in no pair. "
        "Raise dpo.beta, lower the learning rate or the passes, or fine-tune on the chosen answers first.",
        severity=Severity.WARNING,
        check=_chosen_become_unlikely,
    ),
    HELD_OUT_RULE,
)
