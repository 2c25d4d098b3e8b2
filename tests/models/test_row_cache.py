"""A row of the cache is a sequence of its own, whatever the rows beside it hold."""

import math

import pytest
import torch
from torch import Tensor, nn

from proximo.models.attention.cache import PromptCache, RowCache, cache_argument
from proximo.models.attention.cache_layouts import RowLayout
from proximo.models.attention.packed import AttentionOptions

HEADS, KV_HEADS, WIDTH = 6, 2, 4


def made(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def attention_by_definition(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """One token's attention, head by head: query [H, K], keys and values [H_kv, M, K] -> [H, K]."""
    output = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = keys[group] @ query[head] * (options.scaling or WIDTH**-0.5)
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.sliding_window is not None:
            scores[: max(0, len(scores) - options.sliding_window)] = -math.inf
        weights = scores.exp()
        sink = 0.0 if options.sinks is None else options.sinks[head].exp()
        output.append(weights @ values[group] / (weights.sum() + sink))
    return torch.stack(output)


SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
KINDS = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scaling=0.9),
    "window": AttentionOptions(sliding_window=3),
    "softcap": AttentionOptions(softcap=0.8, scaling=1.3),
    "softcap in a window": AttentionOptions(softcap=0.8, sliding_window=2),
    "sinks": AttentionOptions(sinks=SINKS),
    "sinks in a window": AttentionOptions(sinks=SINKS, sliding_window=4),
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_rows_of_different_lengths_attend_each_over_its_own_past(options: AttentionOptions) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 6]
    prompts = PromptCache(lengths)
    keys, values = (made(generator, 1, KV_HEADS, 10, WIDTH) for _ in range(2))
    assert prompts.update(keys, values, 0) == (keys, values)
    cache = RowCache(num_rows=3, initial_tokens=7, max_tokens=12)
    pasts = [(k[0], v[0]) for k, v in zip(keys.split(lengths, dim=2), values.split(lengths, dim=2), strict=True)]
    for row in range(3):
        cache.place(prompts, row, [row])
    for _ in range(5):
        layout = cache.advance(3)
        assert layout.positions.tolist() == [past[0].shape[1] for past in pasts]
        query = made(generator, 3, HEADS, 1, WIDTH)
        new = [made(generator, 3, KV_HEADS, 1, WIDTH) for _ in range(2)]
        output = layout.attend(query, *cache.update(*new, 0), options)
        assert output.shape == (3, 1, HEADS, WIDTH)
        for row, past in enumerate(pasts):
            pasts[row] = tuple(torch.cat([old, n[row]], dim=1) for old, n in zip(past, new, strict=True))
            expected = attention_by_definition(query[row, :, 0], *pasts[row], options)
            torch.testing.assert_close(output[row, 0], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_several_new_tokens_of_a_row_attend_to_its_past_and_to_those_before_them(options: AttentionOptions) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = PromptCache([3, 6])
    keys, values = (made(generator, 1, KV_HEADS, 9, WIDTH) for _ in range(2))
    prompts.update(keys, values, 0)
    cache = RowCache(num_rows=3, initial_tokens=7, max_tokens=12)
    for index, row in enumerate((2, 0)):
        cache.place(prompts, index, [row])
    layout = cache.extend([0, 2], [3, 2])
    assert layout.positions.tolist() == [6, 7, 8, 3, 4]
    assert cache.lengths == [9, 0, 5]
    query = made(generator, 1, HEADS, 5, WIDTH)
    new = [made(generator, 1, KV_HEADS, 5, WIDTH) for _ in range(2)]
    output = layout.attend(query, *cache.update(*new, 0), options)
    assert output.shape == (1, 5, HEADS, WIDTH)
    for past, own in ((slice(3, 9), slice(0, 3)), (slice(0, 3), slice(3, 5))):
        whole = [torch.cat([old[0, :, past], n[0, :, own]], dim=1) for old, n in zip((keys, values), new, strict=True)]
        count = own.stop - own.start
        for i in range(count):
            seen = [each[:, : whole[0].shape[1] - count + i + 1] for each in whole]
            expected = attention_by_definition(query[0, :, own.start + i], *seen, options)
            torch.testing.assert_close(output[0, own.start + i], expected, atol=1e-12, rtol=0)


def test_a_row_is_copied_cut_and_joined_by_more_rows() -> None:
    cache = placed(2, [0, 1], prompt_tokens=4)
    cache.cut(1, 0)
    cache.copy(0, 1, 3)
    cache.cut(0, 2)
    cache.cut(0, 3)
    cache.add_rows(1)
    cache.copy(1, 2, 1)
    assert cache.lengths == [2, 3, 1]
    keys, _ = write(cache, 3, 9.0)
    assert keys[:, 0, :, 0].tolist() == [[2, 2, 9, 0], [2, 2, 2, 9], [2, 9, 0, 0]]


def test_rows_that_are_not_the_first_are_read_in_their_order() -> None:
    cache = placed(3, [0, 1, 2])
    write(cache, 3, 7.0)
    next(cache.passes([2, 0], 1))
    new = torch.tensor([8.0, 9.0]).view(2, 1, 1, 1)
    keys, _ = cache.update(new.expand(-1, -1, -1, 2), new.expand(-1, -1, -1, 3), 0)
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 7, 8], [1, 1, 7, 9]]
    assert cache.lengths == [4, 3, 4]


