"""Checks at load that a model runs correctly packed, with shared prefixes, and cached.

Compares two short sequences, which begin with the same tokens, with the results of the model's own attention.

The name of the architecture is not enough: some models silently ignore a registered attention function. The model is
left unchanged. The tolerance, in float32, is relative to the largest entry, or absolute if all entries are below 1.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from proximo.distributed.unread_parameters import DESTROYED, num_not_finite, numbers_of, reading_when_run, unread_in
from proximo.distributed.world import current
from proximo.errors import ModelError
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.attention.packed import ATTENTION, AttentionOptions, PackedKernel, PackedLayout
from proximo.models.fast_path import Decoder
from proximo.models.language import LanguageModel
from proximo.models.packing import Packed, pack
from proximo.models.precision.placement import without_tf32
from proximo.models.pretrained.sources import first_part
from proximo.models.pretrained.vocabulary import embedding_rows
from proximo.models.quantised import Quantisation, quantisation_of
from proximo.models.scalar import ScalarModel
from proximo.models.transformers_model import decoder_layers, position_limit, quiet_transformers

TOLERANCE = 1e-4
TOLERANCE_OF_8_BITS = 0.02
"""Products in 8 bits round each token's inputs to 1/127 of the largest, and a last bit may tip a rounding."""
PROBE_LENGTHS = (9, 6)
NUM_SHARED = 3
"""Tokens that both sequences begin with, where the shorter one has more."""
WIDEST_TESTED_WINDOW = 64
"""Sequences are made longer than the attention window up to here; beyond, its size is checked without running it."""
NUM_DECODED = 3
NUM_READ = 2
"""Those of the decoded tokens that a pass takes at once."""
FEW_ROWS = 64
"""Rows for which a plug-in may have another product of the head."""


@torch.no_grad()
def probe_language_model(model: LanguageModel) -> None:
    """Raises ModelError, naming the architecture and what differed, for a model that Proximo would run wrongly.

    Checked: one attention call per layer with the configured window; packed = one by one; the fused head's logits =
    the model's own; cached decoding = the forward pass. Run before an adapter is added.
    """
    if unread_in([model.base]) and current().size > 1:
        current().on_rank_0(lambda: probe_language_model(model), what="the probe of a model")
        return
    plain = LanguageModel(model.base)
    with _prepared(plain.base), _refusal(plain):
        packed = pack(_sequences(plain.base), device=plain.device)
        own_hidden, own_logits = _own_results(plain.base, packed)
        for hidden in _packed_passes(plain, packed):
            _compare(plain.base, "the hidden states of packed sequences", hidden, own_hidden)
        _compare_shared(plain, packed, own_hidden)
        _compare(plain.base, "the logits of its head", plain.head.logits(hidden), own_logits)
        with torch.inference_mode():  # as in sampling, which may take another kernel
            few = plain.head.logits(hidden[:FEW_ROWS].contiguous())
        _compare(plain.base, "the logits of its head", few, own_logits[:FEW_ROWS])
        for decoder in dict.fromkeys((plain.backbone.decode, plain.decoder())):
            hidden = _decoded(plain, packed, decoder)
            _compare(plain.base, "hidden states decoded with a cache", hidden, own_hidden[_decoded_positions(packed)])


@torch.no_grad()
def probe_scalar_model(model: ScalarModel) -> None:
    """Raises ModelError for a value or reward model that Proximo would run wrongly.

    Checks the attention calls, packed hidden states and the scores of the head.
    """
    if unread_in([model.base]) and current().size > 1:
        current().on_rank_0(lambda: probe_scalar_model(model), what="the probe of a model")
        return
    plain = ScalarModel(model.base)
    with _prepared(plain.base), _refusal(plain):
        packed = pack(_sequences(plain.base), device=plain.device)
        own_hidden, own_scores = _own_results(plain.base, packed)
        for hidden in _packed_passes(plain, packed):
            _compare(plain.base, "the hidden states of packed sequences", hidden, own_hidden)
        _compare_shared(plain, packed, own_hidden)
        _compare(plain.base, "the scores of its head", plain.sequence_scores(packed), own_scores[:, 0])


