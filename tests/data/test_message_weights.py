"""A turn that the data say is not to be learned is read, and nothing of it is learned: SFT, pairs and KTO."""

from itertools import cycle
from typing import Any

import pytest

from builders import tiny_tokenizer
from chat_families import FAMILIES, QWEN_3, Family
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.labelled import LabelledOptions, load_labelled_responses
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.errors import DataError, ModelError

ASK = {"role": "user", "content": "is it?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
UNLEARNED = [{"weight": 0}, {"train": False}, {"loss_mask": 0}, {"weight": 0.0}, {"weight": 0, "train": False}]


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(source="made", number=number, values=value) for number, value in enumerate(values, 1)]


def load(tokenizer: Any, *values: dict[str, Any], **options: Any) -> tuple[list[tuple[str, str]], str]:
    """((the whole text, the texts that count) of each example, the report)."""
    examples, report = load_text_examples(rows(*values), tokenizer, ExampleOptions(**options))
    shown = []
    for example in examples:
        counted = [token for token, counts in zip(example.token_ids, example.loss_mask, strict=True) if counts]
        shown.append((tokenizer.decode(list(example.token_ids)), tokenizer.decode(counted)))
    return shown, str(report)


@pytest.mark.parametrize(
    ("name", "key"),
    list(zip([name for name, family in FAMILIES.items() if not family.rewrites], cycle(UNLEARNED), strict=False)),
    ids=str,
)
def test_a_turn_of_weight_0_is_context_under_every_template(name: str, key: dict) -> None:
    """Each form of the weight with some of the templates: it is read before a template sees the messages."""
    tokenizer = FAMILIES[name].tokenizer()
    plain = [ASK, NO, ASK, YES]
    ((whole, counted),), _ = load(tokenizer, {"messages": [ASK, {**NO, **key}, ASK, YES]})
    assert (whole, counted) == load(tokenizer, {"messages": plain}, train_on="last_response")[0][0]
    ((same, both),), _ = load(tokenizer, {"messages": [ASK, {**NO, "weight": 1}, ASK, {**YES, "train": True}]})
    assert (same, both) == load(tokenizer, {"messages": plain})[0][0]
    assert counted != both


def test_characters_that_are_not_learned_are_not_counted() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    for key, wanted in (({}, "no<|im_end|>yes<|im_end|>"), ({"weight": 0}, "yes<|im_end|>")):
        _, report = load_text_examples(rows({"messages": [ASK, {**NO, **key}, ASK, YES]}), tokenizer, ExampleOptions())
        assert report.num_characters == len(wanted)


def test_the_last_turn_may_be_the_one_of_weight_0() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    talk = {"messages": [ASK, YES, ASK, {**NO, "weight": 0}]}
    ((whole, counted),), _ = load(tokenizer, talk)
    assert whole.endswith("<|im_start|>assistant\nno<|im_end|>")
    assert counted == "yes<|im_end|>"
    with pytest.raises(DataError, match="1 without a token to learn, dropped"):
        load(tokenizer, talk, train_on="last_response")


def test_a_row_of_weights_0_is_dropped_and_counted() -> None:
    nothing = {"messages": [ASK, {**NO, "weight": 0}]}
    for name in ("chatml", "plain, no end"):  # with a mark at the end of the turn, and with the EOS put there
        shown, report = load(FAMILIES[name].tokenizer(), nothing, {"messages": [ASK, YES]})
        assert len(shown) == 1
        assert report.startswith("1 of 2 rows kept, 1 without a token to learn, dropped")


def test_a_turn_that_is_not_learned_may_be_rewritten() -> None:
    """Qwen 3 leaves the thought out of earlier turns, so that they cannot be told apart."""
    tokenizer = FAMILIES["qwen 3"].tokenizer()
    ((_, counted),), _ = load(tokenizer, {"messages": [ASK, {**NO, "weight": 0}, ASK, YES]})
    assert counted == FAMILIES["qwen 3"].learned
    with pytest.raises(ModelError, match="renders message 2 in another way"):
        load(tokenizer, {"messages": [ASK, NO, ASK, YES]})


