"""The healthy and the sick runs of SFT, reward models, DPO and KTO for healthy_runs.py; those of PPO: healthy_cases.py.

Each trainer has two tasks: digits to be put in order (sorting.py) and the reviews of the demo. That of process reward
models is sums in steps. Nothing is trained before a run of SFT; the others start from what `prepare` of healthy_runs.py
fine-tuned.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from healthy_case import Case, shipped_stages

from algorithms import model_of, sorting_sft
from proximo.recipes.running_sums import rows

COIN, UNTAUGHT = "The reward model is no better than chance", "The policy ranks held-out pairs no better than chance"
GAP, BY_HEART = "Accuracy is much higher in training than held out", "The held-out loss rises again"
LEAPT, STILL = "The training loss jumped", "The loss does not fall"
CONSTANT = "The process reward model judges steps no better than a constant"
UNLIKELY = "The chosen answers become much less likely"
UNLABELLED = "The policy tells held-out answers apart no better than chance"
UNLIKELY_DESIRABLE = "The desirable answers become much less likely"
UNBALANCED = "One label outweighs the other"

EVERY_50 = {"evaluate_every_steps": 50}
REVIEWS = "proximo.recipes.reviews.review_rows:"


def rate(trainer: str, learning_rate: float) -> dict[str, Any]:
    """Another learning rate."""
    return {trainer: {"optimizer": {"learning_rate": learning_rate}}}


def digit_pairs(num_rows: int, **arguments: Any) -> list[dict[str, Any]]:
    """Rows of sorting.py as the training pairs."""
    return [{"function": "sorting:pairs", "kwargs": {"num_rows": num_rows, "seed": 1, **arguments}}]


def review_pairs(num_rows: int, noise: float = 0.15) -> list[dict[str, Any]]:
    """Pairs of reviews, of which a share is in the wrong order."""
    arguments = {"num_rows": num_rows, "noise": noise}
    return [{"function": f"{REVIEWS}preference_rows", "kwargs": arguments}]


def sums(num_rows: int, **arguments: Any) -> list[dict[str, Any]]:
    """Sums of three numbers in steps."""
    kwargs = {"num_rows": num_rows, "num_terms": 3, "largest": 4, "careless": 0.3} | arguments
    return [{"function": "proximo.recipes.running_sums:rows", "kwargs": kwargs}]


def mislabelled_sums(num_rows: int) -> Iterator[dict[str, Any]]:
    """Rows of `sums` whose labels are drawn at random."""
    rng = Random(0)
    for row in rows(num_rows, 1, num_terms=3, largest=4, careless=0.3):
        yield row | {"labels": [rng.random() < 0.5 for _ in row["labels"]]}


def few_digits(num_rows: int, **arguments: Any) -> list[dict[str, Any]]:
    """Fine-tuning data of sorting.py."""
    return [{"function": "sorting:examples", "kwargs": {"num_rows": num_rows, **arguments}}]


def at_rate(trainer: str, learning_rate: str, *, alarm: str, task: str = "digits", note: str = "") -> Case:
    """A run with a learning rate that is too high or too low. `note` follows the rate in what is wrong."""
    wrong, changes = f"learning rate {learning_rate}{note}", rate(trainer, float(learning_rate))
    return Case(task=task, trainer=trainer, wrong=wrong, changes=changes, alarm=alarm)


HEALTHY = {
    "sft-digits": Case(task="digits", trainer="sft"),
    "sft-digits-again": Case(task="digits-tuned", trainer="sft"),
    "sft-reviews": Case(task="reviews", trainer="sft"),
    "reward-digits": Case(task="digits", trainer="reward"),
    "reward-reviews": Case(task="reviews", trainer="reward"),
    "reward-reviews-few-held-out": Case(
        task="reviews",
        trainer="reward",
        changes={
            "data": {"sources": review_pairs(4040), "held_out_rows": 40},
            "run": {"seed": 1, "evaluate_every_steps": 25},
        },
    ),
    "prm-sums": Case(task="sums", trainer="prm"),
    "prm-sums-until-error": Case(
        task="sums", trainer="prm", changes={"data": {"train_on": "until_error"}, "run": {"seed": 1}}
    ),
    "dpo-digits": Case(task="digits", trainer="dpo"),
    "dpo-digits-ipo": Case(task="digits", trainer="dpo", changes={"dpo": {"loss": "ipo"}, "run": {"seed": 1}}),
    "dpo-reviews": Case(task="reviews", trainer="dpo"),
    "kto-digits": Case(task="digits", trainer="kto"),
    "kto-digits-zero": Case(
        task="digits", trainer="kto", changes={"kto": {"reference_point": "zero"}, "run": {"seed": 1}}
    ),
    "kto-reviews": Case(task="reviews", trainer="kto"),
}

SICK = {
    "sft-by-heart": Case(
        task="digits",
        trainer="sft",
        wrong="300 rows read forty times",
        changes={"data": {"sources": few_digits(400)}, "sft": {"num_epochs": 40}},
        alarm=BY_HEART,
    ),
    "sft-too-large-steps": at_rate("sft", "0.1", alarm=LEAPT, task="digits-tuned", note=", three hundred times"),
    "sft-too-small-steps": at_rate("sft", "1e-8", alarm=STILL),
    "reward-by-heart": Case(
        task="reviews",
        trainer="reward",
        wrong="400 pairs read ten times",
        changes={"data": {"sources": review_pairs(800)}, "reward": {"num_epochs": 10}, "run": EVERY_50},
        alarm=GAP,
    ),
    "reward-shuffled-labels": Case(
        task="reviews",
        trainer="reward",
        wrong="half of the labels are the wrong way round",
        changes={"data": {"sources": review_pairs(4000, 0.5)}, "run": EVERY_50},
        alarm=COIN,
    ),
    "reward-too-large-steps": Case(
        task="reviews",
        trainer="reward",
        wrong="learning rate 0.1, a hundred times",
        changes={"data": {"sources": review_pairs(4000)}, "run": EVERY_50, **rate("reward", 0.1)},
        alarm=COIN,
    ),
    "reward-too-small-steps": at_rate("reward", "1e-9", alarm=STILL),
    "prm-by-heart": Case(
        task="sums",
        trainer="prm",
        wrong="200 solutions read forty times",
        changes={
            "data": {"sources": sums(600, seed=1)},
            "prm": {"num_epochs": 40, "optimizer": {"learning_rate": 1e-3}},
        },
        alarm=BY_HEART,
    ),
    "prm-shuffled-labels": Case(
        task="sums",
        trainer="prm",
        wrong="the labels are drawn at random",
        changes={
            "data": {"sources": [{"function": "healthy_supervised:mislabelled_sums", "kwargs": {"num_rows": 4400}}]}
        },
        alarm=CONSTANT,
    ),
    "prm-too-large-steps": at_rate("prm", "0.1", alarm=CONSTANT, task="sums", note=", thirty times"),
    "prm-too-small-steps": at_rate("prm", "1e-9", alarm=STILL, task="sums"),
    "dpo-too-large-steps": at_rate("dpo", "0.03", alarm=UNLIKELY, note=", three thousand times"),
    "dpo-collapse": at_rate(
        "dpo", "0.0001", alarm=UNLIKELY, note=", ten times: the chosen answers become unlikely with the rejected"
    ),
    "dpo-shuffled-labels": Case(
        task="digits",
        trainer="dpo",
        wrong="half of the labels are the wrong way round",
        changes={"data": {"sources": digit_pairs(4400, swapped=0.5)}},
        alarm=UNTAUGHT,
    ),
    "dpo-by-heart": Case(
        task="reviews",
        trainer="dpo",
        wrong="400 pairs read ten times",
        changes={"data": {"sources": review_pairs(800)}, "dpo": {"num_epochs": 10}},
        alarm=GAP,
    ),
    "dpo-too-small-steps": at_rate("dpo", "1e-9", alarm=STILL),
    "kto-shuffled-labels": Case(
        task="digits",
        trainer="kto",
        wrong="half of the labels are the wrong way round",
        changes={"data": {"sources": digit_pairs(4400, swapped=0.5)}},
        alarm=UNLABELLED,
    ),
    "kto-unbalanced": Case(
        task="digits",
        trainer="kto",
        wrong="undesirable answers weigh five times as much",
        changes={"kto": {"undesirable_weight": 5.0}},
        alarm=UNBALANCED,
    ),
    "kto-by-heart": Case(
        task="reviews",
        trainer="kto",
        wrong="400 pairs read ten times, at ten times the learning rate",
        changes={
            "data": {"sources": review_pairs(800)},
            "kto": {"num_epochs": 10, "optimizer": {"learning_rate": 1e-3}},
        },
        alarm=GAP,
    ),
    "kto-too-large-steps": at_rate("kto", "0.03", alarm=UNLIKELY_DESIRABLE, note=", three thousand times"),
    "kto-too-small-steps": at_rate("kto", "1e-9", alarm=STILL),
}


def sums_sft() -> dict[str, Any]:
    """A small model that adds in steps and is often wrong."""
    whole = sorting_sft()
    whole["data"]["sources"] = sums(4000, careless=0.6)
    return whole


def supervised(folder: Path, task: str, trainer: str) -> dict[str, Any]:
    """The recipe of the healthy run; `folder` holds the models that `prepare` made."""
    if trainer == "prm":
        start = str(model_of(folder / "sums" / "sft", "policy"))
        optimizer = {"learning_rate": 3e-3, "schedule": "linear", "warmup_updates": 10}
        return {
            "model": {"path": start},
            "data": {"sources": sums(4400, seed=1), "held_out_rows": 400, "max_tokens": 64},
            "prm": {"solutions_per_step": 16, "optimizer": optimizer},
            "run": EVERY_50,
        }
    digits = str(model_of(folder / "digits in order" / "sft", "policy"))
    if trainer == "sft":
        whole = shipped_stages("demo")["sft"] if task == "reviews" else sorting_sft()
        if task == "digits-tuned":  # from the model of `prepare`, on answers that are all right
            whole |= {"model": {"path": digits}, "tokenizer": {"path": digits}}
            whole["data"]["sources"] = few_digits(4100, seed=1, shuffled=0.0)
            whole["sft"]["optimizer"] = {"learning_rate": 3e-4, "schedule": "cosine", "warmup_updates": 10}
        return whole | {"run": {"evaluate_every_steps": 20}}
    if task == "digits":
        start = digits
        data: dict[str, Any] = {"sources": digit_pairs(4400), "held_out_rows": 400, "max_tokens": 64}
    else:
        start = str(model_of(folder / "models" / "demo" / "sft", "policy"))
        data = shipped_stages("demo")["reward"]["data"]
    whole: dict[str, Any] = {"model": {"path": start}, "data": data, "run": EVERY_50}
    if trainer == "reward":
        run: dict[str, Any] = {} if task == "reviews" else EVERY_50  # the demo evaluates at both ends alone
        settings = shipped_stages("demo")["reward"]["reward"]
        return whole | {"tokenizer": {"path": start}, "run": run, "reward": settings}
    if task == "reviews":
        whole["data"] |= {"sources": review_pairs(4000)}
    rate_of_task = 1e-4 if task == "reviews" else 1e-5
    optimizer = {"learning_rate": rate_of_task, "schedule": "linear", "warmup_updates": 20}
    sizes = {"examples_per_step": 32} if trainer == "kto" else {"pairs_per_step": 16}
    return whole | {trainer: {**sizes, "optimizer": optimizer}}
