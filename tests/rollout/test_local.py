"""The engine draws what a naive generator would draw, whatever shares the batch, and reports it rightly."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from builders import tiny_language_model, tiny_tokenizer
from proximo.errors import TrainingError, UserError
from proximo.models.attention.cache import RowCache
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions, add_adapter
from proximo.models.packing import pack_responses
from proximo.records import Finish, Prompt, Response
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions, exponential_noise, sample

KEY = RandomKey(seed=11, purpose="rollout", step=4)
EOS = 2
ENDS = (EOS, 11, 20, 29, 38)
"""Several end-of-sequence tokens, so that lengths are mixed."""
LIVELY = {"initializer_range": 0.6}
"""Weights large enough that the next token depends on the text."""


def prompts_of(*texts: str) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    return [
        Prompt(id=f"p{index}", token_ids=tuple(tokenizer.encode(text, add_special_tokens=False)), text=text)
        for index, text in enumerate(texts)
    ]


PROMPTS = prompts_of("hello", "a", "what is it? tell me now.", "go on", "abc, abc, abc", "z!")


def engine_of(model: PreTrainedModel | LanguageModel, **options) -> LocalEngine:
    language_model = model if isinstance(model, LanguageModel) else LanguageModel(model)
    return LocalEngine(language_model, tiny_tokenizer(), **({"eos_token_ids": ENDS} | options))


def generate(
    model: PreTrainedModel | LanguageModel,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    num_samples: int = 1,
    key: RandomKey = KEY,
    engine: dict | None = None,
    **options,
) -> list[Response]:
    chosen = SamplingOptions(**({"max_new_tokens": 12} | options))
    return engine_of(model, **(engine or {})).generate(prompts, num_samples=num_samples, options=chosen, key=key)


def tokens_of(responses: Sequence[Response]) -> list[tuple[int, ...]]:
    return [response.token_ids for response in responses]


def twin(dtype: torch.dtype = torch.float64, **overrides) -> PreTrainedModel:
    """The same lively weights each time, rounded to float32."""
    return tiny_language_model(seed=5, **(LIVELY | overrides)).to(dtype)


def naive_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """[V]: a whole forward pass for one more token."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0, -1]


def naive_responses(
    model: PreTrainedModel, prompts: Sequence[Prompt], *, num_samples: int, options: SamplingOptions, key: RandomKey
) -> list[tuple[int, ...]]:
    """One sample at a time, one whole forward pass for each token."""
    responses = []
    for index, prompt in enumerate(prompts):
        for sample_index in range(num_samples):
            stream = torch.tensor([key.stream(index, sample_index)])
            tokens: list[int] = []
            while len(tokens) < options.max_new_tokens and not set(tokens) & set(ENDS):
                logits = naive_logits(model, [*prompt.token_ids, *tokens])[None]
                position = torch.tensor([len(tokens)])
                drawn = sample(
                    logits, streams=stream, positions=position, options=options, ending_ids=torch.tensor(ENDS)
                )
                tokens.append(int(drawn.tokens))
            responses.append(tuple(tokens))
    return responses


@pytest.mark.parametrize(
    "shape",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_new_tokens": 6}, {"greedy": True}],
    ids=lambda shape: "-".join(shape) or "plain",
)
def test_the_engine_draws_what_naive_generation_draws(shape: dict) -> None:
    options = SamplingOptions(max_new_tokens=12, **shape)
    expected = naive_responses(twin(), PROMPTS, num_samples=3, options=options, key=KEY)
    drawn = generate(twin(), num_samples=3, engine={"max_num_seqs": 5}, **shape)
    assert tokens_of(drawn) == expected
    assert len({len(response) for response in expected}) >= (2 if "greedy" in shape else 3), "lengths must be mixed"


@pytest.mark.parametrize("engine", [{"max_num_seqs": r} for r in (1, 2, 3, 7)] + [{"prefill_tokens": 1}], ids=str)
def test_samples_do_not_depend_on_rows_or_on_how_prompts_are_computed(engine: dict) -> None:
    assert tokens_of(generate(twin(), num_samples=3, engine=engine)) == tokens_of(generate(twin(), num_samples=3))


