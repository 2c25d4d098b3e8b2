"""The section `reward`: all sections of reward sources, told apart by `kind`, and a file with this section alone."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from proximo.config.rewards.sources import FunctionRewardConfig, ModelRewardConfig, PRMRewardConfig, RemoteRewardConfig
from proximo.config.rewards.verifiers import (
    CodeRewardConfig,
    CountdownRewardConfig,
    CustomVerifierRewardConfig,
    MathsRewardConfig,
    PatternRewardConfig,
    ThinkAnswerRewardConfig,
)
from proximo.config.schema.base import Section

WatchedSourceConfig = (
    FunctionRewardConfig
    | CustomVerifierRewardConfig
    | CodeRewardConfig
    | MathsRewardConfig
    | CountdownRewardConfig
    | RemoteRewardConfig
    | ThinkAnswerRewardConfig
    | PatternRewardConfig
)  # fmt: skip
"""Kinds that need no model; they can also be the gold score, which is logged and not trained on."""
RewardSourceConfig = ModelRewardConfig | PRMRewardConfig | WatchedSourceConfig
"""Every kind of reward source."""


class RewardSection(Section):
    """A file that has the `reward` section of a PPO recipe alone, for `proximo serve-reward`."""

    reward: tuple[Annotated[RewardSourceConfig, Field(discriminator="kind")], ...] = Field(min_length=1)
    """What is served: the weighted sum of these sources."""

    def conflicts(self) -> Iterator[str]:
        yield from conflicts_of_names(self.reward)


def conflicts_of_names(sources: Sequence[RewardSourceConfig]) -> Iterator[str]:
    """Two sources of one name, since metrics are named after it."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        yield f"reward sources need different names, got {', '.join(names)}; give each a `name`"
