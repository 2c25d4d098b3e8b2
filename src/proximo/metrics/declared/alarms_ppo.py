"""The rules by which a report raises alarms about a PPO run. Thresholds are meant to be late rather than wrong."""

from proximo.metrics.alarms import Rule, Severity, correlation, counted, fifth_noise, fifths
from proximo.metrics.formatting import format_number as number
from proximo.metrics.run_files import Run, Series

MIN_CORRELATED_SAMPLES = 30
USELESS_VARIANCE = 0.01
MIN_STEPS = 10
"""Of which rules speak that compare two trends."""


def _score_up_gold_down(run: Run) -> str | None:
    for score_name, gold_name in (("score/mean", "gold/mean"), ("evaluation/score", "evaluation/gold")):
        score, gold = run.series(score_name), run.series(gold_name)
        scores, golds = fifths(score), fifths(gold)
        if scores is None or golds is None:
            continue
        peak = golds.index(max(golds))
        fall = golds[peak] - golds[-1]
        if fall > 5 * fifth_noise(gold) and fall > 0.05 * (max(golds) - min(golds)) and scores[-1] > scores[peak]:
            return (
                f"Since its best fifth, gold fell from {number(golds[peak])} to {number(golds[-1])}, "
                f"while the score rose from {number(scores[peak])} to {number(scores[-1])}."
            )
    return None


def _score_flat(run: Run) -> str | None:
    score = run.series("score/mean")
    means = fifths(score)
    if means is None or len(score) < 10 or means[-1] - means[0] > 2 * fifth_noise(score):
        return None
    return f"It was {number(means[0])} in the first fifth and is {number(means[-1])} in the last."


def _kl_rises_fast(run: Run) -> str | None:
    means = fifths(run.series("kl/sequence"))
    if means is None or means[-1] <= 5 or means[-1] <= 2 * max(means[-2], 0):
        return None
    return f"{number(means[-1])} nats per answer in the last fifth, {number(means[-2])} in the one before."


def _kl_negative(run: Run) -> str | None:
    means = fifths(run.series("kl/sequence"))
    return f"Its mean is {number(means[-1])} nats in the last fifth." if means and means[-1] < -0.5 else None


def _entropy_collapses(run: Run) -> str | None:
    means = fifths(run.series("policy/entropy"))
    if means is None or means[0] <= 0 or means[-1] >= 0.2 * means[0]:
        return None
    return f"From {number(means[0])} to {number(means[-1])} nats per token."


def _clip_fraction_high(run: Run) -> str | None:
    means = fifths(run.series("policy/clip_fraction"))
    return f"{means[-1]:.0%} of tokens are clipped in the last fifth." if means and means[-1] > 0.3 else None


def _hardly_moves(run: Run) -> str | None:
    clipped, moved = fifths(run.series("policy/clip_fraction")), fifths(run.series("policy/approx_kl"))
    if clipped is None or moved is None or max(clipped) > 0 or max(moved) > 1e-5:
        return None
    return f"No token was ever clipped, and a step moves it by {number(max(moved))} nats per token at most."


def _critic_useless(run: Run) -> str | None:
    means = fifths(run.series("value/explained_variance"))
    return f"It is {number(means[-1])} in the last fifth." if means and means[-1] <= USELESS_VARIANCE else None


def _all_cut_off(run: Run) -> str | None:
    means = fifths(run.series("response/finished_fraction"))
    return f"{means[-1]:.0%} of answers end by themselves." if means and means[-1] < 0.1 else None


def _repeats_itself(run: Run) -> str | None:
    means = fifths(run.series("response/distinct_2"))
    if means is None or means[-1] >= 0.5 * means[0]:
        return None
    return f"Distinct-2 fell from {number(means[0])} to {number(means[-1])}."


def _score_follows_length(run: Run) -> str | None:
    samples = run.samples.training or run.samples.last_evaluation or run.samples.first_evaluation
    pairs = [
        (float(sample.num_tokens), sample.score)
        for sample in samples
        if sample.num_tokens is not None and sample.score is not None
    ]
    r = correlation(pairs) if len(pairs) >= MIN_CORRELATED_SAMPLES else None
    if r is None or abs(r) < 0.7:
        return None
    return f"Over the {len(pairs)} newest samples the correlation of length and score is {r:+.2f}."


