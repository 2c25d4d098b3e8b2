"""Decoding passes as graphs, with a stand-in for CUDA's: it does the work again, and watches what the work touches."""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from builders import tiny_language_model, tiny_tokenizer
from proximo.kernels import Kernels
from proximo.models.attention.cache import RowCache
from proximo.models.backbone import Backbone
from proximo.models.language import LanguageModel
from proximo.records import Prompt, Response
from proximo.rollout import decoding
from proximo.rollout.decoding_graphs import LEAST_PASSES
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"}
"""Operators for which the host would wait: none can be in a graph."""


class Watch(TorchDispatchMode):
    """Notes operators, with shapes and plain numbers, and the places of what they read or write and did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.names: set[str] = set()
        self.outside: set[int] = set()
        self.written: set[int] = set()
        self._made: set[int] = set()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        self.names.add(func._overloadpacket.__name__)
        self.calls.append((str(func), *map(form_of, given)))
        self.outside |= places_of(given) - self._made
        arguments = func._schema.arguments
        by_name = dict(zip([each.name for each in arguments], args, strict=False)) | (kwargs or {})
        writes = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        self.written |= places_of(tree_leaves([by_name.get(name) for name in writes])) - self._made
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and place_of(each) not in self.outside:
                self._made.add(place_of(each))
                self._kept.append(each)  # so that no other tensor gets its place
        return made


def form_of(given: Any) -> Any:
    """Of an argument, what a graph keeps: its number, or of a tensor all but its numbers."""
    if isinstance(given, Tensor):
        return given.dtype, tuple(given.shape), given.stride(), given.storage_offset()
    return given if isinstance(given, int | float) else str(given)


def places_of(given: Sequence[Any]) -> set[int]:
    return {place_of(each) for each in given if isinstance(each, Tensor)}


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class StandIn:
    """In place of CUDA's capture, which does not do the work. A replay must do what the first did, at the same places.

    It may write its inputs, its results and the cache.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.replays: list[int] = []
        self._changed = changed

    def __call__(self, work: Any) -> Callable[[], None]:
        seen: list[tuple[Any, ...]] = []
        its = work.__self__
        results = [its._tokens, its._logprobs, its._allowed]
        own = places_of([its._inputs, *results, *tree_leaves(list(its._cache._storage.values()))])
        self.replays.append(0)
        number = len(self.replays) - 1

        def again() -> None:
            with Watch() as watch:
                work()
            seen.append((watch.outside, watch.calls))
            assert seen[-1][0] == seen[0][0], "the pass reads what is elsewhere by now"
            assert seen[-1][1] == seen[0][1], "the pass has other shapes or numbers by now"
            assert watch.written <= own, "the pass writes what is not its own"
            assert not watch.names & WAITS
            self.replays[number] += 1
            self._changed()

        return again


def with_graphs(patch: pytest.MonkeyPatch, capture: Callable[..., Any]) -> None:
    """As on a device: several passes before the host looks, and graphs of them, of the modules."""

    class Counted(Kernels):
        def capture(self, device: torch.device) -> Callable[..., Any]:
            assert device.type == "cpu"
            return capture

    patch.setattr(decoding, "kernels_of", lambda _: Counted())
    patch.setattr(decoding, "passes_at_once", lambda _: 8)


@pytest.fixture(autouse=True)
def modules_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backbone, "decoder", lambda backbone: backbone.decode)


def engine_of(kind: str = "llama", *, num_rows: int = 4) -> LocalEngine:
    model = LanguageModel(tiny_language_model(kind, dtype=torch.float64))
    return LocalEngine(model, tiny_tokenizer(), eos_token_ids=[1], max_num_seqs=num_rows, owns_model=True)


PROMPTS = [Prompt(id=str(n), token_ids=tuple(range(5, 7 + 3 * n))) for n in range(5)]
KEY = RandomKey(seed=0, purpose="rollout")
Drawn = list[tuple[tuple[int, ...], list[float]]]


def responses(
    *, new: int = 90, kind: str = "llama", on_finished: Callable[..., None] | None = None, **given: Any
) -> Drawn:
    """Five prompts of different lengths, two samples each: rows end at different times and are given anew."""
    engine = given.pop("engine", None) or engine_of(kind)
    options = SamplingOptions(max_new_tokens=new, **given)
    drawn = engine.generate(PROMPTS, num_samples=2, options=options, key=KEY, on_finished=on_finished)
    return [(each.token_ids, each.logprobs.tolist()) for each in drawn]


