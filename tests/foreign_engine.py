"""An engine as somebody else would bring one: weights of its own, and log-probs that are nearly the learner's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from builders import tiny_tokenizer
from proximo.errors import ModelError, UserError
from proximo.models.language import LanguageModel
from proximo.records import Finish, Prompt, Response
from proximo.rollout.engine import Holding, fingerprint
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions


class ForeignEngine:
    """Keeps what it is sent as bf16, and samples from that. `loaded` lists the versions that came."""

    logprobs_are_the_learners = False
    max_logprob_error = None

    def __init__(self, model: LanguageModel, *, eos_token_ids: Sequence[int] = (2,)) -> None:
        """`model` is copied: what happens to it afterwards is not seen here."""
        self.model = model.frozen_copy()
        self.inner = LocalEngine(self.model, tiny_tokenizer(), eos_token_ids=eos_token_ids)
        self.received: dict[str, Tensor] = {}
        self.loaded: list[int] = []

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        own = dict(self.model.model.named_parameters())
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ModelError(f"{name} is not in this engine's model")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor.to(torch.bfloat16))
        self.received = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.loaded.append(version)

    def holds(self) -> Holding | None:
        return Holding(version=self.loaded[-1], fingerprint=fingerprint(self.received)) if self.loaded else None

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        if not self.loaded:
            raise UserError("this engine has no weights yet")
        found = []
        for response in self.inner.generate(prompts, num_samples=num_samples, options=options, key=key):
            assert response.finish in Finish
            found.append(replace(response, policy_version=self.loaded[-1]))
            if on_finished is not None:
                on_finished(found[-1])
        return found


class RemoteEngine:
    """An engine with a copy of the weights that may be called from several threads, such as one of servers."""

    logprobs_are_the_learners = False
    max_logprob_error = None
    thread_safe = True

    def __init__(self, model: LanguageModel) -> None:
        self.inner = LocalEngine(model.frozen_copy(), tiny_tokenizer(), eos_token_ids=(2,), owns_model=True)
        self.load_weights, self.holds = self.inner.load_weights, self.inner.holds
        self.generate, self.stop = self.inner.generate, self.inner.stop
