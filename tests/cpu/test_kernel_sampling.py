"""The draw in C against the operators that it stands for."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from proximo.rollout import sampling
from proximo.rollout.sampling import RandomKey, SamplingOptions, exponential_noise, sample
from proximo_cpu.library import library
from proximo_cpu.row_kernels import RowKernels, row_kernels_for

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")
NONE_ENDING = torch.zeros(0, dtype=torch.long)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def places(num_rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Streams and positions of as many draws."""
    streams = torch.tensor([RandomKey(seed=seed, purpose="test").stream(i, 0) for i in range(num_rows)])
    return streams, torch.arange(num_rows) % 70


def drawn_with(logits: Tensor, temperature: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    streams, positions = places(len(logits), seed=seed)
    options = SamplingOptions(max_new_tokens=8, temperature=temperature)
    return sample(logits, streams=streams, positions=positions, options=options, ending_ids=NONE_ENDING)


def by_operators(monkeypatch: pytest.MonkeyPatch, *given: object) -> tuple[Tensor, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "row_operations", lambda _: None)
        return drawn_with(*given)


def noise_for(num_rows: int, vocabulary: int) -> Tensor:
    """What `drawn_with` draws with, in float64."""
    return exponential_noise(*places(num_rows, seed=0), vocabulary, dtype=torch.float64)


def assert_wins_in_float64(tokens: Tensor, logits: Tensor, temperature: float) -> None:
    """Each leads its race, or lags by what a few roundings of a logit may cost."""
    race = logits.double() / temperature - noise_for(*logits.shape).log()
    lag = race.amax(dim=1) - race.gather(1, tokens[:, None])[:, 0]
    assert lag.max() <= 8 * 2.0**-24 * (1 + (logits / temperature).abs().amax())


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("vocabulary", [1, 5, 8, 61, 2048, 5003])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_the_winners_of_the_race_and_their_log_probs(
    vocabulary: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = normal(300, vocabulary) * 3
    exact = (logits.double() / temperature).log_softmax(dim=1)
    kernel, operators = drawn_with(logits, temperature), by_operators(monkeypatch, logits, temperature)
    for (tokens, logprobs, *_), bound in ((kernel, 1e-6), (operators, 2e-6)):
        assert_wins_in_float64(tokens, logits, temperature)
        wanted = exact.gather(1, tokens[:, None])[:, 0]
        assert (logprobs - wanted).abs().max() <= bound * wanted.abs().max().clamp(min=4)


def test_the_kernel_is_what_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = RowKernels.sample
    monkeypatch.setattr(RowKernels, "sample", lambda *given, **more: (calls.append(1), plain(*given, **more))[1])
    drawn_with(normal(2, 9))
    assert calls == [1]


def test_the_bits_depend_on_neither_neighbours_nor_threads() -> None:
    logits = normal(9, 515)
    tokens, logprobs, _ = drawn_with(logits)
    alone = drawn_with(logits[:1])
    torch.set_num_threads(3)
    assert all(map(torch.equal, drawn_with(logits), (tokens, logprobs)))
    assert all(map(torch.equal, alone, (tokens[:1], logprobs[:1])))


def test_small_noise_keeps_its_digits() -> None:
    """A token whose draw is small races one whose draw is near 1, 2e-5 ahead or behind: a draw near 1e-4 that had
    lost its digits would be wrong by more."""
    rows = torch.arange(200)
    noise = noise_for(200, 5003)
    small, other = noise.argmin(dim=1), (noise - 1).abs().argmin(dim=1)
    lead = torch.where(rows % 2 == 0, 2e-5, -2e-5).double()
    logits = torch.full((200, 5003), -100.0)
    logits[rows, small] = 0.0
    logits[rows, other] = (noise[rows, other].log() - noise[rows, small].log() - lead).float()
    assert torch.equal(drawn_with(logits)[0], torch.where(lead > 0, small, other))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 37), -torch.inf)
    logits[:, 11] = -50.0
    logits[:, 30] = -300.0
    tokens, logprobs, _ = drawn_with(logits)
    assert set(tokens.tolist()) == {11}
    assert logprobs.abs().max() <= 1e-6
    assert drawn_with(torch.tensor([[0.0, 100.0, -1e30]]))[0].tolist() == [1]


def test_numbers_of_another_type_or_count_are_refused_and_strides_are_not() -> None:
    logits = normal(4, 9)
    kernels = row_kernels_for(logits)
    assert kernels is not None
    for wrong in (torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(AssertionError, match="one number in int64 for each row"):
            kernels.sample(logits, streams=wrong, positions=wrong, temperature=1.0)
    expanded = torch.zeros(1, dtype=torch.int64).expand(4)
    strided = kernels.sample(normal(9, 4).t(), streams=expanded, positions=expanded, temperature=1.0)
    plain = kernels.sample(
        normal(9, 4).t().contiguous(), streams=expanded.clone(), positions=expanded.clone(), temperature=1.0
    )
    assert all(map(torch.equal, strided, plain))


@pytest.mark.parametrize("strange", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 8, 36])
def test_logits_that_are_not_finite_have_no_log_prob(strange: float, where: int) -> None:
    logits = normal(3, 37)
    logits[1, where] = strange
    finite = drawn_with(logits)[1].isfinite()
    assert finite.tolist() == [True, False, True]
    assert not drawn_with(torch.full((1, 5), -torch.inf))[1].isfinite().any()