@contextmanager
def _prepared(base: PreTrainedModel) -> Generator[None]:
    """Checks the weights; inside, the model can run.

    One that was not read has its first layers only, at least two, up to the last of a new kind. Each is read when it
    runs.
    """
    if not unread_in([base]):
        check_weights(base)
        yield
        return
    stack = decoder_layers(base)
    owner = next(module for module in base.modules() if any(child is stack for child in module.children()))
    name = next(name for name, child in owner.named_children() if child is stack)
    text, kinds = base.config.get_text_config(), [_kind(layer) for layer in stack]
    first = list(stack)[: max(2, 1 + max(kinds.index(kind) for kind in kinds))]
    kept = {key: value for key in ("num_hidden_layers", "layer_types") if (value := getattr(text, key, None))}
    setattr(owner, name, nn.ModuleList(first))
    try:
        for key, value in kept.items():
            setattr(text, key, value[: len(first)] if key == "layer_types" else len(first))
        check_weights(base)
        with reading_when_run(base, first):
            yield
    finally:
        setattr(owner, name, stack)
        for key, value in kept.items():
            setattr(text, key, value)


def _kind(layer: nn.Module) -> object:
    """Equal for layers that differ only in their weights: classes, shapes, and plain options without the index."""
    options = [
        (name, type(module), key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | None) and not key.endswith("idx")
    ]
    return options, [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]


class _RecordingLayout(PackedLayout):
    """A layout that also records the attention options of each layer."""

    def __init__(self, packed: Packed, kernel: type[PackedKernel] | None = None) -> None:
        super().__init__(packed.lengths, kernel, prefixes=packed.prefixes)
        self.options: list[AttentionOptions] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.options.append(options)
        return super().attend(query, key, value, options)


def _sequences(base: PreTrainedModel) -> list[list[int]]:
    """Token ids spread over the vocabulary, longer than a short attention window, ending in no padding token.

    They begin with the same tokens; the others differ.
    """
    text = base.config.get_text_config()
    window = text.to_dict().get("sliding_window") or 0
    extra = window if window <= WIDEST_TESTED_WINDOW else 0
    vocabulary = embedding_rows(base)
    limit = position_limit(base.config)
    lengths = [n + extra if limit is None else min(n + extra, limit) for n in PROBE_LENGTHS]
    shared = min(NUM_SHARED + extra, min(lengths) - 1)
    sequences = [
        [(7 + 31 * i * i + 11 * s * (i >= shared)) % vocabulary for i in range(n)] for s, n in enumerate(lengths)
    ]
    for sequence in sequences:
        if sequence[-1] == getattr(text, "pad_token_id", None):  # not every configuration has one
            sequence[-1] = (sequence[-1] + 1) % vocabulary
    return sequences