@cache
def single_passes(kind: str = "llama") -> Drawn:
    """What the tests compare with, drawn before anything is put in place of a capture."""
    return responses(kind=kind)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_graphs_draw_what_single_passes_draw(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = single_passes(kind)
    assert len({len(tokens) for tokens, _ in expected}) > 3
    capture = StandIn()
    with_graphs(monkeypatch, capture)
    for (tokens, logprobs), (wanted, theirs) in zip(responses(kind=kind), expected, strict=True):
        assert tokens == wanted
        assert logprobs == pytest.approx(theirs, abs=1e-6)
    assert len(capture.replays) > 1  # rows became fewer, and the storage grew
    assert max(capture.replays) > 20


def test_graphs_keep_what_tokens_are_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SamplingOptions(max_new_tokens=60, top_p=0.8)

    def masks() -> list[list[list[int]] | None]:
        drawn = engine_of().generate(PROMPTS, num_samples=2, options=options, key=KEY)
        return [each.sampling_mask and each.sampling_mask.rows() for each in drawn]

    expected = masks()
    capture = StandIn()
    with_graphs(monkeypatch, capture)
    assert masks() == expected
    assert all(0 < len(row) < 64 for mask in expected for row in mask or [[]])
    assert max(capture.replays) > 20


def with_a_length_of_the_host(cache: RowCache, positions: Tensor, rows: Tensor) -> Any:
    cache._step = cache._row_layout(positions, rows, num_tokens=max(cache.lengths), are_first=False)
    return cache._step


ONE_PASS = RowCache.one_pass


def with_a_count(cache: RowCache, positions: Tensor, rows: Tensor) -> Any:
    cache.__dict__.setdefault("count", torch.zeros(1)).add_(1)
    return ONE_PASS(cache, positions, rows)


@pytest.mark.parametrize(
    ("fault", "seen"), [(with_a_length_of_the_host, "other shapes or numbers"), (with_a_count, "not its own")]
)
def test_the_stand_in_refuses_what_a_graph_would_not_repeat(fault: Any, seen: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(RowCache, "one_pass", fault)
    with_graphs(monkeypatch, StandIn())
    with pytest.raises(AssertionError, match=seen):
        responses()


def warned(caught: pytest.WarningsRecorder) -> list[str]:
    return [text for each in caught if "graphs" in (text := str(each.message))]


def test_what_cannot_be_captured_runs_pass_by_pass_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = single_passes()

    def fails(_: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with_graphs(monkeypatch, fails)
    with pytest.warns(UserWarning, match="no graphs: RuntimeError: operation not permitted") as caught:
        assert [tokens for tokens, _ in responses()] == [tokens for tokens, _ in expected]
    assert len(warned(caught)) == 1


@pytest.mark.parametrize("num_works", [0, 1])
def test_a_graph_that_draws_other_tokens_is_not_used(num_works: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes nothing, and one that does not move its inputs on: its second pass is the first again."""
    expected = single_passes()

    def broken(work: Callable[[], None]) -> Callable[[], None]:
        left = [work] * num_works
        return lambda: left.pop()() if left else None

    with_graphs(monkeypatch, broken)
    with pytest.warns(UserWarning, match="a graph of a pass draws other tokens than the pass") as caught:
        assert [tokens for tokens, _ in responses()] == [tokens for tokens, _ in expected]
    assert len(warned(caught)) == 1


def test_a_model_that_was_refused_is_not_tried_again_but_for_another_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, capture = [], StandIn()

    def fails(_: Callable[[], None]) -> Callable[[], None]:
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    with_graphs(monkeypatch, fails)
    engine = engine_of()
    with pytest.warns(UserWarning, match="no graphs"):
        responses(new=LEAST_PASSES + 8, engine=engine, top_p=0.8)
    responses(new=LEAST_PASSES + 8, engine=engine, top_p=0.8)
    assert len(tries) == 1
    with_graphs(monkeypatch, capture)
    responses(engine=engine)
    assert max(capture.replays) > 20


def test_other_weights_get_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded while responses are decoded: in bf16 the graphs read casts of the earlier ones."""
    capture, at_load = StandIn(), []

    def run() -> Drawn:
        engine = engine_of()

        def load(_: Response) -> None:
            if engine._version == 0:
                at_load.append(list(capture.replays))
                engine.load_weights(1, {name: 1.5 * each for name, each in engine._parameters().items()})

        return responses(new=60, engine=engine, on_finished=load)

    monkeypatch.setattr(decoding, "passes_at_once", lambda _: 8)  # weights take effect after a block
    expected = run()
    with_graphs(monkeypatch, capture)
    assert [tokens for tokens, _ in run()] == [tokens for tokens, _ in expected]
    earlier = at_load[-1]
    assert earlier
    assert capture.replays[: len(earlier)] == earlier, "a graph of earlier weights was replayed"
    assert len(capture.replays) > len(earlier)


def test_a_session_takes_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[tuple[int, ...]]:
        requests = [
            CallRequest(id=f"{n}", lane=n, token_ids=each.token_ids, stream=n, max_new_tokens=40, first_position=0)
            for n, each in enumerate(PROMPTS)
        ]
        found: dict[str, tuple[int, ...]] = {}
        with engine_of().session(SamplingOptions(max_new_tokens=40), max_tokens=100) as session:
            for request in requests:
                session.submit(request)
            while len(found) < len(requests):
                found |= {call.request.id: tuple(call.token_ids) for call in session.advance(1)}
        return [found[request.id] for request in requests]

    expected, capture = run(), StandIn()
    with_graphs(monkeypatch, capture)
    assert run() == expected
    assert max(capture.replays) > 8


def test_the_cache_is_let_go_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[weakref.ref[RowCache]] = []
    made = RowCache.__init__

    def noted(cache: RowCache, **given: Any) -> None:
        caches.append(weakref.ref(cache))
        made(cache, **given)

    monkeypatch.setattr(RowCache, "__init__", noted)
    capture = StandIn()
    with_graphs(monkeypatch, capture)
    gc.collect()
    gc.disable()
    try:
        responses(new=LEAST_PASSES + 8)
    finally:
        gc.enable()
    assert [cache() for cache in caches] == [None]
    assert capture.replays


def test_short_responses_take_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = StandIn()
    with_graphs(monkeypatch, capture)
    responses(new=LEAST_PASSES)
    assert capture.replays == []
    responses(new=LEAST_PASSES + 1)
    assert capture.replays != []