def placed(num_rows: int, rows: list[int], *, prompt_tokens: int = 2, max_tokens: int = 20) -> RowCache:
    prompts = PromptCache([prompt_tokens])
    for layer in range(2):
        prompts.update(
            torch.full((1, 1, prompt_tokens, 2), 1.0 + layer), torch.full((1, 1, prompt_tokens, 3), 5.0), layer
        )
    cache = RowCache(num_rows=num_rows, initial_tokens=4, max_tokens=max_tokens)
    cache.place(prompts, 0, rows)
    return cache


def write(cache: RowCache, num_rows: int, number: float) -> tuple[Tensor, Tensor]:
    """One pass over the first rows, whose new keys are all `number`; what layer 1 then reads."""
    cache.advance(num_rows)
    new = torch.full((num_rows, 1, 1, 2), number), torch.full((num_rows, 1, 1, 3), number)
    cache.update(*new, 0)
    return cache.update(*new, 1)


def test_a_moved_row_goes_on_where_it_was() -> None:
    cache = placed(3, [0, 1, 2])
    write(cache, 3, 7.0)
    write(cache, 2, 8.0)
    cache.move(1, 0)
    assert cache.lengths == [4, 4, 3]
    cache.move(2, 1)
    keys, _ = write(cache, 2, 9.0)
    assert keys[0, 0, :, 0].tolist() == [2, 2, 7, 8, 9]
    assert keys[1, 0, :, 0].tolist() == [2, 2, 7, 9, 0]


def test_growing_keeps_every_row_and_ends_at_the_promised_size() -> None:
    cache = placed(2, [0, 1], max_tokens=7)
    for number in range(5):
        keys, values = write(cache, 2, 10.0 + number)
    assert keys[1, 0, :, 0].tolist() == [2, 2, 10, 11, 12, 13, 14]
    assert values.shape == (2, 1, 7, 3)
    with pytest.raises(AssertionError, match="at most 7"):
        write(cache, 2, 0.0)


def test_a_row_given_anew_forgets_what_it_held() -> None:
    cache = placed(1, [0], prompt_tokens=3)
    write(cache, 1, 7.0)
    shorter = PromptCache([1])
    for layer in range(2):
        shorter.update(torch.full((1, 1, 1, 2), 4.0), torch.full((1, 1, 1, 3), 4.0), layer)
    cache.place(shorter, 0, [0])
    keys, _ = write(cache, 1, 9.0)
    assert keys[0, 0, :, 0].tolist() == [4, 9]
    assert cache._storage[1][0][0, 0, 2:].abs().sum() == 0


def test_writing_copies_no_storage() -> None:
    cache = placed(4, [0, 1, 2, 3])
    keys, _ = write(cache, 3, 7.0)
    assert keys.data_ptr() == cache._storage[1][0].data_ptr()
    assert keys.shape == (3, 1, 3, 2)
    assert cache.get_seq_length() == 2


def test_masks_are_made_once_for_all_layers() -> None:
    layout = RowLayout(torch.tensor([2, 0]), torch.arange(2), num_tokens=3, are_first=True)
    first = layout._bias_of(None, torch.float32)
    assert layout._bias_of(None, torch.float32) is first
    assert first[:, 0, 0].isinf().tolist() == [[False, False, False], [False, True, True]]
    windowed = layout._bias_of(2, torch.float32)
    assert windowed[:, 0, 0].isinf().tolist() == [[True, False, False], [False, True, True]]


def test_a_model_is_given_its_cache_under_the_name_that_it_knows() -> None:
    class Older(nn.Module):
        def forward(self, input_ids, past_key_values=None, **kwargs): ...

    class Newer(nn.Module):
        def forward(self, input_ids, cache=None, **kwargs): ...

    assert [cache_argument(kind) for kind in (Older, Newer)] == ["past_key_values", "cache"]
