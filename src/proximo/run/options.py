"""What the command line says about one start of a run, beside its recipe. Not settings: none of it changes a result."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How to start, and what to do with a run folder that exists."""

    resume: Literal["never", "must", "auto"] = "never"
    """`never` refuses a folder with a run, `must` goes on with it, `auto` goes on or starts."""
    overwrite: bool = False
    """Replace the run that is in the folder."""
    allow_different_environment: bool = False
    """Resume with other versions, another processor or thread count; the last bits may differ then."""
    quiet: bool = False
    """Print nothing but warnings and errors."""
    pipeline_folder: str = ""
    """Of a stage of a pipeline: what lies below it is the same wherever the pipeline is moved to."""
    recipe_text: str = ""
    """The recipe as it was written, kept in the run folder as config.yaml."""