def test_samples_do_not_depend_on_the_neighbours() -> None:
    """A response is tied to the place of its prompt and of its sample, not to who else is there."""
    whole = generate(twin(), num_samples=2)
    others = prompts_of("hello", "one", "two", "go on", "3")
    mixed = generate(twin(), others, num_samples=2, engine={"max_num_seqs": 3})
    for place in (0, 3):
        assert tokens_of(mixed[2 * place : 2 * place + 2]) == tokens_of(whole[2 * place : 2 * place + 2])
    swapped = generate(twin(), [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]], num_samples=2)
    assert tokens_of(swapped[4:]) == tokens_of(whole[4:])
    assert tokens_of(swapped[2:4]) != tokens_of(whole[0:2])


def race_margin(model: PreTrainedModel, prompt: Prompt, response: Response, prompt_index: int, position: int) -> float:
    """By how much the winner of a draw leads, in logits."""
    logits = naive_logits(model, [*prompt.token_ids, *response.token_ids[:position]])[None]
    stream = torch.tensor([KEY.stream(prompt_index, response.sample_index)])
    noise = exponential_noise(stream, torch.tensor([position]), logits.shape[1], dtype=logits.dtype)
    first, second = (logits - noise.log()).topk(2).values[0].tolist()
    return first - second


@pytest.mark.parametrize("max_num_seqs", [1, 5])
def test_in_float32_samples_change_at_near_ties_only(max_num_seqs: int) -> None:
    exact, oracle = generate(twin(torch.float32), num_samples=8), twin()
    other = generate(twin(torch.float32), num_samples=8, engine={"max_num_seqs": max_num_seqs})
    double = generate(twin(), num_samples=8)
    for place, responses in enumerate(zip(exact, other, double, strict=True)):
        shortest = min(len(response.token_ids) for response in responses)
        same = [len({response.token_ids[t] for response in responses}) == 1 for t in range(shortest)]
        if all(same):
            assert len({response.token_ids for response in responses}) == 1
            continue
        first = same.index(False)
        assert race_margin(oracle, PROMPTS[place // 8], double[place], place // 8, first) < 1e-5


def test_equal_prompts_in_a_batch_and_one_prompt_in_two_steps_get_different_samples() -> None:
    same = prompts_of("hello", "hello")
    first = generate(twin(), same, num_samples=2)
    later = generate(twin(), same, num_samples=2, key=RandomKey(seed=11, purpose="rollout", step=5))
    assert len(set(tokens_of([*first, *later]))) == 8
    assert tokens_of(generate(twin(), same, num_samples=2)) == tokens_of(first)


def test_first_tokens_follow_the_softmax_of_the_model() -> None:
    model = twin(torch.float32)
    responses = generate(model, PROMPTS[:1], num_samples=4000, max_new_tokens=1, temperature=2.0)
    counts = torch.tensor([response.token_ids[0] for response in responses]).bincount(minlength=64)
    expected = 4000 * (naive_logits(twin(), PROMPTS[0].token_ids) / 2).softmax(0)
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert len(counts) > 10
    assert abs(statistic - (len(counts) - 1)) < 4 * math.sqrt(2 * (len(counts) - 1))


def bias_towards(model: PreTrainedModel, token_id: int) -> PreTrainedModel:
    """Gives the model an output bias under which it writes this token whatever was before."""
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size, dtype=model.dtype))
    model.lm_head.bias.data[token_id] = 1000.0
    return model


def test_an_end_of_sequence_as_first_token_is_a_response_of_one_token() -> None:
    responses = generate(bias_towards(twin(), EOS), num_samples=3, engine={"max_num_seqs": 2})
    assert [(response.token_ids, response.finish, response.text) for response in responses] == (
        [((EOS,), Finish.EOS, "")] * 18
    )


def test_the_minimum_holds_back_the_end_of_sequence() -> None:
    responses = generate(bias_towards(twin(), EOS), min_new_tokens=4)
    assert {len(response.token_ids) for response in responses} == {5}
    assert all(not set(ENDS) & set(response.token_ids[:4]) for response in responses)


def test_any_of_several_end_of_sequence_ids_ends_a_response() -> None:
    responses = generate(bias_towards(twin(), 9), engine={"eos_token_ids": [EOS, 9]})
    assert {(response.token_ids, response.finish) for response in responses} == {((9,), Finish.EOS)}


def test_one_new_token() -> None:
    responses = generate(twin(), num_samples=3, max_new_tokens=1, engine={"max_num_seqs": 4})
    assert {len(response.token_ids) for response in responses} == {1}
    assert tokens_of(responses) == [tokens[:1] for tokens in tokens_of(generate(twin(), num_samples=3))]


