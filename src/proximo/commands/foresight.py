"""What the files of this machine tell of a run before it begins, for `--dry-run`. Imports no torch."""

import json
import sys
from collections.abc import Iterator, Mapping
from ctypes import CDLL
from importlib.metadata import version
from pathlib import Path
from typing import Any

from proximo.config.recipes import DPORecipe, PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import ModelConfig, RunConfig, ScalarModelConfig
from proximo.config.schema.base import Section
from proximo.errors import ConfigError
from proximo.run.build.data import SplitRows, read_split
from proximo.run.preflight import data_inputs

MOST_BYTES = 256 * 2**20
"""Data of more than this is not read for its number of rows."""
Stage = SFTRecipe | RewardRecipe | DPORecipe | PPORecipe


def rows_of(stage: Stage) -> SplitRows | None:
    """The rows of a stage whose data are files here, and not large; else None. Raises DataError as the run would."""
    inputs = data_inputs(stage.data, "data")
    files = [Path(each.name).expanduser() for each in inputs if each.kind == "file" and not each.problem]
    sources = (*stage.data.sources, *(stage.data.evaluation_sources or ()))
    if len(files) < len(sources) or sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None
    return read_split(stage.data, seed=stage.run.seed)


def cautions(recipe: Section, prefix: str = "") -> Iterator[str]:
    """What may end the run. Raises ConfigError for what is sure to."""
    match recipe:
        case PipelineRecipe():
            for name, stage in (("sft", recipe.sft), ("reward", recipe.reward), ("ppo", recipe.ppo)):
                if stage is not None:
                    yield from cautions(stage, f"{prefix}{name}.")
        case SFTRecipe() | RewardRecipe() | DPORecipe():
            yield from _device(recipe.run, prefix)
            yield from _positions(recipe.model, recipe.data.max_tokens, 0, f"{prefix}model")
        case PPORecipe():
            yield from _device(recipe.run, prefix)
            models: dict[str, ModelConfig | ScalarModelConfig] = {"policy": recipe.policy, "value": recipe.value}
            scorers = {
                f"reward.{index}": ModelConfig(path=source.path)
                for index, source in enumerate(recipe.reward)
                if isinstance(source, ModelRewardConfig)
            }
            longest = recipe.ppo.rollout.max_new_tokens
            for key, model in (models | scorers).items():
                yield from _positions(model, recipe.data.max_prompt_tokens, longest, f"{prefix}{key}")


def _device(run: RunConfig, prefix: str) -> Iterator[str]:
    if problem := device_problem(run.device):
        yield f"{prefix}run.device is {run.device}, but {problem}: the run would be refused here; say auto"


def device_problem(device: str) -> str | None:
    """Why this machine has no such device, as far as it shows without torch."""
    if device == "mps" and sys.platform != "darwin":
        return "mps is for macOS alone"
    if device.partition(":")[0] != "cuda":
        return None
    torch = version("torch")
    if "+cpu" in torch:
        return f"torch {torch} is a build for CPUs"
    if "+rocm" in torch:
        return None
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return "there is no driver of NVIDIA here (libcuda.so.1)"
    return None


def _positions(model: ModelConfig | ScalarModelConfig, given: int, written: int, key: str) -> Iterator[str]:
    """`given` tokens of a prompt or an example, and those that are `written` to it."""
    limit = _position_limit(model)
    if limit is None or given + written <= limit:
        return
    if written >= limit:
        raise ConfigError(
            f"{key} reads at most {limit} positions, which ppo.rollout.max_new_tokens ({written}) alone fills: lower it"
        )
    if written:
        yield (
            f"{key} reads at most {limit} positions, and data.max_prompt_tokens ({given}) + ppo.rollout.max_new_tokens "
            f"({written}) make {given + written}: prompts of more than {limit - written} tokens would end the run; "
            "lower one of them"
        )
    else:
        yield (
            f"{key} reads at most {limit} positions, and data.max_tokens is {given}: a longer example would end the "
            "run; lower it"
        )


def _position_limit(model: ModelConfig | ScalarModelConfig) -> int | None:
    """As the configuration states it; None where it lies on the Hub, cannot be read, or says nothing."""
    config: Mapping[str, Any] = model.config or {}
    if model.path is not None:
        try:
            config = json.loads((Path(model.path).expanduser() / "config.json").read_bytes())
        except (OSError, ValueError):
            return None
    if not isinstance(config, Mapping):
        return None
    text = config.get("text_config") or config
    stated = (text.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((limit for limit in stated if isinstance(limit, int)), None)
