"""Responses as bytes for other ranks: JSON for small values, raw numbers for tokens, no pickle.

The prompts are known on every rank, so a message has their indices only.
"""

import json
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from proximo.records import Finish, Prompt, Response


def to_bytes(responses: Iterable[tuple[int, Response]]) -> bytes:
    """Pairs of a prompt's index and a response to it. Log-probs are sent as float32, from the CPU."""
    rows, numbers = [], list[bytes]()
    for index, response in responses:
        logprobs = response.logprobs.detach().cpu().float().numpy()
        mask = response.response_mask.detach().cpu().numpy()
        rows.append(
            {
                "prompt": index,
                "sample": response.sample_index,
                "finish": response.finish.value,
                "version": response.policy_version,
                "token_versions": response.token_versions,
                "text": response.text,
                "lengths": [len(response.token_ids), len(logprobs), len(mask)],
            }
        )
        numbers += [
            np.array(response.token_ids, dtype=np.int64).tobytes(),
            logprobs.astype(np.float32).tobytes(),
            mask.astype(np.uint8).tobytes(),
        ]
    head = json.dumps(rows).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *numbers])


def as_sent(own: Sequence[Response], sent: Sequence[Response]) -> list[Response]:
    """The sender's responses as the receivers get them: the same records, or copies of those that `to_bytes` rounds."""
    return [response if _is_sent_exactly(response) else copy for response, copy in zip(own, sent, strict=True)]


def _is_sent_exactly(response: Response) -> bool:
    return response.logprobs.dtype == torch.float32 and response.logprobs.device.type == "cpu"


def from_bytes(message: bytes, prompts: Sequence[Prompt]) -> list[tuple[int, Response]]:
    """The responses in a message of `to_bytes`, with the prompts of its indices."""
    offset = 8 + int.from_bytes(message[:8], "little")

    def taken(count: int, dtype: type) -> np.ndarray:
        nonlocal offset
        start, offset = offset, offset + count * np.dtype(dtype).itemsize
        return np.frombuffer(message, dtype=dtype, count=count, offset=start)

    found = []
    for row in json.loads(message[8:offset]):
        num_tokens, num_logprobs, num_marks = row["lengths"]
        response = Response(
            prompt=prompts[row["prompt"]],
            sample_index=row["sample"],
            token_ids=tuple(taken(num_tokens, np.int64).tolist()),
            logprobs=torch.from_numpy(taken(num_logprobs, np.float32).copy()),
            response_mask=torch.from_numpy(taken(num_marks, np.uint8).astype(np.bool_)),
            finish=Finish(row["finish"]),
            policy_version=row["version"],
            text=row["text"],
            token_versions=None if row["token_versions"] is None else tuple(row["token_versions"]),
        )
        found.append((row["prompt"], response))
    return found
