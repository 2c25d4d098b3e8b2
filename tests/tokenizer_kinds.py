"""A tokenizer of each kind that people's models have, made on the spot: small, and able to write any text."""

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

_SPACE = "\u2581"
_SPECIAL = ["<unk>", "<s>", "</s>", "<|assistant|>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_LETTERS = "abcdefghijklmnopqrstuvwxyzO()+0123456789:."
_MERGES = ["_a", "_t", "_ti", "me", "__", "____", "re", "tu", "rn", "turn", "return", "_return", "Once", "_Once", "na"]
"""A space is written as an underscore."""


def _sentencepiece(core: Tokenizer, decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    core.decoder = decoder
    return _finished(core)


def _finished(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _SPECIAL])
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|assistant|>"],
        name_or_path="the/tokenizer",
    )


def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary of a BPE with a token for every byte, and its merges."""
    pieces = [_SPACE, *_LETTERS]
    merges = []
    for text in _MERGES:
        piece = text.replace("_", _SPACE)
        # Of several ways to split it, any will do whose parts are there.
        parts = next(
            ((piece[:at], piece[at:]) for at in range(1, len(piece)) if {piece[:at], piece[at:]} <= {*pieces}), None
        )
        for left, right in [parts] if parts else _by_letters(piece, pieces):
            merges.append((left, right))
            pieces.append(left + right)
    return {piece: index for index, piece in enumerate([*_SPECIAL, *_BYTES, *dict.fromkeys(pieces)])}, merges


def _by_letters(piece: str, pieces: list[str]) -> list[tuple[str, str]]:
    """Merges that build a piece letter by letter."""
    return [(piece[:at], piece[at]) for at in range(1, len(piece)) if piece[: at + 1] not in pieces]


def _bpe() -> Tokenizer:
    vocab, merges = _pieces()
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def legacy() -> PreTrainedTokenizerFast:
    """As those of Llama 2, TinyLlama and Mistral 7B v0.1: a normaliser writes the space before a text."""
    core = _bpe()
    core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    return _sentencepiece(core, _stripping_decoder())


def metaspace(scheme: str, *, split: bool = False) -> PreTrainedTokenizerFast:
    """As newer conversions of sentencepiece models."""
    core = _bpe()
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=split)
    decoder = _stripping_decoder() if scheme != "never" else decoders.Sequence(_plain_decoders())
    return _sentencepiece(core, decoder)


def unigram() -> PreTrainedTokenizerFast:
    """As those of T5 and its like, with tokens for bytes."""
    vocab, _ = _pieces()
    scored = [(piece, 0.0 if piece in _SPECIAL else -20.0 if piece in _BYTES else -3.0 / len(piece)) for piece in vocab]
    core = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    core.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")]
    )
    return _finished(core)


def byte_level(*, add_prefix_space: bool) -> PreTrainedTokenizerFast:
    """As that of GPT-2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("\u0120", "a"),
        ("\u0120", "t"),
        ("i", "m"),
        ("im", "e"),
        ("\u0120", "\u0120"),
        ("n", "a"),
        ("\u00c3", "\u00a9"),
    ]
    pieces = [*_SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    core.decoder = decoders.ByteLevel()
    return _finished(core)


def word_piece() -> PreTrainedTokenizerFast:
    """As that of BERT: words and the pieces of words, without the white space between."""
    pieces = [*_SPECIAL, "a", "b", "##a", "##b", "once", "upon", "time"]
    core = Tokenizer(models.WordPiece(vocab={piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return _finished(core)


def _plain_decoders() -> list[decoders.Decoder]:
    return [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _stripping_decoder() -> decoders.Decoder:
    return decoders.Sequence([*_plain_decoders(), decoders.Strip(" ", 1, 0)])


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "sentencepiece, legacy": legacy,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, words": lambda: metaspace("always", split=True),
    "metaspace, never": lambda: metaspace("never"),
    "unigram": unigram,
    "byte-level": lambda: byte_level(add_prefix_space=False),
    "byte-level with a space before a text": lambda: byte_level(add_prefix_space=True),
}
"""All that can write a text behind another."""
