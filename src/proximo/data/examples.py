"""Rows to `TextExample`, the input of supervised fine-tuning: token ids, and which of them count in the loss."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from proximo.data.formats.prompt_response import Exchange, in_form
from proximo.data.formats.row_formats import TextForm, text_exchanges
from proximo.data.load_report import LoadReport, Remark
from proximo.data.loading import Converted, load_in_portions
from proximo.data.rendering import LoadOptions, count_unread, encode_exchanges
from proximo.data.rows import Row, row_id
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import Encoded, Rendered, TextEncoder, Tokens
from proximo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TrainOn = Literal["responses", "last_response", "everything"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextExample:
    """One sequence to learn."""

    id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the token is a target, predicted from those before it; the first never is."""

    @property
    def num_targets(self) -> int:
        """Tokens that count in the loss."""
        return sum(self.loss_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleOptions(LoadOptions):
    """How rows become texts to learn. A truncated example keeps its beginning, without an EOS."""

    form: TextForm = "auto"
    train_on: TrainOn = "responses"
    """The tokens that count in the loss: the assistant's, those of its last turn, or all. Plain text counts in full."""
    layout: Literal["examples", "blocks"] = "examples"
    """One example per row; or plain texts joined, with EOS between, and cut into blocks of max_tokens."""


def load_text_examples(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    options: ExampleOptions,
    *,
    cache: TokenCache | None = None,
) -> tuple[Sequence[TextExample], LoadReport]:
    """Examples in the order of the rows, and a report on the rows.

    Large lists are kept on disk (`large_lists.py`). Raises DataError naming a malformed row, and if no example is left.
    """
    encoder = TextEncoder(tokenizer, cache)
    blocks = _Blocks(options.max_tokens or 0) if options.layout == "blocks" else None

    def read(remarks: Counter[Remark]) -> Iterator[tuple[str, Exchange | None]]:
        learns_all = options.train_on == "everything"
        exchanges = text_exchanges(rows, remarks, options.form, learns_all=learns_all)
        return ((row_id(row), exchange) for row, exchange in zip(rows, exchanges, strict=True))

    return load_in_portions(
        rows,
        read,
        lambda pair: 0 if pair[1] is None else pair[1].num_characters,
        lambda portion: _portion(encoder, portion, options, blocks),
        what="example",
        limit=options.max_tokens,
        rest=None if blocks is None else blocks.rest,
    )


def _portion(
    encoder: TextEncoder,
    portion: Sequence[tuple[str, Exchange | None]],
    options: ExampleOptions,
    blocks: "_Blocks | None",
) -> Converted[TextExample]:
    paired = [(identity, exchange) for identity, exchange in portion if exchange is not None]
    exchanges = in_form([each for _, each in paired], to_messages=options.as_messages, system=options.system)
    learned = "all" if options.train_on == "responses" else "last"
    rendered, encoded = encode_exchanges(encoder, exchanges, learned=learned)
    if blocks is not None:
        examples, counts = blocks.added(exchanges, encoded)
    else:
        examples, counts = _one_per_row(encoder, [identity for identity, _ in paired], rendered, encoded, options)
    merges, checked = encoder.count_merges(rendered, encoded)
    return examples, counts + LoadReport(
        num_rows=len(portion),
        num_ties=len(portion) - len(paired),
        num_empty_responses=sum(not exchange.responses[0] for exchange in exchanges),
        num_merged_boundaries=merges,
        unwritable=encoder.unwritable(rendered),
        unread=count_unread(rendered),
        num_checked_boundaries=checked,
        num_tokens=_num_tokens(examples),
    )


def _num_tokens(examples: Sequence[TextExample]) -> int:
    return sum(len(example.token_ids) for example in examples)


def _one_per_row(
    encoder: TextEncoder,
    identities: Sequence[str],
    rendered: Sequence[Rendered],
    encoded: Sequence[Encoded],
    options: ExampleOptions,
) -> tuple[list[TextExample], LoadReport]:
    examples: list[TextExample] = []
    num_characters = num_too_long = num_truncated = num_without_targets = 0
    for identity, segments, item in zip(identities, rendered, encoded, strict=True):
        tokens = _marked(item, options.train_on)
        is_long = options.max_tokens is not None and len(tokens) > options.max_tokens
        kept = tokens.first(options.max_tokens or len(tokens))
        # The first token has no token before it to predict it.
        example = TextExample(id=identity, token_ids=kept.ids, loss_mask=(False, *kept.written[1:])[: len(kept)])
        if is_long and (options.too_long == "drop" or not example.num_targets):
            num_too_long += 1
        elif not example.num_targets:
            num_without_targets += 1
        else:
            examples.append(example)
            num_truncated += is_long
            num_characters += _num_characters(encoder, segments, example, options, is_long=is_long)
    return examples, LoadReport(
        num_kept_rows=len(examples),
        num_characters=num_characters,
        num_too_long=num_too_long,
        num_truncated=num_truncated,
        num_without_targets=num_without_targets,
    )


def _marked(item: Encoded, train_on: TrainOn) -> Tokens:
    """Prompt and response, with the tokens to learn marked."""
    tokens = item.prompt + item.responses[0]
    if train_on == "everything":
        return Tokens(tokens.ids, (True,) * len(tokens))
    if train_on == "last_response":
        written = list(tokens.written)
        num_last = len(list(takewhile(bool, reversed(written))))
        return Tokens(tokens.ids, (*[False] * (len(written) - num_last), *written[len(written) - num_last :]))
    return tokens


def _num_characters(
    encoder: TextEncoder, segments: Rendered, example: TextExample, options: ExampleOptions, *, is_long: bool
) -> int:
    if is_long:
        targets = [token for token, is_target in zip(example.token_ids, example.loss_mask, strict=True) if is_target]
        return len(encoder.text(targets))
    learned = [*segments.prompt, *segments.responses[0]]
    if options.train_on == "last_response":
        learned = list(takewhile(lambda segment: segment.is_learned, reversed(learned)))
    everything = options.train_on == "everything"
    return sum(len(segment.text) for segment in learned if segment.is_learned or everything)


class _Blocks:
    """Joins texts and cuts them into blocks that overlap by one token, so that each but the first is a target once."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._stream: list[int] = []
        self._number = 0

    def added(self, exchanges: Sequence[Exchange], encoded: Sequence[Encoded]) -> tuple[list[TextExample], LoadReport]:
        """The blocks that these texts complete, and a report on their rows. Raises ConfigError for a prompt."""
        if any(exchange.prompt != "" for exchange in exchanges):
            raise ConfigError("the layout blocks is for plain text; prompts with responses keep one example per row")
        stream = self._stream + [token for item in encoded for token in (*item.prompt.ids, *item.responses[0].ids)]
        starts = range(0, len(stream) - self._length + 1, self._length - 1)
        blocks = [self._block(stream[start : start + self._length]) for start in starts]
        self._stream = stream[len(blocks) * (self._length - 1) :]
        num_characters = sum(len(str(exchange.responses[0])) for exchange in exchanges)
        return blocks, LoadReport(num_kept_rows=len(exchanges), num_characters=num_characters)

    def rest(self) -> Converted[TextExample]:
        """The last block, which is shorter; none if only the overlapping token is left."""
        blocks = [self._block(self._stream)] if len(self._stream) > 1 else []
        return blocks, LoadReport(num_tokens=_num_tokens(blocks))

    def _block(self, ids: Sequence[int]) -> TextExample:
        self._number += 1
        mask = (False, *[True] * (len(ids) - 1))
        return TextExample(id=f"block-{self._number}", token_ids=tuple(ids), loss_mask=mask)
