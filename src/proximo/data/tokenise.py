"""Text to token ids, always segment by segment: the one place where data is tokenised. Not chat templates
(`templates/chat.py`).

A prompt and its response are separate segments wherever they are met (fine-tuning, reward training, rollouts, scoring
by a reward model with a tokenizer of its own), so the same text gives the same ids everywhere, and what a policy was
asked is a prefix of what it was trained on. Tokenising the joined text could merge characters across the boundary;
`count_merges` says for how many examples it would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from proximo.data.token_cache import TokenCache
from proximo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of text that is tokenised by itself, or token ids that no text is needed for."""

    text: str = ""
    written: bool
    """True where the assistant wrote it: the tokens that fine-tuning learns by default."""
    token_ids: tuple[int, ...] | None = None
    ends_turn: bool = False
    """True where a chat template ends a turn of the assistant with it."""
    is_context: bool = False
    """True where the data says that it is not to be learned, whoever wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A prompt and any number of responses to it, ready to be tokenised."""

    prompt: tuple[Segment, ...]
    responses: tuple[tuple[Segment, ...], ...] = ()
    unread: tuple[str, ...] = ()
    """What the messages hold and the chat template makes nothing of."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, each with whether the assistant wrote it and the data do not make it context."""

    ids: tuple[int, ...]
    written: tuple[bool, ...]

    def __add__(self, other: "Tokens") -> "Tokens":
        """The token ids of both, one after the other."""
        return Tokens(self.ids + other.ids, self.written + other.written)

    def __len__(self) -> int:
        """The number of token ids, special ones included."""
        return len(self.ids)

    @property
    def mask(self) -> tuple[bool, ...] | None:
        """Which of the tokens a loss learns; None where it learns all of them."""
        return None if all(self.written) else self.written

    def first(self, count: int) -> "Tokens":
        """The first `count` tokens."""
        return Tokens(self.ids[:count], self.written[:count])


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A prompt and the responses to it as tokens."""

    prompt: Tokens
    responses: tuple[Tokens, ...] = ()


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer, and what has to be known about it: start ids, end id, special marks. Owns no state beyond it."""

    tokenizer: "PreTrainedTokenizerBase"
    cache: TokenCache | None = None
    """Where ids of many texts are kept between runs; None keeps none."""

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a text: its BOS, or nothing. What it puts after is not used."""
        plain = self._call(["a"])[0]
        dressed = self.tokenizer("a")["input_ids"]
        for start in range(len(dressed) - len(plain) + 1):
            if list(dressed[start : start + len(plain)]) == list(plain):
                return tuple(dressed[:start])
        return ()

    @cached_property
    def end_id(self) -> int | None:
        """The id of the end-of-sequence token; None for a tokenizer without one."""
        return self.tokenizer.eos_token_id

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The texts of all special tokens, longest first."""
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return tuple(sorted(added | set(self.tokenizer.all_special_tokens), key=lambda mark: (-len(mark), mark)))

    @property
    def name(self) -> str:
        """What messages call the tokenizer."""
        return self.tokenizer.name_or_path or type(self.tokenizer).__name__

    def start(self, text: str) -> tuple[Segment, ...]:
        """The start ids before a text, unless the text itself begins with the BOS: it stands there once."""
        bos = self.tokenizer.bos_token
        if not self.start_ids or (bos and text.startswith(bos)):
            return ()
        return (Segment(written=False, token_ids=self.start_ids),)

    def end(self, text: str) -> tuple[Segment, ...]:
        """The end-of-sequence id after a text, unless the text itself ends with it."""
        if self.end_id is None:
            raise ModelError(
                f"the tokenizer '{self.name}' has no end-of-sequence token, so responses cannot be taught to end; "
                "set eos_token in its tokenizer_config.json"
            )
        if text.endswith(str(self.tokenizer.eos_token)):
            return ()
        return (Segment(written=True, token_ids=(self.end_id,)),)

    def texts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each text without start or end, in one call of the tokenizer; equal texts are tokenised once."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return []
        distinct_ids = (
            self._call(distinct) if self.cache is None else self.cache.ids(self.tokenizer, distinct, self._call)
        )
        ids = dict(zip(distinct, distinct_ids, strict=True))
        return [tuple(ids[text]) for text in texts]

    def rendered(self, batch: Sequence[Rendered]) -> list[Encoded]:
        """Tokens of each prompt and response, segment by segment."""
        segments = [segment for item in batch for part in (item.prompt, *item.responses) for segment in part]
        spelled = [segment.text for segment in segments if segment.token_ids is None]
        ids = dict(zip(spelled, self.texts(spelled), strict=True))
        return [
            Encoded(
                prompt=_joined(item.prompt, ids), responses=tuple(_joined(response, ids) for response in item.responses)
            )
            for item in batch
        ]

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included, nothing tidied."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def count_merges(
        self, batch: Sequence[Rendered], encoded: Sequence[Encoded], *, limit: int = 500
    ) -> tuple[int, int]:
        """(examples whose joined text gives other ids than its segments, examples looked at: evenly spread, <= limit).

        Looks at each prompt with its first response. A merge is no fault of the data, but a model pretrained on joined
        text has seldom seen such a boundary.
        """
        stride = max(1, -(-len(batch) // limit))
        texts = []
        apart = []
        for item, tokens in list(zip(batch, encoded, strict=True))[::stride]:
            if item.prompt and item.responses:
                segments = (*item.prompt, *item.responses[0])
                texts.append("".join(segment.text for segment in segments))
                apart.append(_spelled(segments, (tokens.prompt + tokens.responses[0]).ids))
        merges = sum(whole != parts for whole, parts in zip(self.texts(texts), apart, strict=True))
        return merges, len(texts)

    def unwritable(self, batch: Sequence[Rendered]) -> dict[str, int]:
        """Characters that the tokenizer leaves out, or has only its unknown token for, and how often they are there."""
        texts = dict.fromkeys(
            segment.text for item in batch for part in (item.prompt, *item.responses) for segment in part
        )
        holder: dict[str, str] = {}
        for text in texts:
            for character in set(text) - holder.keys():
                holder[character] = text
        alone = [character for character in sorted(holder) if not character.isspace()]
        unknown = {self.tokenizer.unk_token_id} - {self.end_id, self.tokenizer.bos_token_id}
        suspects = [c for c, ids in zip(alone, self.texts(alone), strict=True) if not set(ids) - unknown]
        # A vocabulary of whole words may know a letter within its word only.
        lost = {c for c in suspects if c not in self.text(self.texts([holder[c]])[0])}
        return {c: sum(text.count(c) for text in texts) for c in suspects if c in lost}

    def _call(self, texts: list[str]) -> list[list[int]]:
        # verbose=False: a text longer than the model's positions is counted in the report, not warned about here.
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _spelled(segments: Sequence[Segment], ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids without those that stand in segments without a text: BOS at the start, EOS at the end."""
    first, last = segments[0], segments[-1]
    return ids[len(first.token_ids or ()) : len(ids) - (len(last.token_ids or ()) if last is not first else 0)]


def _joined(segments: Sequence[Segment], ids: dict[str, tuple[int, ...]]) -> Tokens:
    tokens: list[int] = []
    written: list[bool] = []
    for segment in segments:
        added = ids[segment.text] if segment.token_ids is None else segment.token_ids
        tokens += added
        written += [segment.written and not segment.is_context] * len(added)
    return Tokens(tuple(tokens), tuple(written))
