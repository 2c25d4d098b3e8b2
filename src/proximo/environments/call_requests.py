"""What clients ask of the model, checked: vLLM's interface of token ids, and what both interfaces say of sampling.

The run decides how tokens are drawn, since it learns from them. A client may ask for fewer tokens. Options that it
would shape the distribution with have no effect, and are counted by name; what it cannot do without is refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from proximo.environments.recorder import Recording, RefusedCallError
from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import ModelCall

FINISH_REASONS = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}
_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "logit_bias", "stop_regex")
_OF_THE_RUN += ("frequency_penalty", "presence_penalty", "repetition_penalty", "best_of", "reasoning_effort")
_NEUTRAL = (None, 0, 0.0, {}, [], False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledCall:
    """What a client asks of one call, whatever the interface."""

    token_ids: tuple[int, ...]
    max_new_tokens: int | None
    ignored: tuple[str, ...]
    """Options without effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What a request may name of the tokens of the policy."""

    size: int
    special_ids: Collection[int]
    """Clients may name these as ends: those that end the responses of the run have an effect."""


def read_generate(body: Mapping[str, Any], recording: Recording, vocabulary: Vocabulary) -> SampledCall:
    """A request of `/inference/v1/generate`. Raises RefusedCallError."""
    # A model may have more tokens than its tokenizer, and draw them.
    drawn = () if recording.trajectory is None else set(recording.trajectory.token_ids)
    token_ids, sampling = body.get("token_ids"), body.get("sampling_params") or {}
    if not isinstance(token_ids, list) or not token_ids:
        raise refused("token_ids must be a list of token ids")
    if any(type(token) is not int or not (0 <= token < vocabulary.size or token in drawn) for token in token_ids):
        raise refused(f"token_ids must be whole numbers from 0 to {vocabulary.size - 1}")
    if not isinstance(sampling, Mapping):
        raise refused("sampling_params must be an object")
    for name in ("content_parts", "features", "stream", "prompt_logprobs"):
        if body.get(name) or sampling.get(name):
            raise refused(f"{name} is not served here")
    max_new_tokens, ignored = sampling_of(sampling, recording.options, vocabulary)
    return SampledCall(token_ids=tuple(token_ids), max_new_tokens=max_new_tokens, ignored=ignored)


def sampling_of(
    given: Mapping[str, Any], options: SamplingOptions, vocabulary: Vocabulary
) -> tuple[int | None, tuple[str, ...]]:
    """How many tokens a client wants at most, and the names of its options without effect.

    Raises RefusedCallError where it asks for several answers, or for ends that the run does not know.
    """
    if given.get("n") not in (None, 1):
        raise refused("n must be 1: ask again for another answer")
    newer = given.get("max_completion_tokens")
    wanted = given.get("max_tokens") if newer is None else newer
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise refused(f"max_tokens must be a whole number of at least 1, got {wanted!r:.40}")
    stops = given.get("stop") or ()
    _refuse_others((stops,) if isinstance(stops, str) else stops, options.stop_strings, "stop", "stop_strings")
    known = {*vocabulary.special_ids, *options.stop_token_ids}
    _refuse_others(given.get("stop_token_ids") or (), known, "stop_token_ids", "stop_token_ids")
    of_the_run = {"temperature": options.temperature, "top_p": options.top_p or 1.0, "top_k": options.top_k}
    ignored = [
        name
        for name in _OF_THE_RUN
        if given.get(name) != of_the_run.get(name) and (name == "temperature" or given.get(name) not in _NEUTRAL)
    ]
    return wanted, tuple(name for name in ignored if given.get(name) is not None)


def _refuse_others(given: Any, known: Collection[Any], name: str, key: str) -> None:
    """Raises RefusedCallError for an end that would not end a response of the run."""
    unknown = [each for each in given if each not in known] if isinstance(given, list | tuple) else [given]
    if unknown:
        raise refused(f"{name} {unknown[0]!r:.40} ends no response of this run: name it in ppo.rollout.{key}")


def generate_reply(call: ModelCall, model: str) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`."""
    choice = {
        "index": 0,
        "finish_reason": FINISH_REASONS[call.finish],
        "token_ids": list(call.token_ids),
        "logprobs": {"content": logprobs_of(call)},
        "weight_versions": weight_versions(call),
        **({} if call.sampling_mask is None else {"sampling_mask": call.sampling_mask.rows()}),
    }
    return {"request_id": request_id(call), "model": model, "output_mode": "tokens", "choices": [choice]}


def logprobs_of(call: ModelCall) -> list[dict[str, Any]]:
    """The log-prob of each token, in vLLM's form."""
    return [
        {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(call.token_ids, call.logprobs, strict=True)
    ]


def weight_versions(call: ModelCall) -> list[dict[str, Any]]:
    """Which weights drew which tokens, in vLLM's form."""
    ends = [start for _, start in call.versions[1:]] + [len(call.token_ids)]
    spans = zip(call.versions, ends, strict=True)
    return [{"version": str(version), "start": start, "end": end} for (version, start), end in spans if end > start]


def request_id(call: ModelCall) -> str:
    """Names a call in answers, without the secret of its trajectory."""
    return f"call-{call.request.lane}-{call.request.first_position}"


def refused(reason: str) -> RefusedCallError:
    """A request that the interface does not allow."""
    return RefusedCallError(400, "invalid_request", reason)
