"""Config sections of data: sources, and how rows become prompts, texts or pairs."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from proximo.config.schema.base import Section


class SourceConfig(Section):
    """One data set: a file, a folder, a Hub name, or a Python function that yields rows."""

    path: str | None = Field(None, min_length=1)
    """A file (.json, .jsonl, .csv, .parquet, .txt), a `save_to_disk` folder, or a Hub data set's name."""
    function: str | None = None
    """`package.module:function`, called with `kwargs`, yielding one dict per row."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`."""
    format: Literal["auto", "json", "jsonl", "csv", "parquet", "disk", "hub", "text"] = "auto"
    """`auto` uses the file ending; an existing folder is `disk`; anything else is `hub`."""
    split: str = "train"
    """Split of a Hub data set or of a `save_to_disk` folder with several."""
    subset: str | None = None
    """Configuration name of a Hub data set."""
    separator: str | None = None
    """For `text`: the line between documents; null splits at blank lines."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Maps a field of Proximo (`prompt`, `response`, `chosen`, ...) to a column."""
    problems: Literal["gsm8k", "math", "humaneval", "mbpp", "countdown", "areal_math", "areal_code"] | None = None
    """The problem data set of the rows. Its columns become the prompt, the reference answer and the inputs of a
    verifier. docs/data.md, "Problems with an answer"."""
    template: str | None = None
    """With `problems`: the prompt, with names in braces, such as `{question}`; null uses the default of the data
    set."""
    weight: float | None = Field(None, gt=0)
    """Fraction of this source in a mixture; all sources of a list have one, or none."""
    max_rows: int | None = Field(None, ge=1)
    """Use only the first rows."""
    whole: bool = False
    """Use all of this source in this stage, even if `proportions` split the other sources between stages."""

    def conflicts(self) -> Iterator[str]:
        if (self.path is None) == (self.function is None):
            both = "" if self.path is None else "; to read a path, override the list: data.sources=[{path: ...}]"
            yield f"exactly one of path and function is needed{both}"
        if self.kwargs and self.function is None:
            yield "kwargs needs function"
        if self.template is not None and self.problems is None:
            yield "template needs problems, whose prompt it is: set problems, or build the prompt under columns"


class DataConfig(Section):
    """A mixture of sources, cut to a phase, with some rows held out for evaluation."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Data sources; several are mixed."""
    proportions: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(None, min_length=2)
    """Split one data set between stages, for example [2, 4, 4] for SFT, reward model and PPO. For who has one data set
    for all of them."""
    phase: int | None = Field(None, ge=0)
    """The part of `proportions` for this stage, counted from 0."""
    split_seed: int | None = Field(None, ge=0, lt=2**32)
    """Split with DeepSpeed-Chat's shuffle and this seed, which selects the same rows, for who compares with it; null
    uses a fixed shuffle."""
    held_out_rows: int = Field(0, ge=0)
    """Rows reserved for evaluation, by a seeded draw; at most a fifth of all rows."""
    evaluation_sources: tuple[SourceConfig, ...] | None = Field(None, min_length=1)
    """Evaluate on these sources instead of held-out rows."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What to do with an example over the token limit; it is counted and reported in both cases."""
    as_messages: bool = False
    """Convert text prompts and responses to messages, rendered with the tokenizer's chat template. For chat models on
    data without turns."""
    system: str | None = None
    """A system message for conversations that have none. For chat models whose template would add its maker's."""

    def conflicts(self) -> Iterator[str]:
        if (self.proportions is None) != (self.phase is None):
            yield "proportions and phase must be set together"
        if self.proportions is not None and not sum(self.proportions):
            yield f"proportions must not all be 0, got {self.proportions}"
        if self.proportions is not None and self.phase is not None and self.phase >= len(self.proportions):
            yield f"phase is {self.phase}, but proportions has parts 0 to {len(self.proportions) - 1}"
        if self.held_out_rows and self.evaluation_sources:
            yield "held_out_rows and evaluation_sources exclude each other"
        for sources in (self.sources, self.evaluation_sources or ()):
            if len({source.weight is None for source in sources}) > 1:
                yield "either every source has a weight or none has"


