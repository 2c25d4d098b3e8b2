"""Config section of pushes to the Hugging Face Hub."""

from typing import Literal

from pydantic import Field, field_validator

from proximo.config.schema.base import Section
from proximo.hub import is_hub_name


class PushConfig(Section):
    """Upload the trained model to the Hugging Face Hub. The token is that of `hf auth login`, or HF_TOKEN."""

    name: str
    """The model's name there, such as me/my-model; created if it does not exist."""
    when: Literal["end", "save", "best"] = "end"
    """`end`: the last checkpoint of a finished run. `save`: also every other one. `best`: each that is the best so far.
    docs/checkpoint.md."""
    private: bool = True
    """Whether a model that is created is visible to you alone; one that exists stays as it is."""
    wait_minutes: float = Field(30.0, ge=0)
    """How long the end of the run waits for the last upload, which is then given up. `--resume=auto` tries it again."""

    @field_validator("name")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not is_hub_name(value):
            raise ValueError(f"must be a name on the Hub, such as me/my-model, got {value!r}")
        return value
