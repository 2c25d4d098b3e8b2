"""Draws follow the softmax they should, from random numbers that are a function of position."""

import math

import pytest
import torch
from torch import Tensor

from proximo.errors import UserError
from proximo.rollout.sampling import RandomKey, SamplingOptions, exponential_noise, restrict, sample

NO_IDS = torch.empty(0, dtype=torch.long)
KEY = RandomKey(seed=3, purpose="test", step=0)


def streams_of(count: int, key: RandomKey = KEY) -> Tensor:
    return torch.tensor([key.stream(index, 0) for index in range(count)])


def draw(logits: Tensor, count: int, *, ending_ids: Tensor = NO_IDS, position: int = 0, **options) -> Tensor:
    """`count` independent draws from one row of logits."""
    return sample(
        logits.expand(count, -1),
        streams=streams_of(count),
        positions=torch.full((count,), position),
        options=SamplingOptions(max_new_tokens=9, **options),
        ending_ids=ending_ids,
    ).tokens


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Standard normal, roughly, where the counts follow the expectation."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    degrees = len(counts) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


FILTERS = ({}, {"greedy": True}, {"top_k": 2}, {"top_k": 9}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.999999})


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_of_minus_infinity_are_as_if_they_were_not_there(options: dict) -> None:
    possible = torch.tensor([1, 4, 5, 9])
    logits = torch.full((11,), -math.inf)
    logits[possible] = torch.tensor([0.3, 1.0, -2.0, 0.9])
    streams, positions = streams_of(2000), torch.zeros(2000, dtype=torch.long)
    given = {"streams": streams, "positions": positions, "ending_ids": NO_IDS}
    made = SamplingOptions(max_new_tokens=1, **options)
    tokens, logprobs, among = sample(logits.expand(2000, -1), **given, options=made)
    assert set(tokens.tolist()) <= set(possible.tolist())
    kept = torch.ones(11, dtype=torch.bool) if among is None else among[0]
    exact = logits.masked_fill(~kept, -math.inf).log_softmax(0)[tokens]
    torch.testing.assert_close(logprobs, exact, rtol=1e-6, atol=1e-6)
    drawn_share = tokens.bincount(minlength=11)[possible] / 2000
    allowed = restrict(logits[possible][None], positions=positions[:1], options=made, ending_ids=NO_IDS)[0].softmax(0)
    if not options.get("greedy"):
        torch.testing.assert_close(drawn_share, allowed, rtol=0, atol=0.05)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_without_a_distribution_has_no_log_prob(options: dict, dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 11, dtype=dtype)
    rows[0], rows[1, 7], rows[2, 7] = -math.inf, math.inf, math.nan
    made = SamplingOptions(max_new_tokens=1, **options)
    given = {"streams": streams_of(3), "positions": torch.zeros(3, dtype=torch.long), "ending_ids": NO_IDS}
    assert not sample(rows, **given, options=made)[1].isfinite().any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    tokens = draw(logits, 40_000, temperature=temperature)
    expected = 40_000 * (logits / temperature).softmax(0)
    assert abs(chi_square(tokens.bincount(minlength=12), expected)) < 4


def test_draws_at_successive_positions_follow_the_softmax_and_do_not_depend_on_each_other() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    positions = torch.arange(40_000)
    streams = torch.full((40_000,), KEY.stream(0, 0))
    tokens = sample(
        logits.expand(40_000, -1),
        streams=streams,
        positions=positions,
        options=SamplingOptions(max_new_tokens=1),
        ending_ids=NO_IDS,
    ).tokens
    pairs = tokens[:-1] * 4 + tokens[1:]
    expected = 39_999 * (logits.softmax(0)[:, None] * logits.softmax(0)[None]).flatten()
    assert abs(chi_square(pairs.bincount(minlength=16), expected)) < 4


def test_logprobs_are_those_of_the_full_softmax_unless_top_k_or_top_p_leave_tokens_out() -> None:
    logits = 3 * torch.randn(50, 30, generator=torch.Generator().manual_seed(2))
    shapes = [{}, {"top_k": 2}, {"top_p": 0.3}, {"greedy": True}, {"min_new_tokens": 2}]
    for shape in shapes:
        tokens, logprobs, allowed = sample(
            logits,
            streams=streams_of(50),
            positions=torch.zeros(50, dtype=torch.long),
            options=SamplingOptions(max_new_tokens=4, temperature=0.7, **shape),
            ending_ids=torch.tensor([1, 2]),
        )
        assert (allowed is not None) == bool({"top_k", "top_p"} & set(shape))
        kept = logits if allowed is None else logits.masked_fill(~allowed, -math.inf)
        reference = (kept.double() / 0.7).log_softmax(1).gather(1, tokens[:, None])[:, 0]
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs.double(), reference, atol=2e-6, rtol=0)