def _groups_dead(run: Run) -> str | None:
    means = fifths(run.series("group/equal_fraction"))
    return f"{means[-1]:.0%} of prompts in the last fifth." if means and means[-1] > 0.5 else None


def _form_saturates(run: Run) -> str | None:
    """Only where `ppo.outcome` says which number is the task: of parts alone nobody can tell which is the form."""
    outcome = run.series("score/outcome_mean")
    if len(outcome) < MIN_STEPS or not _is_flat(outcome):
        return None
    for name in run.names:
        part = run.series(name)
        means = fifths(part) if name.startswith("score/") and name.count("/") == 2 else None
        if means is None or not _rises(part):
            continue
        if abs(means[-1] - means[-2]) <= 0.1 * (means[-1] - means[0]):
            return (
                f"{name} went from {number(means[0])} to {number(means[-1])} and has levelled off, while the outcome "
                f"was {number(_ends(outcome)[0])} and is {number(_ends(outcome)[1])}."
            )
    return None


def _paid_for_length(run: Run) -> str | None:
    tokens, score, outcome = (run.series(name) for name in ("response/tokens_mean", "score/mean", "score/outcome_mean"))
    if min(len(tokens), len(score)) < MIN_STEPS or not _rises(score) or (len(outcome) and not _is_flat(outcome)):
        return None
    (short, long), (low, high) = _ends(tokens), _ends(score)
    if long < 1.5 * short:
        return None
    return f"From {number(short)} to {number(long)} tokens, with a score from {number(low)} to {number(high)}."


def _in_circles(run: Run) -> str | None:
    means = fifths(run.series("response/repeated_4"))
    if means is None or means[-1] <= 0.3 or means[-1] <= 2 * means[0]:
        return None
    return f"{means[-1]:.0%} of a response stood in it before; it was {means[0]:.0%} in the first fifth."


def _rises(series: Series) -> bool:
    first, last = _ends(series)
    return last - first > 5 * fifth_noise(series)


def _is_flat(series: Series) -> bool:
    first, last = _ends(series)
    return last - first <= 2 * fifth_noise(series)


def _ends(series: Series) -> tuple[float, float]:
    """The means of the first and the last fifth, of five steps or more."""
    means = fifths(series)
    assert means is not None
    return means[0], means[-1]


