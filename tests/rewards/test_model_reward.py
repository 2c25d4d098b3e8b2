"""Scores from a reward model: of the policy's ids where both share a tokenizer, else of the text, never of ids."""

import copy
import math

import pytest
import torch
from tokenizers import models

from builders import CHARACTERS, CHAT_TEMPLATE, tiny_language_model, tiny_tokenizer
from proximo.config.rewards.sources import ModelRewardConfig
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.rows import Row
from proximo.errors import DataError, ModelError
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.saving import save_pretrained
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.records import Finish, Prompt, Response, ScoreState
from proximo.rewards.model import ModelReward
from proximo.run.make.models import DeviceSpec, build_reward_source
from records_made import prompt, response

UNREADABLE = (10**6, 10**6 + 1)
"""No model has an embedding for these: reading them would raise."""
OTHER_TEMPLATE = (
    "<bos>{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}<|system|>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
"""Unlike the policy's: another opening, other role marks, and another token ends a turn."""


def reward_model(seed: int = 0) -> ScalarModel:
    return scalar_from_language_model(LanguageModel(tiny_language_model(seed=seed)), HeadStart.NORMAL, seed=seed)


def other_tokenizer(*, template: str = OTHER_TEMPLATE):
    """The tiny tokenizer with its letters in the opposite order, and another template."""
    tokenizer = tiny_tokenizer(chat=False)
    core = tokenizer.backend_tokenizer
    vocabulary = core.get_vocab()
    turned = dict(zip(CHARACTERS, reversed([vocabulary[letter] for letter in CHARACTERS]), strict=True))
    core.model = models.WordLevel(vocab=vocabulary | turned, unk_token="<unk>")
    tokenizer.chat_template = template
    assert tokenizer("a")["input_ids"] != tiny_tokenizer()("a")["input_ids"]
    return tokenizer


@torch.no_grad()
def alone(model: ScalarModel, token_ids: tuple[int, ...]) -> float:
    """The score that transformers itself gives to one sequence, with its own attention."""
    own = copy.deepcopy(model.base)
    own.set_attn_implementation("eager")
    return float(own(input_ids=torch.tensor([token_ids])).logits[0, 0])


def scores(source: ModelReward, responses: list[Response]) -> list[float]:
    return [each.score for each in source.score(responses)]


SHARED = [
    response((7, 8, 2), to=prompt(token_ids=(5, 6))),
    response((9,), to=prompt(token_ids=(10, 11, 12, 13)), finish=Finish.LENGTH),
    response((20, 21, 22, 23, 24, 2), to=prompt(token_ids=(30,))),
    response((7, 8, 2), to=prompt(token_ids=(5, 6))),
]


def test_with_the_policys_tokenizer_the_ids_are_read_as_they_are() -> None:
    """Text and messages say something else here, and must not be looked at."""
    model = reward_model()
    misleading = [
        response(r.token_ids, to=prompt(token_ids=r.prompt.token_ids, text="no"), text="such text") for r in SHARED
    ]
    expected = [alone(model, (*r.prompt.token_ids, *r.token_ids)) for r in SHARED]
    assert scores(ModelReward(model), misleading) == pytest.approx(expected, abs=1e-6)
    assert len({round(score, 4) for score in expected}) == 3


@pytest.mark.parametrize("tokens_per_microbatch", [1, 7, 12, 10_000])
def test_a_score_does_not_depend_on_the_company_or_the_token_budget(tokens_per_microbatch: int) -> None:
    model = reward_model()
    source = ModelReward(model, tokens_per_microbatch=tokens_per_microbatch)
    expected = [alone(model, (*r.prompt.token_ids, *r.token_ids)) for r in SHARED]
    assert scores(source, SHARED) == pytest.approx(expected, abs=1e-6)
    assert scores(source, SHARED[::-1]) == pytest.approx(expected[::-1], abs=1e-6)
    assert scores(source, SHARED[2:3]) == pytest.approx(expected[2:3], abs=1e-6)


def test_every_response_keeps_its_record_and_nothing_is_learned() -> None:
    source = ModelReward(reward_model(), name="helpful")
    found = source.score(SHARED)
    assert [each.response for each in found] == SHARED
    assert {each.state for each in found} == {ScoreState.SCORED}
    assert all(math.isfinite(each.score) for each in found)
    assert source.score([]) == []
    assert source.name == "helpful"


def test_an_empty_response_is_scored_at_the_end_of_its_prompt() -> None:
    model = reward_model()
    empty = response((), to=prompt(token_ids=(5, 6, 7)), finish=Finish.LENGTH)
    assert scores(ModelReward(model), [empty]) == pytest.approx([alone(model, (5, 6, 7))], abs=1e-6)


def trained_ids(tokenizer, row: dict) -> tuple[int, ...]:
    """The sequence of prompt and chosen answer that reward training would read."""
    (pair,), _ = load_preference_pairs([Row(source="s", number=1, values=row)], tokenizer, PairOptions())
    return (*pair.prompt_token_ids, *pair.chosen_token_ids)


def asked(**fields) -> Prompt:
    return Prompt(id="p", token_ids=UNREADABLE, **fields)


MESSAGES = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "how are you?"})
CASES = {
    "text": (asked(text="say: "), {"prompt": "say: "}, "hello", "hello"),
    "messages": (
        asked(messages=MESSAGES),
        {"prompt": list(MESSAGES)},
        "fine",
        [{"role": "assistant", "content": "fine"}],
    ),
    "both: messages win": (
        asked(messages=MESSAGES, text="not this"),
        {"prompt": list(MESSAGES)},
        "fine",
        [{"role": "assistant", "content": "fine"}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_with_its_own_tokenizer_it_reads_what_reward_training_would_read(name: str) -> None:
    given, row, text, chosen = CASES[name]
    model, tokenizer = reward_model(), other_tokenizer()
    rejected = "no" if isinstance(chosen, str) else [{"role": "assistant", "content": "no"}]
    ids = trained_ids(tokenizer, {**row, "chosen": chosen, "rejected": rejected})
    found = ModelReward(model, tokenizer=tokenizer).score([response(UNREADABLE, to=given, text=text)])
    assert found[0].score == pytest.approx(alone(model, ids), abs=1e-6)
    shared = trained_ids(tiny_tokenizer(), {**row, "chosen": chosen, "rejected": rejected})
    assert ids != shared


def test_a_cut_answer_is_rendered_without_the_mark_that_ends_one() -> None:
    model, tokenizer = reward_model(), other_tokenizer()
    source = ModelReward(model, tokenizer=tokenizer)
    row = {"prompt": list(MESSAGES), "chosen": [{"role": "assistant", "content": "fine"}], "rejected": "no"}
    ids = trained_ids(tokenizer, row)
    cut = response(UNREADABLE, to=asked(messages=MESSAGES), text="fine", finish=Finish.LENGTH)
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == "<|system|>"
    assert scores(source, [cut]) == pytest.approx([alone(model, ids[:-1])], abs=1e-6)
    in_text = trained_ids(tokenizer, {"prompt": "say: ", "chosen": "fine", "rejected": "no"})
    cut = response(UNREADABLE, to=asked(text="say: "), text="fine", finish=Finish.LENGTH)
    assert in_text[-1] == tokenizer.eos_token_id
    assert scores(source, [cut]) == pytest.approx([alone(model, in_text[:-1])], abs=1e-6)


def test_a_prompt_of_ids_alone_cannot_cross_to_another_tokenizer() -> None:
    source = ModelReward(reward_model(), tokenizer=other_tokenizer())
    with pytest.raises(DataError, match="'p' has token ids only"):
        source.score([response((7, 2), to=asked(text=None))])


def test_the_budget_and_the_company_do_not_matter_across_tokenizers_either() -> None:
    model, tokenizer = reward_model(), other_tokenizer()
    batch = [response(UNREADABLE, to=asked(text=text), text=text * 3) for text in ("one ", "three ", "x")]
    expected = [scores(ModelReward(model, tokenizer=tokenizer), [each])[0] for each in batch]
    together = ModelReward(model, tokenizer=tokenizer, tokens_per_microbatch=20)
    assert scores(together, batch) == pytest.approx(expected, abs=1e-6)


def test_a_score_that_is_no_number_is_a_fault() -> None:
    model = reward_model()
    with torch.no_grad():
        model.base.get_submodule("score").weight.fill_(math.nan)
    (found,) = ModelReward(model, name="broken").score(SHARED[:1])
    assert found.state is ScoreState.INFRASTRUCTURE_FAULT
    assert found.reason == "broken gave nan"


def test_what_is_too_long_under_its_own_tokenizer_is_a_fault_and_the_others_are_scored() -> None:
    origin = LanguageModel(tiny_language_model(max_position_embeddings=16))
    source = ModelReward(scalar_from_language_model(origin, HeadStart.NORMAL), tokenizer=other_tokenizer())
    texts = ("ok", "much too long for it", "yes")
    found = source.score([response(UNREADABLE, to=asked(text="say: "), text=text) for text in texts])
    assert [each.valid for each in found] == [True, False, True]
    assert found[1].reason is not None
    assert "reads at most 16 of its tokens, the response makes 26" in found[1].reason


def test_a_tokenizer_that_is_larger_than_the_model_is_refused() -> None:
    small = scalar_from_language_model(LanguageModel(tiny_language_model(vocab_size=32)), HeadStart.NORMAL)
    with pytest.raises(ModelError, match="the reward model embeds only 32"):
        ModelReward(small, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("beside", "named", "reads_text"),
    [
        (tiny_tokenizer, None, False),
        (other_tokenizer, None, True),
        (None, other_tokenizer, True),
        (None, tiny_tokenizer, False),
        (lambda: tiny_tokenizer(chat=False), None, True),
        (lambda: other_tokenizer(template=CHAT_TEMPLATE), None, True),
    ],
)
def test_a_recipe_decides_by_vocabulary_and_template_whether_ids_may_cross(tmp_path, beside, named, reads_text) -> None:
    save_pretrained(reward_model().model, tmp_path / "model")
    if beside is not None:
        beside().save_pretrained(tmp_path / "model")
    if named is not None:
        named().save_pretrained(tmp_path / "tokenizer")
    config = ModelRewardConfig(
        kind="model", path=str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer") if named else None
    )
    device_spec = DeviceSpec(device=torch.device("cpu"), precision=Precision.FLOAT32, seed=0)
    source = build_reward_source(config, tiny_tokenizer(), device_spec=device_spec, tokens_per_microbatch=64)
    assert isinstance(source, ModelReward)
    assert (source.encoder is not None) == reads_text
    assert not any(parameter.requires_grad for parameter in source.model.model.parameters())