def test_blocks_of_rows_change_nothing() -> None:
    logits = torch.randn(40, 20_000, generator=torch.Generator().manual_seed(0))
    streams, positions = streams_of(40), torch.arange(40)
    options = SamplingOptions(max_new_tokens=1)
    whole = sample(logits, streams=streams, positions=positions, options=options, ending_ids=NO_IDS)
    for row in (0, 13, 39):
        one = slice(row, row + 1)
        single = sample(logits[one], streams=streams[one], positions=positions[one], options=options, ending_ids=NO_IDS)
        assert single[0].item() == whole[0][row].item()
        torch.testing.assert_close(single[1], whole[1][one])


def test_top_k_draws_the_k_most_probable_and_all_that_tie_with_the_last() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    counts = draw(logits, 4000, top_k=2).bincount(minlength=5)
    assert counts[[0, 4]].tolist() == [0, 0]
    expected = 4000 * logits[[1, 2, 3]].softmax(0)
    assert abs(chi_square(counts[[1, 2, 3]], expected)) < 4
    assert draw(logits, 200, top_k=1).unique().tolist() == [1]
    assert draw(logits, 4000, top_k=99).unique().tolist() == [0, 1, 2, 3, 4]


def test_top_p_draws_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert draw(logits, 2000, top_p=0.4).unique().tolist() == [1]
    assert draw(logits, 2000, top_p=0.6).unique().tolist() == [1, 2]
    assert draw(logits, 2000, top_p=0.8).unique().tolist() == [1, 2, 3]
    assert draw(logits, 2000, top_p=1.0).unique().tolist() == [0, 1, 2, 3]


def test_top_p_keeps_what_ties_with_the_last() -> None:
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    assert draw(logits, 2000, top_p=0.5).unique().tolist() == [0, 1, 2, 3]


def test_top_p_counts_the_mass_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the first two, 0.4 is 4/7 of the mass: enough for 0.55, though not 0.55 of the whole.
    assert draw(logits, 2000, top_p=0.55).unique().tolist() == [0, 1]
    assert draw(logits, 2000, top_p=0.55, top_k=2).unique().tolist() == [0]


def test_ending_tokens_are_forbidden_before_the_minimum_and_free_after() -> None:
    logits = torch.tensor([0.0, 200.0, 0.0, 100.0])
    ending = torch.tensor([1, 3])
    early = draw(logits, 500, ending_ids=ending, position=2, min_new_tokens=3)
    assert early.unique().tolist() == [0, 2], "although their weight underflows beside that of the forbidden ones"
    assert draw(logits, 500, ending_ids=ending, position=3, min_new_tokens=3).unique().tolist() == [1]
    assert draw(logits, 5, ending_ids=ending, position=2, min_new_tokens=3, greedy=True).unique().tolist() == [0]


def test_rows_at_different_positions_keep_their_own_minimum() -> None:
    allowed = restrict(
        torch.zeros(2, 3),
        positions=torch.tensor([1, 2]),
        options=SamplingOptions(max_new_tokens=3, min_new_tokens=2),
        ending_ids=torch.tensor([0]),
    )
    assert allowed.isinf().tolist() == [[True, False, False], [False, False, False]]


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert draw(torch.tensor([0.0, 2.0, 2.0, 1.0]), 3, greedy=True).tolist() == [1, 1, 1]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1000,), -math.inf)
    logits[777] = -5.0
    assert draw(logits, 2000).unique().tolist() == [777]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_positive_and_alike_in_every_dtype(dtype: torch.dtype) -> None:
    noise = exponential_noise(streams_of(64), torch.arange(64), 50_000, dtype=dtype)
    assert noise.dtype == dtype
    assert noise.isfinite().all()
    assert noise.min() > 0
    wide = exponential_noise(streams_of(64), torch.arange(64), 50_000, dtype=torch.float64)
    contenders = wide < 3
    torch.testing.assert_close(noise.double()[contenders], wide[contenders], rtol=2e-6, atol=2e-6)


def test_the_extreme_bits_give_finite_noise() -> None:
    """All 31 bits set round up to 2^31 in float32; the noise must not become infinite."""
    from proximo.rollout import sampling as noise

    largest = torch.tensor([2**31 - 1], dtype=torch.int32).float().add_(0.5).mul_(-noise._SCALE).log1p_()
    assert largest.isfinite().all()
    assert largest.item() < -16


