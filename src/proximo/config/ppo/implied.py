"""Options of PPO that another option implies, where they are not given, and what does not fit a loss over pairs."""

from collections.abc import Mapping
from typing import Any

from proximo.config.ppo.objectives import compares_pairs
from proximo.config.schema.base import Section


def with_implied(values: Any) -> Any:
    """The values of the section `ppo` before validation, with what they imply."""
    if not isinstance(values, dict):
        return values
    if compares_pairs(_value(values.get("policy_loss"), "objective")):
        return _over_pairs(values)
    return _corrects_staleness(values)


def _corrects_staleness(values: dict[str, Any]) -> dict[str, Any]:
    """Asynchronous rollouts weight each token by default: they come from earlier policies."""
    loss = values.get("policy_loss", {})
    given = loss if isinstance(loss, dict) else getattr(loss, "model_fields_set", {"behaviour_weight"})
    if not _value(values.get("rollout"), "staleness") or "behaviour_weight" in given:
        return values
    return values | {"policy_loss": _given(loss) | {"behaviour_weight": "truncated"}}


def _over_pairs(values: dict[str, Any]) -> dict[str, Any]:
    """A loss over pairs needs two responses to a prompt, which of them is better, and the KL as its margin."""
    implied = {"kl": {"kind": "margin"}, "advantage": {"kind": "group_centred"}}
    sections = {key: values.get(key, {}) for key in implied}
    filled = {key: implied[key] | _given(given) for key, given in sections.items() if isinstance(given, dict | Section)}
    return {"responses_per_prompt": 2} | values | filled


def _value(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)


def _given(section: Mapping[str, Any] | Section) -> dict[str, Any]:
    if isinstance(section, Section):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return dict(section)
