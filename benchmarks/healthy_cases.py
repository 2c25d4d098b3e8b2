"""The healthy and the sick runs of healthy_runs.py: three tasks, and for each run what is changed. Not their running.

The tasks are digits to be put in order (sorting.py, right or wrong), the reviews of the demo (a learned reward model,
with a gold score beside it) and countdown (a verifier in worker processes). A sick run is a healthy one with one thing
made wrong.
"""

from pathlib import Path
from typing import Any

import healthy_supervised
from healthy_case import Case, merged, shipped_stages

from algorithms import model_of, sorting_ppo

GROUPS = {"advantage": "group_standardised", "prompts_per_step": 16, "responses_per_prompt": 8}


def rewarded(function: str) -> list[dict[str, str]]:
    """A reward of sorting.py in the place of the task's own."""
    return [{"kind": "function", "function": f"sorting:{function}"}]


def policy_rate(learning_rate: float) -> dict[str, Any]:
    """Another learning rate of the policy."""
    return {"policy_optimizer": {"learning_rate": learning_rate}}


SHORT_DIGITS = {
    "sources": [{"function": "sorting:problems", "kwargs": {"num_rows": 4000, "seed": 1, "digits": 3}}],
    "evaluation_sources": [{"function": "sorting:problems", "kwargs": {"num_rows": 128, "seed": 2, "digits": 3}}],
}
EASY_COUNTDOWN = {
    "sources": [{"function": "proximo.recipes.countdown:rows", "kwargs": {"num_rows": 8000, "seed": 1, "signs": "+"}}],
    "evaluation_sources": [
        {
            "function": "proximo.recipes.countdown:rows",
            "kwargs": {"num_rows": 128, "seed": 2, "split": "held_out", "signs": "+"},
        }
    ],
}

HEALTHY = {
    "digits": Case(task="digits"),
    "digits-again": Case(task="digits", changes={"run": {"seed": 1}}),
    "digits-in-groups": Case(task="digits", changes={"ppo": GROUPS}),
    "digits-without-critic": Case(task="digits", changes={"ppo": {"advantage": "return_to_go"}}),
    "digits-solved": Case(task="digits", changes={"reward": rewarded("begins_well"), "ppo": {"num_steps": 80}}),
    "digits-kl-in-loss": Case(task="digits", changes={"ppo": {"kl": {"kind": "loss", "estimator": "k2"}}}),
    "reviews": Case(task="reviews"),
    "reviews-again": Case(task="reviews", changes={"run": {"seed": 1}}),
    "reviews-in-groups": Case(task="reviews", changes={"ppo": {**GROUPS, "advantage": "leave_one_out"}}),
    "reviews-on-one-trunk": Case(task="reviews", changes={"value": {"init_from": "trunk"}}),
    "countdown": Case(task="countdown"),
    "countdown-again": Case(task="countdown", changes={"run": {"seed": 1}}),
    "countdown-solved": Case(task="countdown", changes={"data": EASY_COUNTDOWN, "ppo": {"num_steps": 50}}),
}

