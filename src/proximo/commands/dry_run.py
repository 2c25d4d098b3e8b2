"""What `--dry-run` prints: a preview of a recipe, and warnings about problems that files of this machine show.

Loads no model, writes no file, and imports torch only to refuse models that do not fit.
"""

import sys
from collections.abc import Iterator, Mapping
from ctypes import CDLL
from importlib.metadata import version

from proximo.config.recipe import Recipe
from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import ModelConfig, ScalarModelConfig
from proximo.errors import ConfigError
from proximo.run.dry_run import rank_lines, run_lines, stage_warnings, text_config
from proximo.trainer_kinds import trainer_of

NAME_WIDTH = 12


def describe(recipe: Recipe) -> str:
    """One line for each model, data set and quantity."""
    return "\n".join(_lines(recipe))


def _lines(recipe: Recipe) -> Iterator[str]:
    stages = recipe.stages()
    if "" not in stages:
        yield f"pipeline in {recipe.run.folder}"
    for name, stage in stages.items():
        if name:
            yield f"\nstage {name}" + ("" if stage is not None else ": left out")
        if stage is not None:
            for word, text in (*run_lines(stage.run), *rank_lines(stage), *trainer_of(stage).dry_run(stage)):
                yield f"  {word:<{NAME_WIDTH}} {text}"


def find_warnings(recipe: Recipe) -> Iterator[str]:
    """Warnings about problems that may end the run. Raises ConfigError for those that certainly will."""
    for prefix, stage in recipe.given_stages():
        if problem := device_problem(device := stage.run.device):
            yield f"{prefix}run.device is {device}, but {problem}: the run would be refused here; use auto"
        scorers = {
            key: ModelConfig(path=section.path)
            for key, section in stage.sections().items()
            if isinstance(section, ModelRewardConfig)
        }
        yield from (f"{prefix}{each}" for each in stage_warnings(stage))
        for key, model in (stage.models() | scorers).items():
            yield from _positions(model, stage.longest_sequence(), f"{prefix}{key}")


def device_problem(device: str) -> str | None:
    """Why this machine lacks the device, as far as can be told without torch."""
    if device == "mps" and sys.platform != "darwin":
        return "mps exists only on macOS"
    if device.partition(":")[0] != "cuda":
        return None
    torch = version("torch")
    if "+cpu" in torch:
        return f"torch {torch} is a build for CPUs"
    if "+rocm" in torch:
        return None
    return None if has_nvidia_driver() else "NVIDIA's driver (libcuda.so.1) is missing here"


def has_nvidia_driver() -> bool:
    """Whether the library of NVIDIA's driver can be loaded."""
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _positions(model: ModelConfig | ScalarModelConfig, longest: Mapping[str, int], key: str) -> Iterator[str]:
    """`longest`: key of a length limit -> tokens; first of the prompt, then of the response if there is one."""
    limit = _position_limit(model)
    if limit is None or sum(longest.values()) <= limit:
        return
    (read_key, given), *rest = longest.items()
    if read_key.startswith("environment."):
        raise ConfigError(
            f"an episode has up to {given} tokens, but {key} reads at most {limit} positions; lower {read_key}"
        )
    if not rest:
        yield (
            f"{key} reads at most {limit} positions, and {read_key} is {given}: a longer example would end the run; "
            "lower it"
        )
        return
    ((write_key, written),) = rest
    if written >= limit:
        raise ConfigError(f"{key} reads at most {limit} positions, which {write_key} ({written}) alone fills: lower it")
    yield (
        f"{key} reads at most {limit} positions, and {read_key} ({given}) + {write_key} ({written}) make "
        f"{given + written}: prompts of more than {limit - written} tokens would end the run; lower one of them"
    )


def _position_limit(model: ModelConfig | ScalarModelConfig) -> int | None:
    """The position limit in the model's config.json; None if that is on the Hub, unreadable, or has no limit."""
    text = text_config(model)
    stated = (text.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((limit for limit in stated if isinstance(limit, int)), None)