PPO_RULES = (
    Rule(
        title="The score rises while the gold score falls",
        when="gold is below its best fifth by more than its noise, with a score above that fifth's",
        advice="The policy exploits the reward model. Stop at the best gold score, raise the KL coefficient, or train "
        "the reward model on answers like these.",
        severity=Severity.PROBLEM,
        check=_score_up_gold_down,
    ),
    Rule(
        title="The score does not rise",
        when="the last fifth of score/mean is not above the first by more than its noise (ten steps or more)",
        advice="Look at the clip fraction: at 0, raise the learning rate. Then at the KL coefficient, and at whether "
        "answers to one prompt differ in score at all.",
        severity=Severity.WARNING,
        check=_score_flat,
    ),
    Rule(
        title="KL rises fast",
        when="kl/sequence is above 5 nats in the last fifth, and more than twice the fifth before",
        advice="Lower the learning rate or the epochs per step, or raise the KL coefficient.",
        severity=Severity.WARNING,
        check=_kl_rises_fast,
    ),
    Rule(
        title="KL is negative",
        when="kl/sequence is below -0.5 nats in the last fifth",
        advice="A mean below 0 means that answers are not drawn from the distribution that scores them: look for "
        "top-k, top-p, min tokens, dropout, or a reference with other settings.",
        severity=Severity.PROBLEM,
        check=_kl_negative,
    ),
    Rule(
        title="Entropy collapses",
        when="policy/entropy in the last fifth is below a fifth of what it was in the first",
        advice="The policy nearly always says the same. Stop earlier, raise the KL coefficient or lower the learning "
        "rate.",
        severity=Severity.WARNING,
        check=_entropy_collapses,
    ),
    Rule(
        title="The clip fraction is high",
        when="policy/clip_fraction is above 0.3 in the last fifth",
        advice="Updates are too large: lower the learning rate, the epochs per step, or take larger minibatches.",
        severity=Severity.WARNING,
        check=_clip_fraction_high,
    ),
    Rule(
        title="The policy hardly moves",
        when="no token is ever clipped and policy/approx_kl stays below 0.00001",
        advice="Raise the learning rate, and check that the advantages are not all 0.",
        severity=Severity.WARNING,
        check=_hardly_moves,
    ),
    Rule(
        title="The critic is no better than a constant",
        when="value/explained_variance is at or below 0.01 in the last fifth",
        advice="Raise the value model's learning rate, start it from the reward model, or let it train first.",
        severity=Severity.WARNING,
        check=_critic_useless,
    ),
    Rule(
        title="Nearly all answers are cut at the limit",
        when="response/finished_fraction is below 0.1 in the last fifth",
        advice="Raise the limit of new tokens, or check that the policy has learned to end its answers (the "
        "end-of-sequence token must be in the SFT data). Harmless where answers are meant to have a fixed length.",
        severity=Severity.WARNING,
        check=_all_cut_off,
    ),
    Rule(
        title="The policy repeats itself",
        when="response/distinct_2 in the last fifth is below half of what it was in the first",
        advice="Read the samples. A score that a repeated phrase can raise needs a KL coefficient that makes it "
        "dear, or a better reward model.",
        severity=Severity.WARNING,
        check=_repeats_itself,
    ),
    Rule(
        title="Score and length go together",
        when=f"the correlation over {MIN_CORRELATED_SAMPLES} or more of the newest samples is 0.7 or more, either way",
        advice="The reward may be paying for length. Compare answers of equal length, or take length out of it.",
        severity=Severity.WARNING,
        check=_score_follows_length,
    ),
    Rule(
        title="Most groups teach nothing",
        when="group/equal_fraction is above 0.5 in the last fifth",
        advice="All answers to a prompt are right, or all are wrong: take prompts of middling difficulty (`proximo "
        "rate` measures it, data.filter chooses by it), or more answers each. `ppo.advantage.equal_groups: exclude` "
        "keeps the others from being drowned.",
        severity=Severity.WARNING,
        check=_groups_dead,
    ),
    Rule(
        title="Form is rewarded and the task is not solved",
        when="a part of the score rose by more than its noise and levelled off, while score/outcome_mean is not above "
        "its first fifth by more than its noise (ten steps or more; needs ppo.outcome)",
        advice="The policy has learned what the form pays, and stops there. Lower the weight of that part, pay it only "
        "where the answer is right, or start from a policy that solves some of the prompts.",
        severity=Severity.WARNING,
        check=_form_saturates,
    ),
    Rule(
        title="The score rises with the length of answers",
        when="response/tokens_mean is half as long again as in the first fifth and score/mean is above it by more "
        "than its noise, while score/outcome_mean, where there is one, is not (ten steps or more)",
        advice="Read the samples: longer reasoning can be the reason, or padding that the reward pays for. Name the "
        "task with ppo.outcome, and add a penalty of length (docs/rewards.md).",
        severity=Severity.WARNING,
        check=_paid_for_length,
    ),
    Rule(
        title="Answers go round in circles",
        when="response/repeated_4 is above 0.3 in the last fifth, and more than twice that of the first",
        advice="A phrase that is said again and again earns something, or nothing makes an answer end. Read the "
        "samples, add a penalty of repetition, or raise the KL coefficient.",
        severity=Severity.WARNING,
        check=_in_circles,
    ),
    Rule(
        title="The sampler and the learner disagree",
        when="a step's first minibatch was beyond the limits of its check",
        advice="Before any update both are the same weights. Look for another precision, dropout, or sampling "
        "settings that change the distribution.",
        severity=Severity.PROBLEM,
        check=lambda run: counted(run, "first_minibatch/refused"),
    ),
    Rule(
        title="Responses were left out",
        when="response/faulty is above 0 anywhere",
        advice="The log says why: a reward source that fails, or an engine that gives up.",
        severity=Severity.WARNING,
        check=lambda run: counted(run, "response/faulty"),
    ),
)