SICK = {
    "too-large-steps": Case(
        task="digits",
        wrong="learning rate 0.03, a hundred times that of the healthy run",
        changes={"ppo": policy_rate(3e-2)},
        alarm="One step destroyed the policy",
    ),
    "reviews-too-large-steps": Case(
        task="reviews",
        wrong="learning rate 0.04, a hundred times",
        changes={"ppo": policy_rate(4e-2)},
        alarm="One step destroyed the policy",
    ),
    "too-small-steps": Case(
        task="digits",
        wrong="learning rate 1e-7",
        changes={"ppo": policy_rate(1e-7)},
        alarm="The policy hardly moves",
    ),
    "too-many-epochs": Case(
        task="digits",
        wrong="40 epochs a step",
        changes={"ppo": {"epochs_per_step": 40, "num_steps": 15}},
        alarm="The clip fraction is high",
    ),
    "useless-critic": Case(
        task="digits",
        wrong="learning rate of the value model 0.3",
        changes={"ppo": {"value_optimizer": {"learning_rate": 0.3}}},
        alarm="The critic is no better than a constant",
    ),
    "cut-answers": Case(
        task="digits",
        wrong="six new tokens, where an answer has seven",
        changes={"ppo": {"rollout": {"max_new_tokens": 6}}},
        alarm="Nearly all answers are cut at the limit",
    ),
    "wrong-end": Case(
        task="countdown-wrong-end",
        wrong="the tokenizer's end of sequence is a token that the model never wrote",
        changes={"ppo": {"num_steps": 20}},
        alarm="Nearly all answers are cut at the limit",
    ),
    "paid-for-length": Case(
        task="digits",
        wrong="the reward is the length of the answer",
        changes={
            "reward": rewarded("length"),
            "ppo": {"rollout": {"max_new_tokens": 40}, "kl": {"coefficient": 0.001}},
        },
        alarm="Longer answers score higher",
    ),
    "paid-for-shortness": Case(
        task="countdown",
        wrong="the reward falls with every character",
        changes={"reward": rewarded("shortness"), "ppo": {"num_steps": 30, "kl": {"coefficient": 0.001}}},
        alarm="Shorter answers score higher",
    ),
    "always-one": Case(
        task="digits",
        wrong="the reward is 1, whatever the answer",
        changes={"reward": rewarded("always_one"), "ppo": GROUPS},
        alarm="Every score is the same number",
    ),
    "never-right": Case(
        task="digits",
        wrong="prompts of three digits, which the fine-tuned model never saw and never gets right",
        changes={"data": SHORT_DIGITS},
        alarm="Every score is the same number",
    ),
    "too-cold": Case(
        task="digits",
        wrong="temperature 0.1",
        changes={"ppo": {**GROUPS, "rollout": {"temperature": 0.1}}},
        alarm="Sampling is almost greedy",
    ),
    "too-hot": Case(
        task="reviews",
        wrong="temperature 3",
        changes={"ppo": {"rollout": {"temperature": 3.0}}},
        alarm="The policy samples noise",
    ),
    "no-kl": Case(
        task="reviews",
        wrong="KL coefficient 0, with a reward model that can be exploited",
        changes={"ppo": {"num_steps": 60, "kl": {"coefficient": 0.0}}},
        alarm="The score rises while the gold score falls",
    ),
    "too-much-kl": Case(
        task="reviews",
        wrong="KL coefficient 8, a hundred times",
        changes={"ppo": {"kl": {"coefficient": 8.0}}},
        alarm="The KL penalty outweighs the score",
    ),
    "countdown-too-much-kl": Case(
        task="countdown",
        wrong="KL coefficient 20",
        changes={"ppo": {"num_steps": 20, "kl": {"coefficient": 20.0}}},
        alarm="The KL penalty outweighs the score",
    ),
    "too-much-kl-in-loss": Case(
        task="digits",
        wrong="KL in the loss with a coefficient of 20, a thousand times",
        changes={"ppo": {"kl": {"kind": "loss", "estimator": "k2", "coefficient": 20.0}}},
        alarm="The KL in the loss outweighs the advantages",
    ),
    "rejected-tokens": Case(
        task="reviews",
        wrong="in bf16, answers rejected where a token diverges by a millionth of a nat, which rounding exceeds",
        changes={
            "run": {"precision": "bf16"},
            "ppo": {
                "num_steps": 10,
                "prompts_per_step": 32,
                "policy_loss": {"rejection": {"kind": "divergence", "estimator": "k1", "over": "max", "limit": 1e-6}},
            },
        },
        alarm="Most tokens are excluded from the updates",
    ),
    "reinforces-anything": Case(
        task="digits",
        wrong="scores of 0 and 1 that have nothing to do with the answer, no baseline and no KL: whatever was drawn "
        "becomes likelier",
        changes={
            "reward": rewarded("noise"),
            "ppo": {
                **policy_rate(1e-3),
                "num_steps": 80,
                "prompts_per_step": 64,
                "advantage": {"kind": "return_to_go", "standardise": False},
                "kl": "none",
            },
        },
        alarm="Entropy collapses",
    ),
    "faulty-rewards": Case(
        task="countdown",
        wrong="the reward source cannot judge a tenth of the answers",
        changes={"reward": rewarded("failing"), "ppo": {"num_steps": 20}},
        alarm="Responses were unscored",
    ),
    "groups-too-large-steps": Case(
        task="countdown",
        wrong="learning rate 0.004, eight times, in groups without a KL",
        changes={"ppo": {**GROUPS, **policy_rate(4e-3), "num_steps": 30, "kl": {"coefficient": 0.0}}},
        alarm="One step destroyed the policy",
    ),
}
HEALTHY |= healthy_supervised.HEALTHY
SICK |= healthy_supervised.SICK
CASES = {**HEALTHY, **SICK}


def recipe(folder: Path, name: str) -> dict[str, Any]:
    """The whole recipe of a run; `folder` holds the models that `prepare` made."""
    case = CASES[name]
    if case.trainer != "ppo":
        return merged(healthy_supervised.supervised(folder, case.task, case.trainer), case.changes)
    task, _, variant = case.task.partition("-")
    whole = digits(folder) if task == "digits" else shipped(folder, task)
    if variant:
        whole["model"] = {"path": str(folder / "models" / "wrong end")}
    whole = merged(whole, case.changes)
    if whole.get("value") == {"init_from": "trunk"}:
        del whole["ppo"]["value_optimizer"]  # one optimizer trains both
    return whole


def digits(folder: Path) -> dict[str, Any]:
    """Thirty steps from a model that is right in a third of the cases."""
    whole = sorting_ppo(folder)
    whole["ppo"] |= {
        "num_steps": 30,
        "prompts_per_step": 128,
        "kl": {"coefficient": 0.02},
        "value_optimizer": {"learning_rate": 5e-4},
    }
    return whole


def shipped(folder: Path, task: str) -> dict[str, Any]:
    """The last stage of a shipped pipeline, after the stages before it."""
    name = "demo" if task == "reviews" else task
    whole = shipped_stages(name)["ppo"]
    whole["model"] = {"path": str(model_of(folder / "models" / name / "sft", "policy"))}
    if task == "reviews":
        whole["reward"] = [{"kind": "model", "path": str(model_of(folder / "models" / name / "reward", "reward"))}]
    return whole
