"""What every engine must do, whoever wrote it: a new one is one more line of `ENGINES`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from builders import tiny_language_model, tiny_tokenizer
from fake_vllm import fake_servers
from foreign_engine import ForeignEngine
from proximo.errors import ModelError, TrainingError, UserError
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import pack_responses
from proximo.models.precision.placement import Precision
from proximo.records import Finish, Prompt, Response
from proximo.rollout.engine import Engine, Holding, fingerprint, push_weights
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.vllm.engine import VLLMEngine
from proximo.rollout.vllm.server import VLLMServer
from tokenizer_kinds import KINDS

PROMPTS = [Prompt(id=f"p{n}", token_ids=tuple(range(5, 8 + n))) for n in range(4)]
KEY = RandomKey(seed=3, purpose="rollout", step=1)
OPTIONS = SamplingOptions(max_new_tokens=6)
LIVELY = {"initializer_range": 0.2}
"""Weights large enough that other ones draw other tokens."""


def language_model(seed: int = 0) -> LanguageModel:
    return LanguageModel(tiny_language_model(seed=seed, **LIVELY))


def built_in(model: LanguageModel) -> LocalEngine:
    return LocalEngine(model, tiny_tokenizer(), eos_token_ids=[2], max_num_seqs=3)


def in_bf16(model: LanguageModel) -> LocalEngine:
    return built_in(LanguageModel(model.model, precision=Precision.BF16))


OPEN = ExitStack()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Leaves no server of a test behind."""
    with OPEN:
        yield


def on_vllm_servers(model: LanguageModel) -> VLLMEngine:
    """Two servers that speak vLLM's HTTP."""
    servers = OPEN.enter_context(fake_servers(model, 2))
    engine = VLLMEngine([VLLMServer(each.url) for each in servers], model, tiny_tokenizer(), eos_token_ids=[2])
    OPEN.callback(engine.close)
    return engine


ENGINES: dict[str, Callable[[LanguageModel], Engine]] = {
    "built-in on the learner's own weights": built_in,
    "built-in on a copy": lambda model: built_in(model.frozen_copy()),
    "built-in in bf16": in_bf16,
    "foreign": ForeignEngine,
    "vLLM servers": on_vllm_servers,
}
every_engine = pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES.keys())


def weights(model: LanguageModel) -> dict[str, Tensor]:
    return dict(model.trainable_parameters())


def loaded(make: Callable[[LanguageModel], Engine], model: LanguageModel, *, version: int = 5) -> Engine:
    """An engine for a policy, with its weights."""
    engine = make(model)
    engine.load_weights(version, weights(model))
    return engine


def tokens(responses: list[Response]) -> list[tuple[int, ...]]:
    return [response.token_ids for response in responses]


@every_engine
def test_responses_come_by_prompt_and_sample_with_all_that_a_record_has(make) -> None:
    told: list[Response] = []
    engine = loaded(make, language_model())
    found = engine.generate(PROMPTS, num_samples=3, options=OPTIONS, key=KEY, on_finished=told.append)
    assert [(each.prompt, each.sample_index) for each in found] == [(p, s) for p in PROMPTS for s in range(3)]
    for each in found:
        assert 1 <= len(each.token_ids) <= 6
        assert each.logprobs.shape == each.response_mask.shape == (len(each.token_ids),)
        assert (each.logprobs.dtype, each.response_mask.dtype) == (torch.float32, torch.bool)
        assert each.logprobs.isfinite().all()
        assert (each.logprobs <= 0).all()
        assert each.response_mask.all()
        assert each.policy_version == 5
        assert each.finish is (Finish.EOS if each.token_ids[-1] == 2 else Finish.LENGTH)
        assert 2 not in each.token_ids[:-1]
        assert each.text is not None
    assert sorted(map(id, told)) == sorted(map(id, found)), "each is told of once, as the record that is returned"


@every_engine
def test_a_draw_depends_on_key_place_and_sample_alone(make) -> None:
    engine = loaded(make, language_model())

    def draw(prompts: list[Prompt], num_samples: int, key: RandomKey = KEY) -> list[tuple[int, ...]]:
        return tokens(engine.generate(prompts, num_samples=num_samples, options=OPTIONS, key=key))

    whole = draw(PROMPTS, 3)
    assert draw(PROMPTS, 3) == whole
    assert draw(PROMPTS[:2], 3) == whole[:6], "not on its neighbours"
    assert draw(PROMPTS, 1) == whole[::3], "nor on the number of samples"
    assert draw(PROMPTS, 3, RandomKey(seed=4, purpose="rollout", step=1)) != whole


@every_engine
def test_the_log_probs_are_those_of_the_weights_that_it_holds(make) -> None:
    """Each to 1e-5 where it says that they are the learner's; else nearly, in the mean."""
    model = language_model()
    engine = loaded(make, model)
    found = engine.generate(PROMPTS, num_samples=2, options=SamplingOptions(max_new_tokens=6, temperature=0.7), key=KEY)
    packed = pack_responses([each.prompt.token_ids for each in found], [each.token_ids for each in found])
    wanted = model.response_logprobs(packed, temperature=0.7).logprobs.detach()
    difference = (torch.cat([each.logprobs for each in found]) - wanted).abs()
    if engine.logprobs_are_the_learners:
        assert difference.max() < 1e-5
    else:
        assert difference.mean() < 0.02


