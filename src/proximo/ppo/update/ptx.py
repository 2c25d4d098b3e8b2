"""PTX: a language-modelling loss on texts in every policy update, so that the policy keeps its abilities."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from proximo.config.ppo.losses import PTXConfig
from proximo.data.examples import ExampleOptions, TextExample, load_text_examples
from proximo.data.order import rows_at
from proximo.data.rows import Row
from proximo.distributed.world import current
from proximo.errors import ConfigError, DataError
from proximo.learner.text_batches import text_batches, text_nats
from proximo.learner.update import Learner, UpdateResult
from proximo.metrics.values import Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Statistics = TypeVar("Statistics")


class TextLoss:
    """The PTX texts of each policy update and their weight.

    Texts are a function of the update's number, without state.
    """

    def __init__(
        self, policy: LanguageModel, examples: Sequence[TextExample], config: PTXConfig, *, seed: int, token_budget: int
    ) -> None:
        self.policy = policy
        self.examples = examples
        self.coefficient = config.coefficient
        self.examples_per_update = config.examples_per_update
        self.seed = seed
        self.token_budget = token_budget

    def batches(self, update: int) -> tuple[list[PackedResponses], int]:
        """This rank's micro-batches of the texts of an update, counted from 0, and the targets of all ranks."""
        size = self.examples_per_update
        rows = rows_at(update * size, size, num_rows=len(self.examples), seed=self.seed)
        examples = [self.examples[row] for row in rows]
        batches = text_batches(examples, token_budget=self.token_budget, device=self.policy.device)
        return batches, sum(example.num_targets for example in examples)


class JointUpdates:
    """The policy's learner for one step, with PTX texts added to every update. Accumulates their loss."""

    def __init__(self, learner: Learner, texts: TextLoss) -> None:
        self.learner = learner
        self.texts = texts
        self._nats = 0.0
        self._num_tokens = 0

    def training(self) -> AbstractContextManager[None]:
        """The learner's `training` context."""
        return self.learner.training()

    def update(
        self,
        microbatches: Sequence[Any],
        loss: Callable[[Any], tuple[Tensor, Statistics]],
        *,
        guard: Callable[[Sequence[Statistics]], str | None] = lambda _: None,
    ) -> UpdateResult[Statistics]:
        """One optimizer step on loss + coefficient * mean token loss of the texts. The result's loss is `loss` alone.

        The gradient norm is that of the sum. A skipped update leaves its texts to the next one.
        """
        batches, num_tokens = self.texts.batches(self.learner.updates_done)
        text_losses: list[Tensor] = []

        def joint(batch: Any) -> tuple[Tensor, Statistics | None]:
            if not isinstance(batch, PackedResponses):
                return loss(batch)
            nats = text_nats(self.texts.policy, batch)
            text_losses.append(nats.detach())
            return self.texts.coefficient * nats / num_tokens, None

        result = self.learner.update([*microbatches, *batches], joint, guard=lambda parts: guard(_without_texts(parts)))
        # After the update, so that the losses are not waited for between micro-batches.
        own_nats = [loss.item() for loss in text_losses]
        nats = [loss for part in current().gather(own_nats, what="the losses of PTX texts") for loss in part]
        if result.refusal is None:
            self._nats += sum(nats)
            self._num_tokens += num_tokens
        own = result.loss - self.texts.coefficient * sum(nats) / num_tokens
        return replace(cast("UpdateResult[Any]", result), loss=own, statistics=tuple(_without_texts(result.statistics)))

    @property
    def metrics(self) -> dict[str, MetricValue]:
        """Mean loss on the texts, over the updates that were not skipped."""
        return {"ptx/loss": Mean(self._nats, self._num_tokens), "ptx/tokens": Sum(self._num_tokens)}


def make_text_loss(
    texts: Sequence[TextExample | str] | None,
    policy: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    config: PTXConfig | None,
    seed: int,
    token_budget: int,
) -> TextLoss | None:
    """The loss on `texts`, or None. Plain texts are tokenised as a whole.

    Raises ConfigError if only one of the two is given, DataError if there are no texts.
    """
    if (texts is None) != (config is None):
        missing = "ptx (texts) was not" if texts is None else "config.ptx (their weight) was not"
        raise ConfigError(f"texts in the loss need both ptx and config.ptx, but {missing} given")
    if texts is None or config is None:
        return None
    if isinstance(texts, str) or not texts:
        raise DataError("ptx must be a list of texts or TextExample records, and not empty")
    plain = [text for text in texts if isinstance(text, str)]
    examples = [text for text in texts if not isinstance(text, str)]
    if plain:
        rows = [Row(source="ptx", number=number, values={"text": text}) for number, text in enumerate(plain, start=1)]
        examples += load_text_examples(rows, tokenizer, ExampleOptions(form="text"))[0]
    return TextLoss(policy, examples, config, seed=seed, token_budget=token_budget)


def _without_texts(parts: Sequence[Statistics | None]) -> list[Statistics]:
    return [part for part in parts if part is not None]
