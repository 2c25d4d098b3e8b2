"""The description of a source of rows, as the user gives it; `reading.py` reads it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from proximo.errors import ConfigError
from proximo.user_code import IMPORT_PATH

Format = Literal["auto", "json", "jsonl", "csv", "parquet", "disk", "hub", "text", "function"]

Problems = Literal["gsm8k", "math", "humaneval", "mbpp", "countdown", "areal_math", "areal_code"]
"""Names of the known data sets of problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """A file, a `save_to_disk` folder, a Hub data set, or a function that yields rows."""

    path: str
    """File, folder, name on the Hub, or `package.module:function`."""
    format: Format = "auto"
    split: str = "train"
    """Split of a Hub data set, or of a folder that holds several."""
    subset: str | None = None
    """Configuration name of a Hub data set."""
    separator: str | None = None
    """For text: the line between documents; None separates at blank lines, "" makes the file one document."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Field -> column that holds it, or a text with `{column}` in it; "" leaves the field out."""
    problems: Problems | None = None
    """The data set of problems whose rows these are (`problems.py`), after `columns`."""
    template: str | None = None
    """The prompt of such a problem, with names in braces; None takes the data set's own."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a function."""
    weight: float | None = None
    """Share in a mixture, relative to the weights of the other sources."""
    max_rows: int | None = None
    """Take only this many rows, from the start."""
    whole: bool = False
    """True if a phase takes the whole source instead of its part."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of range, and arguments without a function."""
        if not self.path:
            raise ConfigError("a source needs a path: a file, a folder, a Hub name or package.module:function")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"the weight of source '{self.path}' must be a number above 0, got {self.weight}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ConfigError(f"max_rows of source '{self.path}' must be at least 1, got {self.max_rows}")
        is_function = self.format == "function" or IMPORT_PATH.fullmatch(self.path)
        if self.format == "function" and not IMPORT_PATH.fullmatch(self.path):
            raise ConfigError(f"a function is named as package.module:function, got '{self.path}'")
        if self.kwargs and not is_function:
            raise ConfigError(f"source '{self.path}' has kwargs, but it is not a function")
        if self.template is not None and self.problems is None:
            raise ConfigError(f"source '{self.path}' has a template, which needs problems: set it, or use columns")
