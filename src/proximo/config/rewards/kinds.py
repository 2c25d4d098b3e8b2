"""The union of all reward source sections, distinguished by `kind`."""

from proximo.config.rewards.code import CodeRewardConfig
from proximo.config.rewards.maths import CountdownRewardConfig, MathsRewardConfig
from proximo.config.rewards.remote import RemoteRewardConfig
from proximo.config.rewards.sources import CustomVerifierRewardConfig, FunctionRewardConfig, ModelRewardConfig
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
"""Sources that need no model, so that they can be evaluated without being trained on."""
RewardSourceConfig = ModelRewardConfig | WatchedSourceConfig
"""All reward sources."""
