"""Options of one start of a run, from the command line or a program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from proximo.checkpoint.run_folder import Resume
from proximo.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How to start, and what to do if the run folder exists."""

    resume: Resume = "never"
    """`never` refuses a folder with a run, `must` resumes it, `auto` resumes or starts."""
    passes_over_damage: bool = True
    """With `auto`, a damaged checkpoint gives way to an earlier one."""
    overwrite: bool = False
    """Start even if the folder holds a run, which is moved aside."""
    allow_different_environment: bool = False
    """Allow a resume with other versions, another processor, other numbers of threads or ranks; the last bits may then
    differ."""
    allow_changed_rewards: bool = False
    """Allow a resume with other reward functions, verifiers or reward settings, which score the later steps."""
    quiet: bool = False
    """Print warnings and errors only."""
    pipeline_folder: str = ""
    """The pipeline's folder, for a stage: paths below it stay valid when the pipeline is moved."""
    more_follows: bool = False
    """Another run follows this one: it returns the status of a signal in its last step, which completes it."""
    recipe_text: str = ""
    """The text of the recipe, saved in the run folder as config.yaml."""
    on_step: Callable[[int, Mapping[str, float]], Any] | None = None
    """Called on rank 0 with the number and the metrics of each step after its line was written; of step 0 too, the
    evaluation before training."""
    keeps_process: bool = False
    """The process continues after the run, as in a notebook: an interrupt must not end it."""

    def __post_init__(self) -> None:
        if self.resume not in get_args(Resume):
            raise ConfigError(f"resume is one of {', '.join(get_args(Resume))}, got {self.resume!r}")
