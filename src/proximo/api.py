"""The names for library users. `proximo` looks names up here when they are first used."""

from proximo.algorithms.controllers import AdaptiveKLController, ConstantKLController
from proximo.commands.library.saved_run import SavedRun, compare
from proximo.commands.library.training import Training
from proximo.config.ppo.options import PPOConfig, RolloutConfig
from proximo.config.rewards.sources import FunctionRewardConfig, ModelRewardConfig
from proximo.config.run import OptimizerConfig
from proximo.config.shipped import shipped_recipe, shipped_recipes
from proximo.distributed.join import join
from proximo.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    ModelError,
    ProximoError,
    RankError,
    RunFolderError,
    TrainingError,
    UserError,
)
from proximo.learner.optimizers import OwnOptimizer
from proximo.metrics.sinks import Sink, TrackedRun
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.scalar import ScalarModel
from proximo.ppo.calls import OwnCall
from proximo.ppo.rollout_tensordict import rollout_tensordict
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Experience, Finish, Prompt, Response, SamplingMask, Scored, ScoreState
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward
from proximo.rewards.prm import ProcessReward
from proximo.rewards.source import NoReward
from proximo.rewards.weighted import WeightedReward
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.run.make.environments import PythonAgent, PythonEnvironment

__all__ = [
    "AdaptiveKLController",
    "CheckpointError",
    "ConfigError",
    "ConstantKLController",
    "DataError",
    "Experience",
    "Finish",
    "FunctionReward",
    "FunctionRewardConfig",
    "LanguageModel",
    "LocalEngine",
    "MissingExtraError",
    "ModelError",
    "ModelReward",
    "ModelRewardConfig",
    "NoReward",
    "OptimizerConfig",
    "OwnCall",
    "OwnOptimizer",
    "PPOConfig",
    "PPOTrainer",
    "Precision",
    "ProcessReward",
    "Prompt",
    "ProximoError",
    "PythonAgent",
    "PythonEnvironment",
    "RandomKey",
    "RankError",
    "Response",
    "RolloutConfig",
    "RunFolderError",
    "SamplingMask",
    "SamplingOptions",
    "SavedRun",
    "ScalarModel",
    "ScoreState",
    "Scored",
    "Sink",
    "TrackedRun",
    "Training",
    "TrainingError",
    "UserError",
    "WeightedReward",
    "compare",
    "join",
    "rollout_tensordict",
    "shipped_recipe",
    "shipped_recipes",
]
