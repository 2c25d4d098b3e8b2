"""Episodes of a step for people: their metrics, and transcripts for samples and the report."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proximo.message_text import count_of
from proximo.metrics.definitions import COMPONENT
from proximo.metrics.values import Max, Mean, MetricValue, Sum
from proximo.records import Episode, Finish, Response, Scored, Turn


def episode_metrics(scored: Sequence[Scored]) -> dict[str, MetricValue]:
    """The metrics of the episodes of a step. Failed ones are only counted."""
    played = [(s.response, s.response.episode) for s in scored if s.response.episode is not None]
    failures = Counter(str(each.failure).partition(":")[0] for _, each in played if each.failure is not None)
    kept = [(response, episode) for response, episode in played if response.finish is not Finish.ABORTED]
    responses, episodes = [response for response, _ in kept], [episode for _, episode in kept]
    metrics: dict[str, MetricValue] = {
        "environment/turns_mean": Mean.of(len(episode.turns) for episode in episodes),
        "environment/turns_max": Max.of(len(episode.turns) for episode in episodes),
        "environment/terminated_fraction": _share(responses, Finish.TERMINATED),
        "environment/truncated_fraction": _share(responses, Finish.TRUNCATED),
        "environment/policy_token_fraction": Mean(
            sum(int(response.response_mask.sum()) for response in responses),
            sum(len(response.token_ids) for response in responses),
        ),
        "environment/forks_mean": Mean.of(len(response.forks) for response in responses),
        "environment/tool_calls_mean": Mean.of(map(num_tool_calls, episodes)),
        "environment/malformed_calls": Sum(sum(map(num_malformed_calls, episodes))),
        "environment/cut_observations": Sum(sum(episode.num_cut_observations for episode in episodes)),
        "environment/faults": Sum(failures.total()),
    }
    metrics |= {f"environment/faults/{kind}": Sum(count) for kind, count in failures.items()}
    return metrics | _info_metrics(episodes, "environment/info/")


def evaluation_metrics(scored: Sequence[Scored]) -> dict[str, MetricValue]:
    """The metrics of held-out episodes; empty for responses without environments."""
    episodes = [s.response.episode for s in scored if s.response.episode is not None and s.valid]
    if not episodes:
        return {}
    metrics: dict[str, MetricValue] = {
        "evaluation/turns": Mean.of(len(episode.turns) for episode in episodes),
        "evaluation/tool_calls": Mean.of(map(num_tool_calls, episodes)),
        "evaluation/malformed_calls": Sum(sum(map(num_malformed_calls, episodes))),
    }
    return metrics | _info_metrics(episodes, "evaluation/info/")


def num_tool_calls(episode: Episode) -> int:
    """Tools called in an episode."""
    return sum(turn.num_tool_calls for turn in episode.turns)


def num_malformed_calls(episode: Episode) -> int:
    """Calls of tools in an episode that could not be read."""
    return sum(turn.num_malformed_calls for turn in episode.turns)


def _share(responses: Sequence[Response], finish: Finish) -> Mean:
    return Mean.of(float(response.finish is finish) for response in responses)


def _info_metrics(episodes: Iterable[Episode], prefix: str) -> dict[str, MetricValue]:
    """The mean of each number in the last infos, over the episodes that have it."""
    numbers: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.info.items():
            if _is_finite(value) and re.fullmatch(COMPONENT, name):
                numbers.setdefault(name, []).append(float(value))
    return {f"{prefix}{name}": Mean.of(values) for name, values in numbers.items()}


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number with hundreds of digits
        return False


def transcript(episode: Episode) -> str:
    """All turns of an episode as text: what the policy wrote, and what the environment answered."""
    return "\n".join(line for number, turn in enumerate(episode.turns, 1) for line in _lines(number, turn))


def _lines(number: int, turn: Turn) -> list[str]:
    calls = f", {count_of(turn.num_tool_calls, 'tool call')}" if turn.num_tool_calls else ""
    malformed = f", {turn.num_malformed_calls} malformed" if turn.num_malformed_calls else ""
    answer = f"[environment, reward {turn.reward:g}] {turn.observation}"
    return [f"[turn {number}{calls}{malformed}] {turn.text}", answer]


def episode_fields(episode: Episode, *, num_forks: int) -> Mapping[str, Any]:
    """Fields of samples.jsonl for an episode."""
    turns = [
        {
            "text": turn.text,
            "reward": turn.reward,
            "observation": turn.observation,
            "tool_calls": turn.num_tool_calls,
            "malformed_calls": turn.num_malformed_calls,
        }
        for turn in episode.turns
    ]
    fields = {"turns": turns, "forks": num_forks, "info": dict(episode.info)}
    return {"response": transcript(episode), **fields}
