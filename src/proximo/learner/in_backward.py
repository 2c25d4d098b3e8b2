"""Steps each weight within the backward pass, as soon as its gradient is there. Not the update around it: update.py.

No two whole gradients exist at once, so a model is trained without the memory that its gradients would take.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def stepping_in_backward(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Generator[list[Tensor]]:
    """Inside, a backward pass steps every parameter that it reaches, and frees its gradient.

    Yields a list that fills with the norm of each gradient. A parameter is stepped once, when all that it did in the
    forward pass has been accounted for; that nothing reads it afterwards is checked by autograd's version counters.
    The optimizer looks through all of its parameters at each step and finds one gradient.
    """
    norms: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient was added"
        norms.append(torch.linalg.vector_norm(parameter.grad))
        optimizer.step()
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in parameters]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()
