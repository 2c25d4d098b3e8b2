"""What a library user imports, gathered. `proximo` itself looks names up here when they are first used."""

from proximo.config.ppo import FunctionRewardConfig, KLConfig, ModelRewardConfig, PPOConfig, RolloutConfig
from proximo.config.run import OptimizerConfig
from proximo.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    ModelError,
    ProximoError,
    RunFolderError,
    TrainingError,
    UserError,
)
from proximo.learner.own_optimizer import OwnOptimizer
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.records import Experience, Finish, Prompt, Response, Scored, ScoreState
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.weighted import WeightedReward
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.trainers.ppo import PPOTrainer

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Experience",
    "Finish",
    "FunctionReward",
    "FunctionRewardConfig",
    "KLConfig",
    "LanguageModel",
    "LocalEngine",
    "MissingExtraError",
    "ModelError",
    "ModelReward",
    "ModelRewardConfig",
    "OptimizerConfig",
    "OwnOptimizer",
    "PPOConfig",
    "PPOTrainer",
    "Prompt",
    "ProximoError",
    "RandomKey",
    "Response",
    "RolloutConfig",
    "RunFolderError",
    "SamplingOptions",
    "ScalarModel",
    "ScoreState",
    "Scored",
    "TrainingError",
    "UserError",
    "WeightedReward",
]
