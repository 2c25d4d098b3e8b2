"""Text to token ids, segment by segment: all data is tokenised here.

A prompt and its response are separate segments everywhere (fine-tuning, reward training, rollouts, scoring by a reward
model with another tokenizer), so the same text always gives the same ids, and a policy's prompt is a prefix of the
text that it was trained on. Each segment has the ids of its place in the text: a tokenizer's prefix of a whole text
(`codec.py`) appears only at its beginning, and white space that a special token absorbs has no id. Tokenising
the joined text could merge characters across the boundary; `count_merges` counts the examples where it would.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from proximo.data.codec import PartEncoder, decode
from proximo.data.token_cache import TokenCache, Tokenise
from proximo.errors import ModelError
from proximo.hub import UNNAMED_TOKENIZER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Place = str | None
"""What precedes a text: "" if it begins the whole, a special token, or None for other text."""

_MOST_CANDIDATES = 1000
"""Most tokens that are searched for two texts that the tokenizer can write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of text that is tokenised separately, or token ids without text."""

    text: str = ""
    written: bool
    """True if the assistant wrote it."""
    token_ids: tuple[int, ...] | None = None
    ends_turn: bool = False
    """True if a chat template ends a turn of the assistant with it."""
    is_context: bool = False
    """True if the data excludes it from learning, even if the assistant wrote it."""

    @property
    def is_learned(self) -> bool:
        """True if fine-tuning learns it by default."""
        return self.written and not self.is_context


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A prompt and any number of responses to it, ready to be tokenised."""

    prompt: tuple[Segment, ...]
    responses: tuple[tuple[Segment, ...], ...] = ()
    unread: tuple[str, ...] = ()
    """Keys of the messages that the chat template ignores."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, each with whether the assistant wrote it and it is learned (`Segment.is_learned`)."""

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
        """Which of the tokens a loss learns; None if it learns all."""
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
    """A tokenizer with its start ids, end id and special tokens."""

    tokenizer: "PreTrainedTokenizerBase"
    cache: TokenCache | None = None
    """Saves ids of many texts between runs; None saves none."""

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before a text: its BOS, or none. Ids that it puts after are not used."""
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
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return _longest_first([*added, *self.tokenizer.all_special_tokens])

    @property
    def name(self) -> str:
        """The tokenizer's name in messages."""
        return self.tokenizer.name_or_path or UNNAMED_TOKENIZER

    def start(self, text: str) -> tuple[Segment, ...]:
        """The start ids before a text, unless the text itself begins with the BOS."""
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
        """Ids of whole texts without start or end, in one call of the tokenizer; equal texts are tokenised once."""
        return self._each(texts, self._call, within=False)

    def rendered(self, batch: Sequence[Rendered]) -> list[Encoded]:
        """Tokens of each prompt and response, segment by segment."""
        parts = [part for item in batch for part in self._parts(item)]
        spelled = [(segment.text, place) for part in parts for segment, place in part if segment.token_ids is None]
        ids = dict(zip(spelled, self.placed(spelled), strict=True))
        tokens = iter([_joined(part, ids) for part in parts])
        return [Encoded(prompt=next(tokens), responses=tuple(next(tokens) for _ in item.responses)) for item in batch]

    def placed(self, parts: Sequence[tuple[str, Place]]) -> list[tuple[int, ...]]:
        """Ids of each text at its place."""
        within = [text for text, place in parts if place is None]
        whole = [(text, place) for text, place in parts if place is not None]
        ids: dict[tuple[str, Place], tuple[int, ...]] = {
            (text, None): found for text, found in zip(within, self._within(within), strict=True)
        }
        for (text, mark), found in zip(whole, self.texts([mark + text for text, mark in whole]), strict=True):
            is_apart = bool(mark) and found[:1] == (self.tokenizer.convert_tokens_to_ids(mark),)
            ids[text, mark] = found[1:] if is_apart else found if not mark else self.texts([text])[0]
        return [ids[part] for part in parts]

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids from the beginning of a whole, special tokens included.

        It excludes the tokenizer's prefix of every text, also after a BOS.
        """
        is_begun = tuple(ids[: len(self.start_ids)]) == self.start_ids
        pieces = (self.start_ids, ids[len(self.start_ids) :]) if is_begun else (ids,)
        return "".join(decode(self.tokenizer, piece, skip_special_tokens=False) for piece in pieces)

    def count_merges(
        self, batch: Sequence[Rendered], encoded: Sequence[Encoded], *, limit: int = 500
    ) -> tuple[int, int]:
        """(examples whose joined text gives other ids than its segments, examples checked: evenly spread, <= limit).

        Checks each prompt with its first response. A merge is not an error in the data, but a model pretrained on
        joined text has rarely seen such a boundary.
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
        """Characters that the tokenizer drops or maps to its unknown token -> how often they occur."""
        texts = dict.fromkeys(
            segment.text for item in batch for part in (item.prompt, *item.responses) for segment in part
        )
        holder: dict[str, str] = {}
        for text in texts:
            for character in set(text) - holder.keys():
                holder[character] = text
        alone = [character for character in sorted(holder) if not character.isspace()]
        unknown = {self.tokenizer.unk_token_id} - {self.end_id, self.tokenizer.bos_token_id}
        found = self._each(alone, self._call_within, within=True)
        suspects = [c for c, ids in zip(alone, found, strict=True) if not set(ids) - unknown]
        # A vocabulary of whole words may know a letter only within a word.
        lost = {c for c in suspects if c not in self.text(self.texts([holder[c]])[0])}
        return {c: sum(text.count(c) for text in texts) for c in suspects if c in lost}

    def _parts(self, item: Rendered) -> Iterator[list[tuple[Segment, Place]]]:
        """Prompt and responses, each segment with its place."""
        prompt = list(self._with_places(item.prompt, ""))
        yield prompt
        end = self._behind(*prompt[-1]) if prompt else ""
        for response in item.responses:
            yield list(self._with_places(response, end))

    def _with_places(self, segments: Sequence[Segment], place: Place) -> Iterator[tuple[Segment, Place]]:
        for segment, following in zip_longest(segments, segments[1:]):
            is_taken_in = following is not None and following.text.startswith(self._taking_in_before)
            yield replace(segment, text=segment.text.rstrip()) if is_taken_in else segment, place
            place = self._behind(segment, place)

    def _behind(self, segment: Segment, place: Place) -> Place:
        """The place of the next segment. Ids without text come before the whole, or at its end."""
        bare = segment.text.rstrip()
        if not segment.text or (not bare and place in self._taking_in_behind):
            return place
        ends = (mark for mark in self._dividing if segment.text.endswith(mark))
        return next(ends, None) or next((mark for mark in self._taking_in_behind if bare.endswith(mark)), None)

    @cached_property
    def _dividing(self) -> tuple[str, ...]:
        """The texts of added tokens, which are split off before the rest is tokenised; longest first."""
        return _longest_first(token.content for token in self.tokenizer.added_tokens_decoder.values())

    @cached_property
    def _taking_in_before(self) -> tuple[str, ...]:
        """Added tokens that absorb the white space before them, so that it has no token."""
        return _longest_first(token.content for token in self.tokenizer.added_tokens_decoder.values() if token.lstrip)

    @cached_property
    def _taking_in_behind(self) -> tuple[str, ...]:
        """Added tokens that absorb the white space after them."""
        return _longest_first(token.content for token in self.tokenizer.added_tokens_decoder.values() if token.rstrip)

    def _within(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of texts after other text. Raises ModelError for a tokenizer that would change them there."""
        if texts and self._misread is not None:
            raise ModelError(
                f"the tokenizer '{self.name}' cannot write one text after another: {self._misread}; a changed text "
                "would be learned. Use a tokenizer that preserves white space, for example byte-level BPE or "
                "sentencepiece"
            )
        return self._each(texts, self._call_within, within=True)

    @cached_property
    def _misread(self) -> str | None:
        """A description of two texts that decode wrongly one after the other; None if all is well."""
        known = [text for text in ("a", "b") if self._writes(text)]
        if len(known) < 2:
            known = [text for text in islice(self.tokenizer.get_vocab(), _MOST_CANDIDATES) if self._writes(text)][:2]
        if len(known) < 2:
            return None
        one, other = known
        for text in (other, f" {other}"):
            ids = self._call_within([text])[0]
            read = self.text((*self._call([one])[0], *ids)).removeprefix(" ")
            # A vocabulary without a space gives its unknown token, which `unwritable` counts in the data.
            if read != one + text and self.tokenizer.unk_token_id not in ids:
                return f"{one!r} and then {text!r} read {read!r}"
        return None

    def _writes(self, text: str) -> bool:
        return text.isalnum() and self.text(self._call([text])[0]).strip() == text

    @cached_property
    def _part_encoder(self) -> PartEncoder | None:
        return PartEncoder.of(self.tokenizer)

    def _call_within(self, texts: list[str]) -> list[list[int]]:
        return self._call(texts) if self._part_encoder is None else self._part_encoder.encode(texts)

    def _each(self, texts: Sequence[str], call: Tokenise, *, within: bool) -> list[tuple[int, ...]]:
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return []
        cached = self.cache is not None
        found = self.cache.ids(self.tokenizer, distinct, call, within=within) if cached else call(distinct)
        ids = dict(zip(distinct, map(tuple, found), strict=True))
        return [ids[text] for text in texts]

    def _call(self, texts: list[str]) -> list[list[int]]:
        # verbose=False: a text longer than the model's positions is counted in the report, not warned about here.
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _longest_first(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts), key=lambda text: (-len(text), text)))


def _spelled(segments: Sequence[Segment], ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids without those of segments without text: BOS at the start, EOS at the end."""
    first, last = segments[0], segments[-1]
    return ids[len(first.token_ids or ()) : len(ids) - (len(last.token_ids or ()) if last is not first else 0)]


def _joined(segments: Sequence[tuple[Segment, Place]], ids: Mapping[tuple[str, Place], tuple[int, ...]]) -> Tokens:
    tokens: list[int] = []
    written: list[bool] = []
    for segment, place in segments:
        added = ids[segment.text, place] if segment.token_ids is None else segment.token_ids
        tokens += added
        written += [segment.is_learned] * len(added)
    return Tokens(tuple(tokens), tuple(written))
