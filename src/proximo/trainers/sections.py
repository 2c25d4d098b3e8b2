"""Sections of the configuration as the plain values that the floors below take. No models are built here."""

from proximo.config.run import OptimizerConfig
from proximo.learner.optimizer import OptimizerOptions


def optimizer_options(config: OptimizerConfig) -> OptimizerOptions:
    """The learner's plain values, which have the same names."""
    return OptimizerOptions(**config.model_dump())