def _own_results(base: PreTrainedModel, packed: Packed) -> tuple[Tensor, Tensor]:
    """Hidden states [T, D] and outputs of the whole model, one sequence at a time, with its own attention."""
    base.set_attn_implementation("eager")
    try:
        rows = [tokens[None] for tokens in packed.token_ids.split(packed.lengths)]
        hidden = [base.base_model(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows]
        outputs = [base(input_ids=row, use_cache=False).logits for row in rows]
    finally:
        base.set_attn_implementation(ATTENTION)
    return torch.cat(hidden), torch.cat([output.flatten(0, -2) for output in outputs])


def check_weights(base: PreTrainedModel) -> None:
    """Raises ModelError, naming the tensor, for a weight that is not finite or was never loaded.

    Otherwise the NaN in its outputs would be blamed on the architecture.
    """
    for name, tensor in base.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            raise ModelError(
                f"the tensor {name} of the {base.config.model_type} model is on the meta device and holds no numbers: "
                "load the weights first"
            )
        if bad := num_not_finite(numbers_of(tensor)):
            raise ModelError(
                f"the tensor {name} of the {base.config.model_type} model holds {bad} of {tensor.numel()} values "
                f"that are not finite (NaN or infinite): {DESTROYED}"
            )


def _packed_passes(model: LanguageModel | ScalarModel, packed: Packed) -> Iterator[Tensor]:
    """Hidden states [T, D] on the plain path, and then on the fast path of this device."""
    token_ids, position_ids = packed.token_ids[None], packed.position_ids[None]
    layout = _RecordingLayout(packed)
    hidden = model.backbone.run(token_ids, position_ids, layout=layout)[0]
    _check_calls(model, layout)
    yield hidden
    layout = _RecordingLayout(packed, model.backbone.path.attention)
    hidden = model.backbone.packed(packed, layout=layout)
    _check_calls(model, layout)
    yield hidden


def _compare_shared(model: LanguageModel | ScalarModel, packed: Packed, own_hidden: Tensor) -> None:
    """Compare the passes of a row in which the sequences share a prefix."""
    sequences = [tokens.tolist() for tokens in packed.token_ids.split(packed.lengths)]
    pairs = zip(*(sequence[:-1] for sequence in sequences), strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if count == 0:
        return
    row = pack(sequences, shareable=[count] * len(sequences), device=packed.token_ids.device)
    # The row holds the shared tokens once; they are compared with those of the first sequence.
    first, second = packed.lengths
    expected = torch.cat([own_hidden[:first], own_hidden[first + count : first + second]])
    for hidden in _packed_passes(model, row):
        _compare(model.base, "the hidden states of sequences that share a prefix", hidden, expected)


def _check_calls(model: LanguageModel | ScalarModel, layout: _RecordingLayout) -> None:
    text = model.base.config.get_text_config()
    if layout.num_calls != text.num_hidden_layers:
        raise ModelError(
            f"{layout.num_calls} of its {text.num_hidden_layers} layers let attention go through transformers' "
            "attention interface"
        )
    expected = _expected_windows(model.base)
    asked = [options.sliding_window for options in layout.options]
    if asked != expected:
        raise ModelError(f"its layers ask for attention windows {asked} where its configuration says {expected}")


def _expected_windows(base: PreTrainedModel) -> list[int | None]:
    """The window of each layer by the configuration; None = full attention."""
    text = base.config.get_text_config()
    options = text.to_dict()
    window = options.get("sliding_window")
    kinds = options.get("layer_types")
    if kinds is None:
        return [window] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _decoded_positions(packed: Packed) -> list[int]:
    """Flat indices of the last `NUM_DECODED` tokens of each sequence, ordered by step, then by sequence."""
    ends = packed.cu_seqlens.tolist()[1:]
    return [end - NUM_DECODED + step for step in range(NUM_DECODED) for end in ends]


def _decoded(model: LanguageModel, packed: Packed, decoder: Decoder) -> Tensor:
    """Hidden states [steps * S, D] of the last few tokens, from passes over cached keys and values."""
    sequences = [tokens.tolist() for tokens in packed.token_ids.split(packed.lengths)]
    prompts = pack([sequence[:-NUM_DECODED] for sequence in sequences], device=model.device)
    captured = PromptCache(prompts.lengths)
    model.prefill(prompts, captured)
    longest = max(packed.lengths)
    cache = RowCache(num_rows=len(sequences), initial_tokens=longest, max_tokens=longest)
    for index in range(len(sequences)):
        cache.place(captured, index, [index])
    # The first two are read at once, as the answer of an environment is.
    read = [token for sequence in sequences for token in sequence[-NUM_DECODED:][:NUM_READ]]
    layout = cache.extend(range(len(sequences)), [NUM_READ] * len(sequences))
    hidden = decoder(torch.tensor(read, device=model.device), layout.positions, cache, layout)
    steps = [*hidden.unflatten(0, (-1, NUM_READ)).unbind(1)]
    for step in range(NUM_READ - NUM_DECODED, 0):
        tokens = torch.tensor([sequence[step] for sequence in sequences], device=model.device)
        layout = cache.advance(len(sequences))
        steps.append(decoder(tokens, layout.positions, cache, layout))
    return torch.cat(steps)


def _compare(base: PreTrainedModel, what: str, ours: Tensor, own: Tensor) -> None:
    difference = (ours - own).abs().max().item()
    share = TOLERANCE_OF_8_BITS if quantisation_of(base) is Quantisation.INT8 else TOLERANCE
    allowed = share * max(1.0, own.abs().max().item())
    if not difference <= allowed:
        raise ModelError(f"{what} differ by {difference:.2g} from {type(base).__name__}'s own (allowed: {allowed:.2g})")


@contextmanager
def _refusal(plain: LanguageModel | ScalarModel) -> Generator[None]:
    """Turns any error of a model into a ModelError which says that it cannot be run packed."""
    try:
        with plain.evaluating(), quiet_transformers(), without_tf32():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {first_part(error)}"
        raise ModelError(
            f"the architecture {plain.base.config.model_type} cannot be run packed, so it is refused: {reason}"
        ) from error
