"""From calls of the policy and answers of an environment to one Response: tokens, mask, forks, turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from proximo.environments.environment import EnvironmentStep, Observation
from proximo.records import Episode, Finish, Fork, Message, Prompt, Response, SamplingMask, Turn
from proximo.rollout.engine import versions_of_tokens
from proximo.rollout.session import ModelCall


@dataclass(kw_only=True)
class Trajectory:
    """An episode that is being played, as flat tokens.

    A call whose prompt extends all ids before it continues their sequence: what came between is the environment's, and
    not in the mask. Any other prompt begins a further sequence, a fork, whose context adds no token.
    """

    prompt: Prompt
    """With the ids of the first observation."""
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    sampling_masks: list[tuple[SamplingMask | None, int]] = field(default_factory=list)
    """Those of successive tokens, each with their number."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the policy, each with the index of its first token."""
    forks: list[Fork] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    last: EnvironmentStep | None = None
    """The environment's last answer."""
    num_cut_observations: int = 0
    _sequence: list[int] = field(default_factory=list)
    """All ids of the current sequence, its context included."""

    def __post_init__(self) -> None:
        self._sequence = list(self.prompt.token_ids)

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(self.mask)

    def add_call(self, call: ModelCall, text: str, message: Message | None = None) -> None:
        """Append what the policy read and wrote. `text`: what the environment is given; `message`: as a message, None
        for one of the text.
        """
        self.add_prompt(call.request.token_ids)
        start = len(self.token_ids)
        self._append(call.token_ids, call.logprobs, is_policy=True, sampling_mask=call.sampling_mask)
        self.versions += [(version, start + first) for version, first in call.versions]
        said = {"role": "assistant", "content": text} if message is None else message
        self.turns.append(Turn(start=start, end=len(self.token_ids), text=text, messages=(said,)))

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Append what came before a call, or after the last one."""
        if (known := self.num_known(token_ids)) is not None:
            added = token_ids[known:]
            self._append(added, [0.0] * len(added), is_policy=False)
        else:
            self.forks.append(Fork(start=len(self.token_ids), context=tuple(token_ids)))
            self._sequence = list(token_ids)

    def num_known(self, token_ids: Sequence[int]) -> int | None:
        """How many of these ids came before, if they begin with all ids of the current sequence; None if they fork."""
        known = len(self._sequence)
        return known if list(token_ids[:known]) == self._sequence else None

    def _append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        is_policy: bool,
        sampling_mask: SamplingMask | None = None,
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.mask += [is_policy] * len(token_ids)
        self.sampling_masks.append((sampling_mask, len(token_ids)))
        self._sequence += token_ids

    def add_answer(self, step: EnvironmentStep) -> None:
        """Note the environment's answer to the last turn."""
        self.last = step
        self.turns[-1] = replace(
            self.turns[-1],
            reward=step.reward,
            observation=as_text(step.observation),
            messages=(*self.turns[-1].messages[:1], *as_messages(step.observation)),
            num_tool_calls=_count(step, TOOL_CALLS),
            num_malformed_calls=_count(step, MALFORMED_CALLS),
        )

    def response(self, finish: Finish, *, failure: str | None = None) -> Response:
        """The record of the trajectory. Without a token its version is 0."""
        versions = versions_of_tokens(self.versions, len(self.token_ids)) if self.versions else ()
        return Response(
            prompt=self.prompt,
            sample_index=self.sample_index,
            token_ids=tuple(self.token_ids),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            response_mask=torch.tensor(self.mask, dtype=torch.bool),
            finish=finish,
            policy_version=versions[0] if versions else 0,
            text=self.turns[-1].text if self.turns else "",
            token_versions=versions if len(set(versions)) > 1 else None,
            forks=tuple(self.forks),
            episode=Episode(
                turns=tuple(self.turns),
                info={} if self.last is None else dict(self.last.info),
                failure=failure,
                num_cut_observations=self.num_cut_observations,
            ),
            sampling_mask=SamplingMask.of(self.sampling_masks),
        )


TOOL_CALLS = "tool_calls"
"""Key of `info`: how many tools the policy called in this turn."""
MALFORMED_CALLS = "malformed_calls"
"""Key of `info`: how many calls of tools could not be read."""


def _count(step: EnvironmentStep, key: str) -> int:
    """A whole number of `info`; 0 where an environment has something else of its own under that name."""
    value = step.info.get(key)
    return value if isinstance(value, int) else 0


def with_observation(prompt: Prompt, observation: Observation, token_ids: Sequence[int]) -> Prompt:
    """The prompt of a trajectory: the row that it was begun with, and what the policy read first."""
    if isinstance(observation, str):
        return replace(prompt, token_ids=tuple(token_ids), text=observation)
    return replace(prompt, token_ids=tuple(token_ids), messages=tuple(observation))


def as_messages(observation: Observation) -> tuple[Message, ...]:
    """An observation as messages: a text is one of the user."""
    return ({"role": "user", "content": observation},) if isinstance(observation, str) else tuple(observation)


def as_text(observation: Observation) -> str:
    """An observation for people."""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message.get('content')}" for message in observation)
