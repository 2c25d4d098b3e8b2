"""All kinds of reward sources, told apart by `kind`, each on a line of its own. What one is, its own file says."""

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
"""The kinds that need no model: they may be watched without being trained on."""
RewardSourceConfig = ModelRewardConfig | WatchedSourceConfig
"""All kinds."""
