"""Requests to a vLLM server and its replies: token ids in, token ids and log-probs out.

The interface is vLLM's `/inference/v1/generate`, which also reports the weights that made each token.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from proximo.data.codec import end_of_prompt
from proximo.http_client import UnansweredError
from proximo.records import Finish, SamplingMask
from proximo.rollout.sampling import SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall
from proximo.rollout.stopping import StopRules

GENERATE_PATH = "/inference/v1/generate"
MINUS_INFINITY = -9999.0
"""What vLLM writes in its place."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the multiples are far apart."""
NEVER_PUSHED = "default"
"""The version of the weights that a server started with."""


class InvalidReplyError(Exception):
    """The reply breaks the interface."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One sampled response as the server sent it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """NaN where the server gave none that is finite."""
    weight_versions: tuple[tuple[str, int], ...]
    """The versions of the weights that made its tokens, each with the index of its first token, in order."""
    sampling_mask: SamplingMask | None = None
    """None where the server gave none."""


def write(
    ask: Callable[[bytes], Choice],
    request: CallRequest,
    *,
    stop: StopRules,
    adapter: str | None,
    vocab_size: int | None,
    versions: Mapping[str, int],
) -> ModelCall:
    """What a server answers to a call. `ask` sends it a request. `vocab_size`: see `generate_body`.

    `versions`: of the policy, by the names of its weights; an adapter's name is that of its weights. Raises
    UnansweredError if the answer ends where nothing ends it.
    """
    limit = request.max_new_tokens
    prompt_end = end_of_prompt(stop.tokenizer, request.token_ids)

    def sampled(*, with_stop_strings: bool) -> tuple[Choice, tuple[int, Finish] | None]:
        body = generate_body(
            request.token_ids,
            options=stop.options,
            ending_ids=stop.eos_token_ids,
            seed=seed_of(request),
            limit=limit,
            model=adapter,
            vocab_size=vocab_size,
            with_stop_strings=with_stop_strings,
        )
        choice = ask(body)
        return choice, _ended(stop, choice, prompt_end, limit)

    choice, ended = sampled(with_stop_strings=bool(stop.options.stop_strings))
    if ended is None and stop.options.stop_strings:
        # The server reads another text from the tokens than we do. Its draws are those of the seed.
        choice, ended = sampled(with_stop_strings=False)
    if ended is None:
        raise UnansweredError("invalid reply: the response ends without a token or string that ends it")
    length, finish = ended
    given = choice.sampling_mask if stop.options.leaves_out_tokens else None
    mask = None if given is None else given.part(0, length)
    of_policy = _are_of_the_policy(stop.options, mask, has_masks=vocab_size is not None)
    named = choice.weight_versions if adapter is None else ((adapter, 0),)
    return ModelCall(
        request=request,
        token_ids=choice.token_ids[:length],
        logprobs=choice.logprobs[:length] if of_policy else (math.nan,) * length,
        finish=finish,
        sampling_mask=mask,
        versions=tuple((versions[name], start) for name, start in named if start < length),
    )


def seed_of(request: CallRequest) -> int:
    """A signed 64-bit seed for a call: the stream for the first of a trajectory, and for later ones a number of its
    own, since a server counts the draws of each request from 0.
    """
    return (request.stream + request.first_position * _GOLDEN + 2**63) % 2**64 - 2**63


def generate_body(
    token_ids: Sequence[int],
    *,
    options: SamplingOptions,
    ending_ids: Collection[int],
    seed: int,
    limit: int,
    model: str | None,
    vocab_size: int | None,
    with_stop_strings: bool,
) -> bytes:
    """The request for one response.

    `seed`: of this response alone. `limit`: most new tokens. `model`: the adapter to use, or None. `vocab_size`: of a
    server that may return sampling masks: vLLM 0.32 then refuses a request without a temperature or a top_k.
    `with_stop_strings`: let the server end at stop strings.
    """
    top_k, temperature = options.top_k or vocab_size or 0, options.temperature
    if options.greedy:
        top_k, temperature = (0, 0.0) if vocab_size is None else (1, 1.0)
    sampling: dict[str, Any] = {
        "n": 1,
        "seed": seed,
        "max_tokens": limit,
        "min_tokens": options.min_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": 1.0 if options.top_p is None else options.top_p,
        "logprobs": 0,
        "ignore_eos": True,  # its own end-of-sequence tokens; ours are among stop_token_ids
        "stop_token_ids": sorted({*ending_ids, *options.stop_token_ids}),
        "detokenize": with_stop_strings,
    }
    if with_stop_strings:
        sampling |= {"stop": list(options.stop_strings), "include_stop_str_in_output": True}
    body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": sampling}
    if model is not None:
        body["model"] = model
    return json.dumps(body).encode()


def ids_body(token_ids: Sequence[int]) -> bytes:
    """The request for the log-probs of these ids. vLLM always writes a token after them, which nobody reads."""
    # Some top_k and temperature are needed by a server that may return sampling masks: see `generate_body`.
    sampling = {"n": 1, "max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0, "detokenize": False}
    return json.dumps({"token_ids": list(token_ids), "sampling_params": sampling}).encode()


def read_logprobs(reply: bytes, token_ids: Sequence[int], *, start: int) -> tuple[float, ...]:
    """The log-prob of each id from index `start` on, given all before it.

    Raises InvalidReplyError unless each of them is there and finite, and of the weights that the server started with.
    """
    message = _message(reply)
    found, choices = message.get("prompt_logprobs"), message.get("choices")
    if not isinstance(found, list) or len(found) != len(token_ids):
        raise InvalidReplyError(f"log-probs of {len(token_ids)} ids were asked for, {_size(found)} came")
    choice = choices[0] if isinstance(choices, list) and choices else None
    ((version, _),) = _versions(_field(choice, "weight_versions"), 1)
    if version != NEVER_PUSHED:
        raise InvalidReplyError(f"the server was given other weights, {version}, than it started with: start it again")
    values = []
    for index, token in enumerate(token_ids[start:], start):
        value = _field(_field(found[index], str(token)), "logprob")
        if type(value) not in (int, float) or not MINUS_INFINITY < value <= 0:
            raise InvalidReplyError(f"id {token} at {index} has no log-prob that is finite: {found[index]!r:.100}")
        values.append(float(value))
    return tuple(values)


def read_choice(reply: bytes, *, limit: int, vocab_size: int) -> Choice:
    """The response in a reply. Raises InvalidReplyError."""
    choices = _message(reply).get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else "no"
        raise InvalidReplyError(f"one response was asked for, {count} came")
    choice = choices[0]
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list) or not 1 <= len(token_ids) <= limit:
        raise InvalidReplyError(f"a response has 1 to {limit} tokens, got {_size(token_ids)}")
    if not all(type(token) is int and 0 <= token < vocab_size for token in token_ids):
        raise InvalidReplyError(f"token ids are whole numbers from 0 to {vocab_size - 1}, got {token_ids!r:.100}")
    if choice.get("finish_reason") not in ("stop", "length"):
        raise InvalidReplyError(f"the server ended the response: finish_reason {choice.get('finish_reason')!r:.40}")
    return Choice(
        token_ids=tuple(token_ids),
        logprobs=_logprobs(choice.get("logprobs"), token_ids),
        weight_versions=_versions(choice.get("weight_versions"), len(token_ids)),
        sampling_mask=_sampling_mask(choice.get("sampling_mask"), token_ids, vocab_size),
    )


def _message(reply: bytes) -> Mapping[str, Any]:
    try:
        message = json.loads(reply)
    except ValueError as error:
        raise InvalidReplyError(f"not JSON: {error!s:.100}") from None
    return message if isinstance(message, dict) else {}


def _logprobs(given: Any, token_ids: Sequence[int]) -> tuple[float, ...]:
    """One log-prob per token; NaN for each that is missing or not finite."""
    content = given.get("content") if isinstance(given, Mapping) else None
    if not content:
        return (math.nan,) * len(token_ids)
    if not isinstance(content, list) or [_field(each, "token_id") for each in content] != list(token_ids):
        raise InvalidReplyError("the log-probs are not those of the response's tokens")
    found = (_field(each, "logprob") for each in content)
    return tuple(
        float(value) if type(value) in (int, float) and math.isfinite(value) and value <= 0 else math.nan
        for value in found
    )


def _versions(given: Any, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """The versions in the spans, which must cover all tokens."""
    spans = given if isinstance(given, list) else []
    covered, versions = 0, list[tuple[str, int]]()
    for span in spans:
        version, start, end = (_field(span, name) for name in ("version", "start", "end"))
        if not isinstance(version, str) or start != covered or type(end) is not int or end <= covered:
            break
        versions.append((version, covered))
        covered = end
    if covered != num_tokens:
        raise InvalidReplyError(
            "it does not say which weights made each token: vLLM does so from version 0.32 on"
            if not spans
            else "its weight versions do not cover the response"
        )
    return tuple(versions)


def _sampling_mask(given: Any, token_ids: Sequence[int], vocab_size: int) -> SamplingMask | None:
    """What each token was drawn from, which it is one of."""
    if given is None:
        return None
    wrong = InvalidReplyError("the sampling mask is not that of the response's tokens")
    if not isinstance(given, list) or len(given) != len(token_ids) or not all(isinstance(ids, list) for ids in given):
        raise wrong
    numbers, counts = list(chain.from_iterable(given)), np.array([len(ids) for ids in given])
    if set(map(type, numbers)) != {int} or counts.min() < 1:
        raise wrong
    ids = np.array(numbers)  # which may be a million
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise wrong
    is_drawn = ids == np.repeat(token_ids, counts)
    if not np.logical_or.reduceat(is_drawn, counts.cumsum() - counts).all():
        raise wrong
    return SamplingMask(token_ids=torch.from_numpy(ids.astype(np.int32)), counts=torch.from_numpy(counts))


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else None


def _size(token_ids: Any) -> str:
    return str(len(token_ids)) if isinstance(token_ids, list) else "none"


def _ended(stop: StopRules, choice: Choice, prompt_end: Sequence[int], limit: int) -> tuple[int, Finish] | None:
    """Number of tokens up to the end of the response, and why it ends; None if none of the tokens ends it."""
    so_far: list[int] = []  # grows, since a slice for each length would take the square of the tokens
    for token in choice.token_ids:
        so_far.append(token)
        finish = stop.finish(so_far, prompt_end=prompt_end, limit=limit)
        if finish is not None:
            return len(so_far), finish
    return None


def _are_of_the_policy(options: SamplingOptions, mask: SamplingMask | None, *, has_masks: bool) -> bool:
    """Whether the server's log-probs are those that the learner computes.

    At temperature 1 a server without masks gives the model's own; elsewhere, those of the distribution that it draws
    from. `has_masks`: whether the server may return them.
    """
    if options.greedy and has_masks:
        return False
    return mask is not None or options.temperature == 1 or options.draws_from_full_softmax
