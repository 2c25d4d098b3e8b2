"""Log-probs of given tokens, from vLLM servers that have the model: the prompt log-probs of vLLM."""

import logging
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from proximo.records import Continuation
from proximo.rollout.vllm.dispatch import ATTEMPTS, Dispatch, Job
from proximo.rollout.vllm.server import VLLMServer

LOG = logging.getLogger("proximo.rollout")


def served_logprobs(servers: Sequence[VLLMServer], sequences: Sequence[Continuation]) -> Tensor:
    """[T] float32 log-probs of the tokens that follow in each sequence, end to end, at temperature 1.

    Each sequence is one request, balanced over the servers. Raises TrainingError if a server refuses one, or none gives
    a valid reply.
    """
    asked = [index for index, (_, tokens) in enumerate(sequences) if tokens]
    jobs = [Job(home=i % len(servers), ask=_job(index, *sequences[index])) for i, index in enumerate(asked)]
    dispatch = Dispatch(servers, jobs, attempts=ATTEMPTS)
    found = dict(dispatch.run())
    if dispatch.num_retries:
        LOG.warning("%d requests to the servers of the reference were repeated", dispatch.num_retries)
    return torch.tensor(list(chain.from_iterable(found[index] for index in asked)), dtype=torch.float32)


def _job(
    index: int, context: Sequence[int], tokens: Sequence[int]
) -> Callable[[VLLMServer], tuple[int, tuple[float, ...]]]:
    """Asks a server for one sequence: its index, and the log-probs of its tokens."""
    return lambda server: (index, server.prompt_logprobs((*context, *tokens), start=len(context)))
