"""Metrics of episodes in an environment, and of the time that they took."""

from proximo.metrics.definitions import DOWN, UP, Curve, Metric, Section, Trace, held_out
from proximo.metrics.values import Max, Mean, Sum

EPISODES = (
    Metric("environment/turns_mean", Mean, "turns").means("Mean number of turns of the policy in an episode."),
    Metric("environment/turns_max", Max, "turns").means("Number of turns of the longest episode."),
    Metric("environment/terminated_fraction", Mean, "fraction").means(
        "Fraction of episodes that the environment ended: what would follow is worth 0."
    ),
    Metric("environment/truncated_fraction", Mean, "fraction").means(
        "Fraction of episodes that the environment cut: the critic's value stands for what would follow. The rest ran "
        "into a limit of the run: turns, tokens or seconds."
    ),
    Metric("environment/policy_token_fraction", Mean, "fraction").means(
        "Fraction of the tokens after the first prompt that the policy wrote; the others are observations."
    ),
    Metric("environment/forks_mean", Mean, "forks").means(
        "Mean number of turns of an episode whose prompt did not extend the tokens before it, because the chat "
        "template leaves out earlier text. Each begins a further sequence, which is computed anew."
    ),
    Metric("environment/tool_calls_mean", Mean, "calls").means("Mean number of tools called in an episode."),
    Metric("environment/malformed_calls", Sum, "calls", DOWN).means(
        "Calls of tools that could not be read; the policy was told so."
    ),
    Metric("environment/cut_observations", Sum, "messages", DOWN).means(
        "Messages of environments that were longer than `environment.max_observation_tokens`, and cut."
    ),
    Metric("environment/info/<component>", Mean, "that of the environment").means(
        "Mean over episodes of a number in the last `info` of the environment."
    ),
    Metric("environment/faults", Sum, "episodes", DOWN).means(
        "Episodes that ended because their environment failed. They have no reward and count nowhere."
    ),
    Metric("environment/faults/<component>", Sum, "episodes", DOWN).means(
        "The same by kind: `error` (it raised), `timeout`, `died`, `memory`, `invalid` (a wrong type or size), "
        "`too_long` (a first observation that fills the conversation), `engine`; of agents also `client` (two at once "
        "under one id) and `agent` (it ended without a call)."
    ),
    Metric("environment/refused_calls", Sum, "requests", DOWN).means(
        "Requests of agents that the policy's server refused: malformed, beyond a limit, too many at once, or of a "
        "trajectory that had ended."
    ),
    Metric("environment/broken_off_calls", Sum, "calls", DOWN, repeatable=False).means(
        "Calls of agents whose client left before the answer. Their tokens are dropped."
    ),
    Metric("environment/ignored_options", Sum, "options").means(
        "Options of sampling in requests of agents that had no effect, since the run decides them; the first of each "
        "name is logged."
    ),
    Metric("environment/retries", Sum, "resets", DOWN, repeatable=False).means(
        "Resets that failed and were tried again. After three failures the episode is a fault."
    ),
    Metric("environment/environment_seconds", Sum, "seconds", DOWN, repeatable=False).means(
        "Wall-clock time that environments took in the rollouts, added up over those that worked at the same time."
    ),
    Metric("environment/model_seconds", Sum, "seconds", DOWN, repeatable=False).means(
        "Wall-clock time of the rollouts in which the model decoded. Environments may have worked meanwhile."
    ),
    Metric("environment/waiting_seconds", Sum, "seconds", DOWN, repeatable=False).means(
        "Wall-clock time of the rollouts in which the model had nothing to decode, because all episodes waited for "
        "their environments."
    ),
)

EVALUATED = (
    Metric("evaluation/turns", Mean, "turns").means("Mean number of turns of those episodes."),
    Metric("evaluation/tool_calls", Mean, "calls").means("Mean number of tools called in those episodes."),
    Metric("evaluation/malformed_calls", Sum, "calls", DOWN).means("Calls of tools in them that could not be read."),
    Metric("evaluation/info/<component>", Mean, "that of the environment", UP).means(
        "Mean over those episodes of a number in the last `info` of the environment."
    ),
)

TURNS = Curve("turns", "Turns of an episode", "turns").draws(
    Trace("environment/turns_mean", "training"),
    held_out("evaluation/turns"),
    healthy="Falls where fewer turns earn more, rises where the task takes several. At the limit of turns: the policy "
    "does not come to an end.",
)
WAITING = Curve("waiting", "Time of the rollout", "seconds", section=Section.SPEED, from_zero=True).draws(
    Trace("environment/model_seconds", "model"),
    Trace("environment/waiting_seconds", "waiting for environments"),
    healthy="Mostly the model. Much waiting: environments are slower than the model, so play more of them "
    "at once (`environment.workers`), or more episodes in a step.",
)
