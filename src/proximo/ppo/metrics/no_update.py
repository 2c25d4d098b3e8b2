"""Why steps of PPO took no update of the policy, from their metrics."""

from collections.abc import Callable, Mapping

from proximo.metrics.declared.rules import SKIPPED_CAUSE, idle_lines, no_update_detail
from proximo.metrics.run_files import Run, setting
from proximo.ppo.metrics.signs import succeeds

Line = Mapping[str, float]


def no_update(run: Run) -> str | None:
    """The last steps without an update, with their cause.

    Steps of the critic's warm-up are to take none. A run that succeeds may end with steps that have nothing to teach,
    but not consist of them.
    """
    first_step = 1 + (setting(run.config, "ppo", "critic_warmup_steps") or 0)
    idle = idle_lines(run, first_step=first_step)
    if not idle or (idle[-1]["progress/updates"] > 0 and succeeds(run)):
        return None
    return no_update_detail(run, idle, _causes(run))


def _causes(run: Run) -> dict[str, Callable[[Line], bool]]:
    task_reward = setting(run.config, "ppo", "task_reward")
    compared = f"{task_reward} (ppo.task_reward)" if task_reward else "the score"
    masks = setting(run.config, "ppo", "truncation_value") == "mask"
    return {
        "no response was scored": lambda line: line.get("response/unscored", 0) > 0 and "score/mean" not in line,
        **SKIPPED_CAUSE,
        "ppo.guards.target_kl ended the step before its first update": lambda line: (
            line.get("policy/stopped_updates", 0) > 0
        ),
        f"all groups were excluded, because in each of them {compared} is the same number "
        "(ppo.advantage.zero_variance_groups)": lambda line: line.get("group/effective_fraction") == 0,
        "all returns were nearly one number (ppo.advantage.least_spread)": lambda line: (
            line.get("advantage/flat", 0) > 0
        ),
        "all tokens were rejected (ppo.policy_loss.rejection)": lambda line: line.get("policy/rejected_fraction") == 1,
        "all responses were cut at the limit, which leaves them out (ppo.truncation_value: mask)": lambda line: (
            masks and line.get("response/finished_fraction") == 0
        ),
        "no response had a token": lambda line: line.get("response/tokens_max") == 0,
    }
