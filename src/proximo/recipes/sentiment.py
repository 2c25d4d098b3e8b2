"""The reward of the recipe trl-classic: how positive a text reads to a sentiment classifier of the Hub.

Any classifier that transformers' text-classification pipeline loads will do, also one that is no causal model.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any


def positive(
    prompts: Sequence[Any],
    responses: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    model: str,
    label: str = "POSITIVE",
    batch_size: int = 32,
) -> list[float]:
    """The logit that `model` (a folder or Hub name) gives `label` for each prompt with its response.

    Raises ValueError where the classifier has no such label.
    """
    del metadata  # the text is all that counts
    texts = [f"{prompt}{response}" for prompt, response in zip(prompts, responses, strict=True)]
    label_scores = _classifier(model)(
        texts, batch_size=batch_size, top_k=None, function_to_apply="none", truncation=True
    )
    return [_logit(scores, label) for scores in label_scores]


def _logit(scores: Sequence[Mapping[str, Any]], label: str) -> float:
    by_label = {score["label"]: score["score"] for score in scores}
    if label not in by_label:
        raise ValueError(f"the classifier has the labels {', '.join(by_label)}, not {label}: name one with `label`")
    return by_label[label]


@cache
def _classifier(model: str) -> Any:
    from transformers import pipeline

    return pipeline("text-classification", model=model)