@every_engine
def test_it_holds_what_was_loaded_and_samples_from_that(make) -> None:
    first, second = language_model(1), language_model(2)
    engine = make(first)
    assert engine.holds() is None
    engine.load_weights(0, weights(first))
    assert engine.holds() == Holding(version=0, fingerprint=fingerprint(weights(first)))
    before = engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)
    other = weights(second)
    engine.load_weights(7, other)
    assert engine.holds() == Holding(version=7, fingerprint=fingerprint(other))
    found = engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)
    assert {each.policy_version for each in found} == {7}
    fresh = loaded(make, language_model(2), version=7)
    assert tokens(found) == tokens(fresh.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)) != tokens(before)


@every_engine
def test_of_an_adapter_what_trains_is_loaded_and_the_rest_stays(make) -> None:
    model = language_model().with_adapter(LoRAOptions(rank=2))
    adapter = weights(model)
    assert all("lora_" in name for name in adapter)
    engine = loaded(make, model)
    before = tokens(engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY))
    other = {name: tensor.detach() + 0.5 for name, tensor in adapter.items()}
    engine.load_weights(6, other)
    assert engine.holds() == Holding(version=6, fingerprint=fingerprint(other))
    assert tokens(engine.generate(PROMPTS, num_samples=2, options=OPTIONS, key=KEY)) != before


@every_engine
@pytest.mark.parametrize("fault", ["name", "shape"])
def test_a_tensor_that_has_no_place_is_refused_before_any_is_loaded(make, fault: str) -> None:
    model = language_model()
    engine = loaded(make, model)
    held = engine.holds()
    wrong = {name: tensor.detach() + 1 for name, tensor in weights(model).items()}
    last = list(wrong)[-1]
    wrong[last if fault == "shape" else "nobody.weight"] = torch.zeros(3, 5)
    with pytest.raises(ModelError, match=last if fault == "shape" else "nobody.weight"):
        engine.load_weights(6, wrong)
    assert engine.holds() == held


@every_engine
def test_a_prompt_that_does_not_fit_is_refused(make) -> None:
    engine = loaded(make, language_model())
    with pytest.raises(UserError):
        engine.generate([Prompt(id="long", token_ids=(5,) * 500)], num_samples=1, options=OPTIONS, key=KEY)


def test_the_built_in_engine_copies_nothing_of_the_learners_own_weights() -> None:
    """And says what they are now, also where somebody changed them from outside."""
    model = language_model()
    engine, own = loaded(built_in, model), weights(model)
    versions = {name: tensor._version for name, tensor in own.items()}
    engine.load_weights(6, own)
    assert {name: tensor._version for name, tensor in own.items()} == versions
    with torch.no_grad():
        own["model.norm.weight"].add_(1.0)
    assert engine.holds() == Holding(version=6, fingerprint=fingerprint(own))


def test_weights_are_pushed_once_and_what_is_not_taken_is_noticed() -> None:
    model = language_model()
    engine = ForeignEngine(model)
    push_weights(engine, 0, weights(model))
    push_weights(engine, 0, weights(model))
    assert engine.loaded == [0], "what it holds is not sent again"
    with torch.no_grad():
        model.base.get_parameter("model.norm.weight").add_(1.0)
    push_weights(engine, 0, weights(model))
    assert engine.loaded == [0, 0], "the same version with other numbers is"
    engine.loaded.clear()  # as an engine that was started anew
    push_weights(engine, 3, weights(model))
    assert engine.loaded == [3]
    engine.load_weights = lambda version, tensors: None  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="given the policy's weights of version 4, but holds version 3"):
        push_weights(engine, 4, weights(model))


def test_a_fingerprint_is_of_names_shapes_types_and_numbers() -> None:
    given = {"a": torch.arange(400.0), "b": torch.ones(2, 3)}
    found = fingerprint(given)
    assert found == fingerprint(dict(reversed(given.items())))
    for other in (
        {"c": given["a"], "b": given["b"]},
        {"a": given["a"], "b": torch.ones(3, 2)},
        {"a": given["a"], "b": torch.ones(2, 3, dtype=torch.float64)},
        {"a": given["a"] + 1e-6 * given["a"], "b": given["b"]},
        {"a": given["a"]},
    ):
        assert fingerprint(other) != found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_servers", [False, True], ids=["built-in", "vLLM servers"])
def test_the_text_of_a_response_is_what_it_adds_to_its_prompt(kind: str, on_servers: bool) -> None:
    tokenizer = KINDS[kind]()
    model = LanguageModel(tiny_language_model(vocab_size=len(tokenizer), **LIVELY))
    if on_servers:
        servers = OPEN.enter_context(fake_servers(model, 1))
        engine: Engine = VLLMEngine([VLLMServer(servers[0].url)], model, tokenizer, eos_token_ids=[2])
        OPEN.callback(engine.close)
    else:
        engine = LocalEngine(model, tokenizer, eos_token_ids=[2])
    engine.load_weights(1, weights(model))
    # They end in a character of one token, which no byte of a response can be a part of.
    texts = ("Once upon", "a:", "\u20aca")
    prompts = [Prompt(id=text, token_ids=tuple(tokenizer(text)["input_ids"])) for text in texts]
    for response in engine.generate(prompts, num_samples=4, options=OPTIONS, key=KEY):
        asked = list(response.prompt.token_ids)
        ended = len(response.token_ids) - (response.finish is Finish.EOS)
        before, after = (
            tokenizer.decode(each, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for each in (asked, [*asked, *response.token_ids[:ended]])
        )
        assert before + response.text == after