class TextDataConfig(DataConfig):
    """Data of supervised fine-tuning."""

    form: Literal["auto", "text", "prompt_response", "messages"] = "auto"
    """The format of a row; `auto` detects it from the columns."""
    train_on: Literal["responses", "last_response", "everything"] = "responses"
    """Tokens that count in the loss: the assistant's turns, only its last turn, or all tokens. Plain text always counts
    in full."""
    layout: Literal["examples", "blocks"] = "examples"
    """One example per row, or plain texts concatenated and split into blocks of `max_tokens`."""
    max_tokens: int = Field(1024, ge=2)
    """Maximum tokens of an example."""


class PreferenceDataConfig(DataConfig):
    """Data of the reward model: pairs of a chosen and a rejected answer."""

    form: Literal["auto", "text", "conversational", "transcript", "implicit_prompt", "sharegpt", "outputs"] = "auto"
    """The format of a row; `auto` detects it from the columns. docs/data.md shows each format."""
    max_tokens: int = Field(1024, ge=2)
    """Maximum tokens of prompt and answer together."""
    min_response_words: int = Field(0, ge=0)
    """Drop pairs in which an answer has fewer words; 0 keeps all."""


class StepDataConfig(DataConfig):
    """Data of a process reward model: solutions in steps, with a label for each step."""

    step_separator: str = Field("\n", min_length=1)
    """Text that ends each step. A row with a step that contains it is dropped and counted. The model keeps it in its
    config.json."""
    train_on: Literal["all", "until_error", "last"] = "all"
    """Steps that count in the loss: all; those up to and including the first wrong one (arXiv:2305.20050); or the last
    one alone, whose label then says whether the solution is right (outcome supervision)."""
    max_tokens: int = Field(1024, ge=2)
    """Maximum tokens of prompt and solution together. With `too_long: truncate` a solution loses its last steps."""


class LabelledDataConfig(DataConfig):
    """Data of KTO: answers, each with a label that says whether it is desirable."""

    form: Literal["auto", "prompt_response", "messages", "pairs"] = "auto"
    """The format of a row: prompt and response with a `label`, messages with a `label`, or a preference pair, of which
    the chosen answer is desirable and the rejected one is not. `auto` detects it from the columns."""
    max_tokens: int = Field(1024, ge=2)
    """Maximum tokens of prompt and answer together."""


class PromptFilterConfig(Section):
    """Removes prompts from later epochs by the mean score of their responses in the last epoch."""

    above: float | None = None
    """A prompt with a higher mean score is removed as too easy."""
    below: float | None = None
    """A prompt with a lower mean score is removed as too hard."""
    max_fraction: float = Field(1.0, gt=0, le=1)
    """Maximum fraction of the remaining prompts to remove at the end of an epoch, those farthest beyond a bound
    first."""
    from_epoch: int = Field(1, ge=0)
    """The first epoch, counted from 1, at whose end prompts are removed; 0 also removes prompts before the first epoch,
    by the `base_scores` of the data."""

    def conflicts(self) -> Iterator[str]:
        if self.above is None and self.below is None:
            yield "a filter needs above (too easy), below (too hard) or both"
        if self.above is not None and self.below is not None and self.below > self.above:
            yield f"below ({self.below:g}) must not exceed above ({self.above:g}): no prompt would be left"


class PromptDataConfig(DataConfig):
    """Data of PPO: prompts, with reference answers and metadata if the reward needs them."""

    max_prompt_tokens: int = Field(512, ge=1)
    """Maximum tokens of a prompt; truncation keeps the end."""
    first_words: int | None = Field(None, ge=1)
    """Keep only the first words of text prompts, for a policy that continues texts."""
    fill_to_max: bool = False
    """To test memory and speed: pad every prompt to `max_prompt_tokens` tokens by repeating its last token in front."""
    filter: PromptFilterConfig | None = None
    """Remove prompts that are too easy or too hard, epoch by epoch; null keeps every prompt. For who trains on answers
    that can be checked: prompts that are always or never solved teach nothing."""