def test_each_prompt_has_a_limit_of_its_own_and_its_samples_share_it() -> None:
    """Nothing but the length differs from what the longest limit gives, whoever shares the batch."""
    drawn = generate(twin(), num_samples=3, random_limit_min=2, engine={"max_num_seqs": 5})
    whole = generate(twin(), num_samples=3)
    limits = [KEY.limit(index, SamplingOptions(max_new_tokens=12, random_limit_min=2)) for index in range(len(PROMPTS))]
    assert len(set(limits)) > 2
    assert tokens_of(drawn) == [tokens[: limits[place // 3]] for place, tokens in enumerate(tokens_of(whole))]
    cut = [len(response.token_ids) < len(other.token_ids) for response, other in zip(drawn, whole, strict=True)]
    assert any(cut)
    assert {response.finish for response, shorter in zip(drawn, cut, strict=True) if shorter} == {Finish.LENGTH}


def test_limits_are_uniform_over_their_range_both_ends_included_and_change_with_the_step() -> None:
    options = SamplingOptions(max_new_tokens=6, random_limit_min=3)
    counts = Counter(KEY.limit(index, options) for index in range(4000))
    assert sorted(counts) == [3, 4, 5, 6]
    assert all(abs(count - 1000) < 5 * math.sqrt(1000 * 0.75) for count in counts.values())
    other = replace(KEY, step=5)
    assert [KEY.limit(i, options) for i in range(50)] != [other.limit(i, options) for i in range(50)]
    assert KEY.limit(0, SamplingOptions(max_new_tokens=6)) == 6


def test_a_stop_string_ends_a_response_where_the_text_first_holds_it() -> None:
    free = generate(twin(), max_new_tokens=30, num_samples=2)
    longest = max(free, key=lambda response: len(response.text))
    stop = longest.text[4:6]
    stopped = generate(twin(), max_new_tokens=30, num_samples=2, stop_strings=(stop,), engine={"max_num_seqs": 3})
    assert any(response.finish is Finish.STOP for response in stopped)
    for before, after in zip(free, stopped, strict=True):
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
        if stop in before.text:
            assert after.finish is Finish.STOP
            assert after.text == before.text[: before.text.index(stop)]
            assert tiny_tokenizer().decode(after.token_ids).endswith(stop)
        else:
            assert after.token_ids == before.token_ids


def test_a_stop_token_ends_a_response_and_stays_in_its_tokens() -> None:
    responses = generate(bias_towards(twin(), 9), stop_token_ids=(9,), min_new_tokens=2)
    assert {len(response.token_ids) for response in responses} == {3}
    assert {(response.token_ids[-1], response.finish) for response in responses} == {(9, Finish.STOP)}


def test_a_prompt_is_computed_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    original = LanguageModel.prefill

    def counting(self, packed, cache):
        computed.extend(packed.token_ids.tolist())
        return original(self, packed, cache)

    monkeypatch.setattr(LanguageModel, "prefill", counting)
    generate(twin(), num_samples=7, engine={"max_num_seqs": 3, "prefill_tokens": 20})
    assert computed == [token for prompt in PROMPTS for token in prompt.token_ids]


def test_a_beginning_that_all_prompts_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system message, say. The samples are those of prompts that are computed one by one."""
    prompts = prompts_of(*[f"be brief and kind. {question}" for question in ("why?", "who is it?", "b", "b")])
    expected = generate(twin(), prompts, num_samples=2, engine={"prefill_tokens": 1})
    lengths: list[tuple[int, ...]] = []
    original = LanguageModel.prefill

    def noting(self, packed, cache):
        lengths.append(packed.lengths)
        return original(self, packed, cache)

    monkeypatch.setattr(LanguageModel, "prefill", noting)
    assert tokens_of(generate(twin(), prompts, num_samples=2)) == tokens_of(expected)
    shared = len("be brief and kind. ")
    assert lengths == [(shared, *(len(prompt.token_ids) - shared for prompt in prompts))]
    lengths.clear()
    generate(twin(), prompts_of("be kind", "be good"))
    assert lengths == [(7, 7)], "too few tokens to share"


def test_rows_are_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a pass runs with a free row, no sample is waiting."""
    passes: list[int] = []
    original = LanguageModel.decoder

    def counted(self):
        decoder = original(self)

        def counting(token_ids, *rest):
            passes.append(len(token_ids))
            return decoder(token_ids, *rest)

        return counting

    monkeypatch.setattr(LanguageModel, "decoder", counted)
    responses = generate(twin(), num_samples=6, engine={"max_num_seqs": 4})
    assert sum(passes) == sum(len(response.token_ids) - 1 for response in responses)
    first_idle = next(index for index, rows in enumerate(passes) if rows < 4)
    assert all(rows == 4 for rows in passes[:first_idle])
    assert all(later <= earlier for earlier, later in zip(passes[first_idle:], passes[first_idle + 1 :], strict=False))


def test_nothing_reads_what_a_row_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in all that was written and is not in use: in rows about to be given away, and in rows that have moved."""
    expected = generate(twin(), num_samples=4, engine={"max_num_seqs": 5})
    place, move = RowCache.place, RowCache.move

    def fill(cache: RowCache, rows: list[int]) -> None:
        for pair in cache._storage.values():
            for storage in pair:
                for row in rows:
                    storage[row, :, : cache.lengths[row]] = math.nan

    def poisoned_place(self, prompts, index, rows):
        fill(self, list(rows))
        place(self, prompts, index, rows)

    def poisoned_move(self, source, target):
        fill(self, [target])
        move(self, source, target)
        fill(self, [source])

    monkeypatch.setattr(RowCache, "place", poisoned_place)
    monkeypatch.setattr(RowCache, "move", poisoned_move)
    assert tokens_of(generate(twin(), num_samples=4, engine={"max_num_seqs": 5})) == tokens_of(expected)


def test_rows_grow_beyond_their_first_size() -> None:
    """Long responses: storage begins with room for 64 new tokens."""
    model = bias_towards(twin(), 9)
    model.lm_head.bias.data.mul_(0).index_fill_(0, torch.tensor(ENDS), -1000.0)
    responses = generate(model, PROMPTS[:3], max_new_tokens=150, engine={"max_num_seqs": 2})
    assert {len(response.token_ids) for response in responses} == {150}
    language_model = LanguageModel(model)
    batch = pack_responses([r.prompt.token_ids for r in responses], tokens_of(responses))
    learner = language_model.response_logprobs(batch).logprobs
    torch.testing.assert_close(torch.cat([r.logprobs for r in responses]), learner.float(), atol=2e-5, rtol=0)


def test_a_pad_token_changes_nothing() -> None:
    """Prompts hold the end of sequence, and the pad token equals it."""
    prompt = Prompt(id="turns", token_ids=(5, EOS, 6, 7, EOS, 8))
    model = twin()
    model.config.pad_token_id = model.model.embed_tokens.padding_idx = EOS
    assert tokens_of(generate(model, [prompt], num_samples=4)) == naive_responses(
        twin(), [prompt], num_samples=4, options=SamplingOptions(max_new_tokens=12), key=KEY
    )


def test_the_model_is_left_in_the_mode_it_was_in() -> None:
    model = twin(torch.float32).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    modes: list[bool] = []
    handle = model.model.layers[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    generate(model)
    handle.remove()
    assert set(modes) == {False}
    assert [module.training for module in model.modules()] == before
    broken = bias_towards(twin(torch.float32), 1).train()
    broken.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(TrainingError):
        generate(broken)
    assert broken.training


def test_with_an_adapter_the_adapted_model_is_sampled() -> None:
    plain = generate(twin(torch.float32))
    model = add_adapter(twin(torch.float32), LoRAOptions(rank=2, alpha=8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    language_model = LanguageModel(model)
    responses = generate(language_model)
    batch = pack_responses([r.prompt.token_ids for r in responses], tokens_of(responses))
    learner = language_model.response_logprobs(batch).logprobs
    torch.testing.assert_close(torch.cat([r.logprobs for r in responses]), learner, atol=2e-5, rtol=0)
    assert tokens_of(responses) != tokens_of(plain)


def test_what_cannot_be_generated_is_refused() -> None:
    model = twin(torch.float32, max_position_embeddings=16)
    with pytest.raises(UserError, match="at least one prompt"):
        generate(model, [])
    with pytest.raises(UserError, match="num_samples"):
        generate(model, num_samples=0)
    with pytest.raises(UserError, match="'p9' has no tokens"):
        generate(model, [Prompt(id="p9", token_ids=())])
    with pytest.raises(UserError, match=r"'p2' has 24 tokens.*36.*16 positions"):
        generate(model)
    with pytest.raises(UserError, match="max_num_seqs"):
        engine_of(model, max_num_seqs=0)
    assert len(generate(model, prompts_of("abcd"), max_new_tokens=12)) == 1


def test_logits_that_are_not_finite_stop_the_run() -> None:
    model = twin(torch.float32)
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(TrainingError, match=r"not finite.*prompt 'p0'"):
        generate(model)
