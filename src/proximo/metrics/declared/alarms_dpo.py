"""The rules for DPO. Not those that every run has: see alarms_other."""

from proximo.metrics.alarms import Rule, Severity
from proximo.metrics.declared.alarms_other import (
    HELD_OUT_RULE,
    UNLEARNED,
    UNLIKELY,
    accuracy_gap,
    leap_rule,
    no_better_than_a_coin,
)
from proximo.metrics.formatting import format_number as number
from proximo.metrics.run_files import Run


def _chosen_become_unlikely(run: Run) -> str | None:
    logprobs = run.series("evaluation/logprob_chosen")
    if len(logprobs) < 2:
        return None
    first, last = logprobs.values[0], logprobs.values[-1]
    if last >= 1.25 * first:  # both are negative
        return None
    return f"From {number(first)} to {number(last)} nats per answer."


DPO_RULES = (
    leap_rule("dpo/loss", "dpo.optimizer"),
    Rule(
        title=UNLEARNED,
        when="evaluation/pair_accuracy ends below 0.55",
        advice="Nothing that holds beyond the training pairs was learned: raise the learning rate if the margin stays "
        "near 0; else check that chosen and rejected are not mixed up, and that both survive the length limit.",
        severity=Severity.PROBLEM,
        check=lambda run: no_better_than_a_coin(run, "dpo/accuracy", "dpo", "optimizer", "learning_rate"),
        trend=True,
    ),
    Rule(
        title=UNLIKELY,
        when="evaluation/logprob_chosen ends more than a quarter of its size below its start",
        advice="The margin was won by pushing both answers down, and the likelihood went to texts that are in no pair. "
        "Raise dpo.beta, lower the learning rate or the passes, or fine-tune on the chosen answers first.",
        severity=Severity.WARNING,
        check=_chosen_become_unlikely,
        trend=True,
    ),
    Rule(
        title="Accuracy is much higher in training than held out",
        when="dpo/accuracy in its last fifth is more than 0.15 above the last evaluation/pair_accuracy",
        advice="Fewer epochs, a lower learning rate, a larger dpo.beta, label smoothing, or more pairs.",
        severity=Severity.WARNING,
        check=lambda run: accuracy_gap(run, "dpo/accuracy"),
        trend=True,
    ),
    HELD_OUT_RULE,
)
