"""Checks the options of PPO for a loss over pairs of responses: online DPO and IPO (docs/online-dpo.md)."""

from collections.abc import Iterator

from proximo.config.ppo.advantage import AdvantageConfig
from proximo.config.ppo.kl import KLConfig, NoKLConfig
from proximo.config.ppo.losses import PolicyLossConfig


def pairs_problem(
    loss: PolicyLossConfig,
    advantage: AdvantageConfig,
    *,
    kl: KLConfig | NoKLConfig,
    responses_per_prompt: int,
    responses_per_update: int,
) -> str | None:
    """The first option that does not fit an objective over pairs, or the other way round, with the reason."""
    if not loss.is_pairwise:
        told = "kl: margin is for the objectives online_dpo and online_ipo: use loss or reward"
        return told if kl.in_margin else None
    sizes = responses_per_prompt, responses_per_update
    problems = (*_kl_problems(loss, kl), *_other_problems(loss, advantage, *sizes))
    return next(iter(problems), None)


def _kl_problems(loss: PolicyLossConfig, kl: KLConfig | NoKLConfig) -> Iterator[str]:
    if not kl.in_margin:
        yield (
            f"policy_loss.objective {loss.objective.kind} compares policy and reference within its margin, with "
            "kl.coefficient as beta: leave out kl.kind, which is then margin"
        )
    if kl.coefficient == 0:
        kind = loss.objective.kind
        yield f"kl.coefficient is the beta of objective {kind}, and at 0 nothing is learned: set it above 0"


def _other_problems(
    loss: PolicyLossConfig, advantage: AdvantageConfig, responses_per_prompt: int, responses_per_update: int
) -> Iterator[str]:
    if responses_per_prompt != 2:
        yield (
            f"policy_loss.objective {loss.objective.kind} trains on 2 responses to each prompt, not on "
            f"{responses_per_prompt}: leave out responses_per_prompt, and set samples_per_prompt to sample more and "
            "train on the best and the worst"
        )
    if not advantage.ranks_pairs:
        yield (
            f"policy_loss.objective {loss.objective.kind} needs to know which of two responses is better, and no more: "
            "leave out advantage.kind and advantage.standardise"
        )
    if responses_per_update % 2:
        yield f"minibatch_responses ({responses_per_update}) must be even, because pairs stay together"
    for key, is_given in {
        "entropy_coefficient": loss.entropy_coefficient > 0,
        "behaviour_weight": loss.behaviour_weight is not None,
        "rejection": loss.rejection is not None,
    }.items():
        if is_given:
            yield f"policy_loss.{key} is for losses of tokens, and {loss.objective.kind} has one for a pair: remove it"