def test_noise_is_uniform_in_every_direction() -> None:
    uniform = -torch.expm1(-exponential_noise(streams_of(500), torch.zeros(500).long(), 2000, dtype=torch.float64))
    bins = (uniform * 50).long()
    assert abs(chi_square(bins.flatten().bincount(minlength=50), torch.full((50,), 20_000.0))) < 4
    for direction in (bins, bins.T):
        counts = torch.zeros(direction.shape[0], 50).scatter_add_(1, direction, torch.ones(direction.shape))
        each = ((counts - direction.shape[1] / 50) ** 2 / (direction.shape[1] / 50)).sum(1)
        assert abs(each.mean().item() - 49) < 4 * math.sqrt(98 / len(each))
        assert abs(each.var().item() - 98) < 25


@pytest.mark.parametrize("distance", [1, 2, 1024])
def test_noise_of_neighbours_is_independent(distance: int) -> None:
    """Neighbouring tokens, positions of a stream and streams: all pairs of 20 bins are equally likely."""
    count = 1100
    one_stream = torch.full((count,), KEY.stream(0, 0))
    for streams, positions in (
        (one_stream, torch.arange(count)),
        (torch.arange(count), torch.zeros(count, dtype=torch.long)),
    ):
        uniform = -torch.expm1(-exponential_noise(streams, positions, 1100, dtype=torch.float64))
        bins = (uniform * 20).long()
        for first, second in ((bins[distance:], bins[:-distance]), (bins[:, distance:], bins[:, :-distance])):
            pairs = (first * 20 + second).flatten()
            expected = torch.full((400,), pairs.numel() / 400)
            assert abs(chi_square(pairs.bincount(minlength=400), expected)) < 4.5


def test_streams_differ_by_every_part_of_their_place() -> None:
    places = [
        RandomKey(seed=0, purpose="a", step=0).stream(0, 0),
        RandomKey(seed=1, purpose="a", step=0).stream(0, 0),
        RandomKey(seed=0, purpose="b", step=0).stream(0, 0),
        RandomKey(seed=0, purpose="a", step=1).stream(0, 0),
        RandomKey(seed=0, purpose="a").stream(0, 0),
        RandomKey(seed=0, purpose="a", step=0).stream(1, 0),
        RandomKey(seed=0, purpose="a", step=0).stream(0, 1),
    ]
    assert len(set(places)) == len(places)
    assert places[0] == RandomKey(seed=0, purpose="a", step=0).stream(0, 0)


def noise_by_definition(stream: int, position: int, token: int) -> float:
    """The same bits with Python's unbounded integers."""
    mask64, mask32 = 2**64 - 1, 2**32 - 1
    key = (stream + position * 0x9E3779B97F4A7C15) & mask64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        key = (key ^ key >> shift) * factor & mask64
    key ^= key >> 31
    bits = (token * 0x9E3779B9 + key) & mask32
    bits = ((bits ^ bits >> 16) * 0x7FEB352D + (key >> 32)) & mask32
    bits = (bits ^ bits >> 15) * 0x846CA68B & mask32
    bits = (bits ^ bits >> 16) & 0x7FFFFFFF
    return -math.log1p(-(bits + 0.5) * 2**-31 * (1 - 2**-24))


def test_the_draws_of_a_place_never_change() -> None:
    """A run must be able to go on under a later release, so streams and noise are part of the format."""
    stream = RandomKey(seed=7, purpose="rollout", step=3).stream(2, 1)
    assert stream == 2175367933242305454
    positions = torch.tensor([0, 5, 4000])
    noise = exponential_noise(torch.full((3,), stream), positions, 300, dtype=torch.float64)
    expected = [[noise_by_definition(stream, position, token) for token in range(300)] for position in (0, 5, 4000)]
    torch.testing.assert_close(noise, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_changed_draw_needs_a_small_margin() -> None:
    """Noise of 1e-6 on the logits moves no draw whose winner leads the race by more than 1e-5."""
    logits = 3 * torch.randn(2000, 2048, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noisy = logits + 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    streams, positions = streams_of(2000), torch.arange(2000)
    options = SamplingOptions(max_new_tokens=1)
    one, two = (
        sample(each, streams=streams, positions=positions, options=options, ending_ids=NO_IDS)[0]
        for each in (logits, noisy)
    )
    race = logits - exponential_noise(streams, positions, 2048, dtype=torch.float64).log()
    margins = race.topk(2).values.diff().neg()[:, 0]
    assert (margins[one != two] < 1e-5).all()
    assert (one != two).sum() <= 2


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 5}, "min_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop_strings": ("",)}, "empty"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        SamplingOptions(**({"max_new_tokens": 4} | options))


def test_only_the_temperature_leaves_the_softmax_whole() -> None:
    assert SamplingOptions(max_new_tokens=4, temperature=0.5, top_p=1.0).draws_from_full_softmax
    for shape in ({"top_k": 5}, {"top_p": 0.9}, {"greedy": True}, {"min_new_tokens": 1}):
        assert not SamplingOptions(max_new_tokens=4, **shape).draws_from_full_softmax
