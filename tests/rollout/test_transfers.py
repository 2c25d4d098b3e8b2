"""Several tokens between two looks of the host, as on an accelerator: the same responses as with one."""

from typing import Any

import pytest
import torch

from architectures import build_architecture, random_sequences
from builders import tiny_language_model, tiny_tokenizer
from fake_cuda import CUDA, fake_cuda
from proximo.errors import TrainingError
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.records import Finish, Prompt, Response
from proximo.rollout import decoding
from proximo.rollout.decoding import TOKENS_PER_TRANSFER
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import Drawn, RandomKey, SamplingOptions
from proximo_cpu.library import library

ENDS = (2, 11, 20, 29, 38)
TEXTS = ("hello", "a", "what is it? tell me now.", "go on", "abc, abc, abc", "z!")
RULES: dict[str, dict[str, Any]] = {
    "end of sequence": {},
    "stop tokens": {"stop_token_ids": tuple(range(40, 64, 4))},
    "stop strings": {"stop_strings": ("e", "12", " t")},
    "a limit for each prompt": {"random_limit_min": 2},
    "a minimum": {"min_new_tokens": 6},
    "one token": {"max_new_tokens": 1},
    "shaped": {"temperature": 0.7, "top_k": 9, "top_p": 0.9},
    "greedy": {"greedy": True},
    "all": {"random_limit_min": 4, "min_new_tokens": 3, "stop_strings": ("o", "7"), "stop_token_ids": (40, 41)},
}


def model_of(dtype: torch.dtype) -> LanguageModel:
    """Weights large enough that the next token depends on the text."""
    return LanguageModel(tiny_language_model(seed=5, initializer_range=0.6).to(dtype))


def generate(model: LanguageModel, *, on_finished: Any = None, max_num_seqs: int = 4, **options: Any) -> list[Response]:
    tokenizer = tiny_tokenizer()
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in TEXTS)
    engine = LocalEngine(model, tokenizer, eos_token_ids=ENDS, max_num_seqs=max_num_seqs, prefill_tokens=1)
    return engine.generate(
        [Prompt(id=str(index), token_ids=tuple(tokens)) for index, tokens in enumerate(encoded)],
        num_samples=3,
        options=SamplingOptions(**({"max_new_tokens": 21} | options)),
        key=RandomKey(seed=3, purpose="rollout", step=1),
        on_finished=on_finished,
    )


def facts(responses: list[Response]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.finish, each.text, each.sample_index, each.prompt.id) for each in responses]


@pytest.mark.parametrize("rule", RULES)
def test_responses_are_those_of_one_token_at_a_time(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 responses in 4 rows, which are given anew and move."""
    model = model_of(torch.float64)
    expected = generate(model, **RULES[rule])
    for count in (2, 5, 64):
        monkeypatch.setattr(decoding, "passes_at_once", lambda _, count=count: count)
        told: list[Response] = []
        found = generate(model, **RULES[rule], on_finished=told.append)
        assert facts(found) == facts(expected), count
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-6)
        assert sorted(map(id, told)) == sorted(map(id, found)), "each is told of once"


def test_the_rules_end_responses_as_their_names_say() -> None:
    model = model_of(torch.float64)
    finishes = {rule: {each.finish for each in generate(model, **options)} for rule, options in RULES.items()}
    assert finishes["end of sequence"] == {Finish.EOS, Finish.LENGTH}
    assert Finish.STOP in finishes["stop tokens"] & finishes["stop strings"] & finishes["all"]
    assert len({len(each.token_ids) for each in generate(model)}) > 5


@pytest.mark.skipif(library() is None, reason="torch's products of other numbers of rows have other last bits")
@pytest.mark.parametrize("rule", ["end of sequence", "stop strings", "a limit for each prompt"])
def test_with_kernels_they_are_the_same_bits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(torch.float32)
    expected = generate(model, **RULES[rule])
    for count in (3, 8):
        monkeypatch.setattr(decoding, "passes_at_once", lambda _, count=count: count)
        found = generate(model, **RULES[rule])
        assert facts(found) == facts(expected)
        assert all(a.logprobs.equal(b.logprobs) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_row_goes_beyond_the_positions_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is over goes on while its neighbours do: at its last place, for GPT-2 knows no other."""
    model = LanguageModel(build_architecture(name))
    limit = model.position_limit
    assert limit is not None
    prompts = [Prompt(id=str(n), token_ids=tuple(tokens)) for n, tokens in enumerate(random_sequences([limit - 9, 3]))]
    options = SamplingOptions(max_new_tokens=9, random_limit_min=2)
    monkeypatch.setattr(decoding, "passes_at_once", lambda _: 64)
    engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=[])
    found = engine.generate(prompts, num_samples=2, options=options, key=RandomKey(seed=1, purpose="test"))
    assert [len(each.token_ids) for each in found] == [
        RandomKey(seed=1, purpose="test").limit(index, options) for index in (0, 0, 1, 1)
    ]


def test_only_a_response_is_looked_at_and_not_what_its_row_wrote_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third draw ends it. Numbers that are none stop the run up to there, and are cut off behind."""
    plain, draws = decoding.sample, []

    def drawn(*given: Any, **options: Any) -> Any:
        tokens, logprobs, _ = plain(*given, **options)
        draws.append(1)
        broken = torch.nan if len(draws) >= first_broken else 0.0
        return Drawn(torch.full_like(tokens, 2 if len(draws) >= 3 else 5), logprobs + broken)

    monkeypatch.setattr(decoding, "passes_at_once", lambda _: 8)
    monkeypatch.setattr(decoding, "sample", drawn)

    def generated() -> list[Response]:
        draws.clear()
        engine = LocalEngine(model_of(torch.float64), tiny_tokenizer(), eos_token_ids=[2])
        options, key = SamplingOptions(max_new_tokens=20), RandomKey(seed=1, purpose="test")
        return engine.generate([Prompt(id="0", token_ids=(7,))], num_samples=1, options=options, key=key)

    first_broken = 4
    assert [each.token_ids for each in generated()] == [(5, 5, 2)]
    assert len(draws) == 9
    first_broken = 3
    with pytest.raises(TrainingError, match="not finite for token 2"):
        generated()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_on_cuda_the_host_waits_once_for_several_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else asked a tensor for its numbers would raise: these have none."""
    model = LanguageModel(build_architecture(name), precision=Precision.BF16)
    fetched: list[int] = []

    def fetch(drawn: Any) -> Any:
        assert {each.device for pair in drawn for each in pair if each is not None} == {CUDA}
        fetched.append(len(drawn))
        rows = len(drawn[0][0])
        return [[5] * len(drawn)] * rows, [[-1.0] * len(drawn)] * rows, [[None] * len(drawn)] * rows

    monkeypatch.setattr(decoding, "_fetch", fetch)
    prompts = [Prompt(id=str(n), token_ids=tuple(tokens)) for n, tokens in enumerate(random_sequences([4, 6]))]
    new_tokens = 2 * TOKENS_PER_TRANSFER + 4
    with fake_cuda(model.model):
        engine = LocalEngine(model, tiny_tokenizer(), eos_token_ids=[], max_num_seqs=4)
        options = SamplingOptions(max_new_tokens=new_tokens)
        found = engine.generate(prompts, num_samples=2, options=options, key=RandomKey(seed=1, purpose="test"))
    assert [len(each.token_ids) for each in found] == [new_tokens] * 4
    assert fetched == [1, TOKENS_PER_TRANSFER, TOKENS_PER_TRANSFER, 3]
