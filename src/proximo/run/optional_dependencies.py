"""Checks that the optional packages a recipe needs are installed. Imports neither them nor torch."""

import os
from importlib.util import find_spec

from proximo.config.recipe import Recipe
from proximo.config.run import RunConfig
from proximo.config.sinks import SinkConfig
from proximo.errors import MissingExtraError

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Kind of sink -> the module that it imports. The extra is named after the kind."""
SERVERS = ("http://", "https://", "databricks", "uc:")
"""Prefixes of the addresses that mlflow-skinny can reach."""


def check_extras_of(recipe: Recipe) -> None:
    """Calls `check_extras` for every stage."""
    for _, stage in recipe.given_stages():
        check_extras(stage.run)


def check_extras(run: RunConfig) -> None:
    """Raises MissingExtraError with the name of the extra if the package of a sink is not installed."""
    for index, sink in enumerate(run.sinks):
        if problem := _problem(sink):
            raise MissingExtraError(
                f"run.sinks.{index} is of kind {sink.kind}, {problem}: run pip install 'proximo[{sink.kind}]', or "
                "leave the sink out"
            )


def _problem(sink: SinkConfig) -> str | None:
    if sink.kind not in PACKAGES:
        return None
    if find_spec(PACKAGES[sink.kind]) is None:
        return "whose package is not installed"
    to_server = os.environ.get("MLFLOW_TRACKING_URI", "").startswith(SERVERS)
    if sink.kind == "mlflow" and not to_server and find_spec("sqlalchemy") is None:
        return "of which only mlflow-skinny is installed, which writes to a tracking server alone"
    return None
