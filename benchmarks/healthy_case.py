"""What a run of healthy_runs.py is, and how its recipe is put together. The runs stand in healthy_cases.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).parent.parent / "src" / "proximo" / "recipes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run: its task, what is changed in that task's recipe, and the alarm that has to come first."""

    task: str
    trainer: str = "ppo"
    wrong: str = ""
    """In words; empty for a healthy run."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    alarm: str | None = None
    """None for a healthy run."""


def shipped_stages(name: str) -> dict[str, Any]:
    """The stages of a shipped pipeline."""
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


def merged(whole: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`whole` with `changes` laid over it, section by section."""
    result = dict(whole)
    for key, value in changes.items():
        inside = result.get(key)
        result[key] = merged(inside, value) if isinstance(inside, dict) and isinstance(value, Mapping) else value
    return result