def test_every_token_cannot_be_learned_where_a_turn_must_not_be() -> None:
    with pytest.raises(DataError, match=r"made, row 2: a message has weight 0.*train_on is everything"):
        load(
            tiny_tokenizer(),
            {"messages": [ASK, YES]},
            {"messages": [ASK, {**NO, "weight": 0}, ASK, YES]},
            train_on="everything",
        )


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ({"weight": 0.5}, "weight of 'messages', message 2 must be 0 (not learned) or 1 (learned), and agree, got 0.5"),
        ({"train": "no"}, "train of 'messages', message 2 must be 0 (not learned) or 1 (learned), and agree, got the"),
        ({"loss_mask": [0, 1]}, "got a list of 2"),
        ({"weight": 1, "train": False}, "weight and train of 'messages', message 2 must be 0"),
    ],
)
def test_a_weight_is_0_or_1(key: dict, told: str) -> None:
    with pytest.raises(DataError) as caught:
        load(tiny_tokenizer(), {"messages": [ASK, {**NO, **key}]})
    assert str(caught.value).startswith("made, row 1: ")
    assert told in str(caught.value)


def test_a_weight_of_other_turns_is_named_where_it_asks_for_what_is_never_done() -> None:
    tokenizer = tiny_tokenizer()
    shown, report = load(
        tokenizer, {"messages": [{**ASK, "weight": 1}, YES]}, {"messages": [{**ASK, "weight": 0}, YES]}
    )
    assert shown[0] == shown[1]
    assert report.endswith("not read by the chat template: weight of a turn that is not the assistant's (1 row)")


TALK = [{**NO, "weight": 0}, ASK, YES]


def chatml() -> tuple[Family, Any]:
    return FAMILIES["chatml"], FAMILIES["chatml"].tokenizer()


def test_a_policy_learns_no_turn_of_weight_0_and_none_of_the_user_in_pairs_and_labelled_answers() -> None:
    family, tokenizer = chatml()
    row = {"prompt": [ASK], "chosen": TALK, "rejected": [NO]}
    (pair,), _ = load_preference_pairs(rows(row), tokenizer, PairOptions(learned="responses"))
    labelled = {"prompt": [ASK], "completion": TALK, "label": True}
    (answer,), _ = load_labelled_responses(rows(labelled), tokenizer, LabelledOptions(max_tokens=999))
    assert pair.rejected_mask is None
    for ids, mask in (
        (pair.chosen_token_ids, pair.chosen_mask),
        (answer.response_token_ids, answer.response_mask),
    ):
        assert tokenizer.decode(list(ids)).startswith("no<|im_end|>\n<|im_start|>user\nis it?")
        counted = [token for token, counts in zip(ids, mask or (), strict=True) if counts]
        assert tokenizer.decode(counted) == family.learned


def test_of_a_pair_both_responses_have_a_turn_to_learn() -> None:
    _, tokenizer = chatml()
    nothing = {"prompt": [ASK], "chosen": [YES], "rejected": [{**NO, "weight": 0}]}
    pair = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
    kept, report = load_preference_pairs(rows(nothing, pair), tokenizer, PairOptions(learned="responses"))
    assert (len(kept), report.num_without_targets) == (1, 1)
    kept, report = load_preference_pairs(rows(nothing, pair), tokenizer, PairOptions())
    assert len(kept) == 2, "a reward model scores responses whole"
    silent = {"prompt": [ASK], "completion": [{**NO, "weight": 0}], "label": False}
    answers, report = load_labelled_responses(
        rows(silent, {"prompt": [ASK], "completion": [YES], "label": True}), tokenizer, LabelledOptions(max_tokens=999)
    )
    assert (len(answers), report.num_without_targets) == (1, 1)


def test_turns_of_a_response_that_are_rewritten_are_refused_where_a_policy_learns_them() -> None:
    tokenizer = FAMILIES["qwen 3"].tokenizer()
    assert FAMILIES["qwen 3"].template == QWEN_3
    row = {"prompt": [ASK], "chosen": [YES, ASK, YES], "rejected": [NO, ASK, YES]}
    with pytest.raises(ModelError, match=r"made, row 1: .*renders message 2 .*give responses of one turn"):
        load_preference_pairs(rows(row), tokenizer, PairOptions(learned="responses"))


def test_a_prompt_carries_no_weights() -> None:
    (prompt,), report = load_prompts(
        rows({"messages": [ASK, {**NO, "weight": 0}, ASK]}), tiny_tokenizer(), PromptOptions()
    )
    assert prompt.messages == (ASK, NO, ASK)
    assert not report.unread


def test_a_weight_is_not_for_the_template() -> None:
    whole = "{% for m in messages %}{{ m | tojson }}<eos>{% endfor %}"
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.chat_template = whole
    assert load(tokenizer, {"messages": [ASK, {**YES, "weight": 1}]}) == load(tokenizer, {"messages": [ASK, YES]})
