"""Options of PPO that another option implies, where they are not given, and what does not fit a loss over pairs."""

from collections.abc import Iterator, Mapping
from typing import Any

from proximo.config.ppo.advantage import AdvantageConfig
from proximo.config.ppo.losses import PolicyLossConfig
from proximo.config.ppo.objectives import objective_class
from proximo.config.ppo.rewards import KLConfig, NoKLConfig
from proximo.config.schema.base import Section


def with_implied(values: Any) -> Any:
    """The values of the section `ppo` before validation, with what they imply."""
    if not isinstance(values, dict):
        return values
    objective = objective_class(_value(values.get("policy_loss"), "objective"))
    if objective is None:
        return values
    completed = _completed(values, objective.implies)
    return completed if objective.is_pairwise else _corrects_staleness(completed)


def _corrects_staleness(values: dict[str, Any]) -> dict[str, Any]:
    """Asynchronous rollouts weight each token by default: they come from earlier policies."""
    loss = values.get("policy_loss", {})
    given = loss if isinstance(loss, dict) else getattr(loss, "model_fields_set", {"behaviour_weight"})
    if not _value(values.get("rollout"), "staleness") or "behaviour_weight" in given:
        return values
    return values | {"policy_loss": _given(loss) | {"behaviour_weight": "truncated"}}


def _completed(values: dict[str, Any], implied: Mapping[str, Any]) -> dict[str, Any]:
    """The values with what an objective implies, where it is not given. An object says its kind, and stays as it is."""
    filled = dict(values)
    for key, value in implied.items():
        given = values.get(key, {})
        is_of_a_kind = isinstance(given, Section) and "kind" in type(given).model_fields
        if isinstance(value, Mapping) and isinstance(given, dict | Section) and not is_of_a_kind:
            filled[key] = dict(value) | _given(given)
        elif key not in values:
            filled[key] = value
    return filled


def policy_rate(*, has_adapter: bool) -> float:
    """The learning rate of a policy, if none is given: for an adapter, or for whole weights."""
    return 1e-5 if has_adapter else 1e-6


def with_policy_rate(values: Any) -> Any:
    """The values of a recipe before validation; a policy optimizer given in part has the default learning rate."""
    ppo = values.get("ppo") if isinstance(values, dict) else None
    given = ppo.get("policy_optimizer") if isinstance(ppo, dict) else None
    if not isinstance(ppo, dict) or not isinstance(given, dict):
        return values
    rate = policy_rate(has_adapter=_value(values.get("model"), "lora") is not None)
    return values | {"ppo": ppo | {"policy_optimizer": {"learning_rate": rate} | given}}


def _value(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)


def _given(section: Mapping[str, Any] | Section) -> dict[str, Any]:
    if isinstance(section, Section):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return dict(section)


def pair_conflicts(
    loss: PolicyLossConfig,
    advantage: AdvantageConfig,
    *,
    kl: KLConfig | NoKLConfig,
    responses_per_prompt: int,
    responses_per_update: int,
) -> Iterator[str]:
    """The options that do not fit an objective over pairs, or the other way round."""
    kind = loss.objective.kind
    if not loss.objective.is_pairwise:
        if kl.in_margin:
            yield "kl: margin is for the objectives online_dpo and online_ipo: use loss or reward"
        return
    if not kl.in_margin:
        yield (
            f"policy_loss.objective {kind} compares policy and reference within its margin, with kl.coefficient as "
            "beta: leave out kl.kind, which is then margin"
        )
    if kl.coefficient == 0:
        yield f"kl.coefficient is the beta of objective {kind}, and at 0 nothing is learned: set it above 0"
    if responses_per_prompt != 2:
        yield (
            f"policy_loss.objective {kind} trains on 2 responses to each prompt, not on {responses_per_prompt}: leave "
            "out responses_per_prompt, and set samples_per_prompt to sample more and train on the best and the worst"
        )
    if not advantage.ranks_pairs or advantage.standardise:
        yield (
            f"policy_loss.objective {kind} needs to know which of two responses is better, and no more: leave out "
            "advantage.kind and advantage.standardise"
        )
    if responses_per_update % 2:
        yield f"minibatch_responses ({responses_per_update}) must be even, because pairs stay together"
    for key in ("entropy_coefficient", "behaviour_weight", "rejection"):
        if getattr(loss, key):
            yield f"policy_loss.{key} is for losses of tokens, and {kind} has one for a pair: remove it"
