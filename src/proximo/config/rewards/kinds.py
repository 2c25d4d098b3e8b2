"""The union of all reward source sections, discriminated by `kind`."""

from proximo.config.rewards.code import CodeRewardConfig
from proximo.config.rewards.maths import CountdownRewardConfig, MathsRewardConfig
from proximo.config.rewards.remote import RemoteRewardConfig
from proximo.config.rewards.sources import (
    CustomVerifierRewardConfig,
    FunctionRewardConfig,
    ModelRewardConfig,
    PRMRewardConfig,
)
from proximo.config.rewards.texts import (
    JSONSchemaRewardConfig,
    LengthRewardConfig,
    PatternRewardConfig,
    RepetitionRewardConfig,
    ThinkAnswerRewardConfig,
)

WatchedSourceConfig = (
    FunctionRewardConfig
    | CustomVerifierRewardConfig
    | CodeRewardConfig
    | MathsRewardConfig
    | CountdownRewardConfig
    | RemoteRewardConfig
    | ThinkAnswerRewardConfig
    | PatternRewardConfig
    | JSONSchemaRewardConfig
    | LengthRewardConfig
    | RepetitionRewardConfig
)  # fmt: skip
"""Kinds that need no model; they can also be the gold score, which is logged and not trained on."""
RewardSourceConfig = ModelRewardConfig | PRMRewardConfig | WatchedSourceConfig
"""Every kind of reward source."""
