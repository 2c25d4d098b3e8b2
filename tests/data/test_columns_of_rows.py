"""What stands in a row is used, refused or named: system messages, earlier turns, JSON text, pictures, the rest."""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from builders import tiny_tokenizer
from chat_families import CHATML, FAMILIES
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.formats.column_use import read_by_source
from proximo.data.labelled import LabelledOptions, load_labelled_responses
from proximo.data.load_report import Remark, remark_lines
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.readers.problems import as_problem
from proximo.data.readers.reading import read_source
from proximo.data.readers.source import DataSource, with_columns
from proximo.data.rows import Row
from proximo.data.step_examples import StepOptions, load_step_examples
from proximo.errors import DataError

USER, REPLY = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "re"}
SYSTEM = {"role": "system", "content": "be kind"}
GPT = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "re"}]


def rows(*values: dict[str, Any], **fields: Any) -> list[Row]:
    return [Row(source="made", number=number, values=value, **fields) for number, value in enumerate(values, 1)]


def load(
    kind: str, *values: dict[str, Any], as_messages: bool = False, used: tuple[str, ...] = (), **options: Any
) -> tuple[Any, Any]:
    """(what is made of the first row, the report), by one of the loaders."""
    tokenizer, given = FAMILIES["chatml"].tokenizer(), rows(*values, used=used)
    options |= {"as_messages": as_messages}
    match kind:
        case "prompts":
            made, report = load_prompts(given, tokenizer, PromptOptions(**options))
        case "texts":
            made, report = load_text_examples(given, tokenizer, ExampleOptions(**options))
        case "pairs":
            made, report = load_preference_pairs(given, tokenizer, PairOptions(**options))
        case "labelled":
            made, report = load_labelled_responses(given, tokenizer, LabelledOptions(max_tokens=999, **options))
        case _:
            made, report = load_step_examples(given, tokenizer, StepOptions(**options))
    return made[0], report


def text_of(made: Any) -> str:
    ids = getattr(made, "token_ids", None) or made.prompt_token_ids
    return FAMILIES["chatml"].tokenizer().decode(list(ids))


TEXT_ROWS = {
    "prompts": {"prompt": "ask"},
    "texts": {"instruction": "ask", "input": "", "output": "re"},
    "pairs": {"prompt": "ask", "chosen": "re", "rejected": "no"},
    "labelled": {"prompt": "ask", "completion": "re", "label": True},
    "steps": {"prompt": "ask", "steps": ["re"], "labels": [1]},
}
MESSAGE_ROWS = {
    "prompts": {"messages": [USER, REPLY]},
    "texts": {"conversations": GPT},
    "pairs": {"chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "no"}]},
    "labelled": {"messages": [USER, REPLY], "label": "true"},
    "steps": {"prompt": [USER], "steps": ["re"], "labels": [1]},
}
KINDS = list(TEXT_ROWS)
FRONT = "<|im_start|>system\nbe kind<|im_end|>\n"
EARLIER = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
ASKED = "<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_message_and_earlier_turns_in_columns_stand_before_the_prompt(kind: str) -> None:
    columns = {"system": "be kind", "history": [["one", "two"]]}
    for row, as_messages in ((MESSAGE_ROWS[kind], False), (TEXT_ROWS[kind], True)):
        made, report = load(kind, row | columns, as_messages=as_messages)
        assert text_of(made).startswith(FRONT + EARLIER + ASKED)
        assert not report.remarks
        assert text_of(load(kind, row | {"system": "", "history": []}, as_messages=as_messages)[0]).startswith(ASKED)


CONTEXT = {
    "system": "be kind",
    "history": [["one", "two"]],
    "tools": [{"name": "f"}],
    "chat_template_kwargs": {"think": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_prompt_of_text_has_no_place_for_is_refused(kind: str) -> None:
    for column, value in CONTEXT.items():
        told = f"made, row 1: column '{column}' is for a chat template, but .*data.as_messages.*{column}: ''"
        with pytest.raises(DataError, match=told):
            load(kind, TEXT_ROWS[kind] | {column: value})


def test_earlier_turns_are_learned_like_others() -> None:
    row = TEXT_ROWS["texts"] | {"history": [["one", "two"]]}
    for train_on, wanted in (("responses", "two<|im_end|>re<|im_end|>"), ("last_response", "re<|im_end|>")):
        made, _ = load("texts", row, as_messages=True, train_on=train_on)
        counted = [token for token, counts in zip(made.token_ids, made.loss_mask, strict=True) if counts]
        assert FAMILIES["chatml"].tokenizer().decode(counted) == wanted


def test_earlier_turns_are_pairs_or_messages_also_as_json_text() -> None:
    turns = [USER | {"content": "one"}, REPLY | {"content": "two"}]
    for history in ('[["one", "two"]]', [["one", "two"]], turns):
        made, _ = load("prompts", {"prompt": "ask", "history": history}, as_messages=True)
        assert text_of(made) == EARLIER + ASKED


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"history": [["one"]]}, "turn 1 of column 'history' must be a pair of an instruction and its answer"),
        ({"history": [["one", None]]}, "turn 1 of column 'history' must be a pair"),
        ({"history": 5}, "column 'history' must be a list of earlier turns"),
        ({"system": 5}, "column 'system' must be text"),
        ({"messages": [SYSTEM, USER], "system": "be rude"}, "two system messages, and they differ"),
        ({"chat_template_kwargs": 5}, "column 'chat_template_kwargs' must be an object"),
        ({"chat_template_kwargs": {"messages": []}}, "must not set messages"),
    ],
)
def test_malformed_columns_are_refused_with_their_row(columns: dict, told: str) -> None:
    with pytest.raises(DataError) as caught:
        load("prompts", {"messages": [USER]} | columns)
    assert str(caught.value).startswith("made, row 1: ")
    assert told in str(caught.value)


def test_the_rows_own_system_message_goes_before_that_of_the_recipe_and_may_be_given_twice() -> None:
    twice = {"messages": [SYSTEM, USER], "system": "be kind"}
    for row in (twice, {"messages": [USER], "system": "be kind"}):
        assert text_of(load("prompts", row, system="be rude")[0]) == FRONT + ASKED
    mixed = {"messages": [SYSTEM, USER], "history": [["one", "two"]]}
    assert text_of(load("prompts", mixed)[0]) == FRONT + EARLIER + ASKED


def test_a_system_column_that_a_template_of_columns_uses_is_used() -> None:
    values = {"system": "be kind", "question": "ask", "answer": "re", "level": 3}
    row = with_columns(rows(values)[0], {"prompt": "{system}\n{question}", "response": "answer"})
    _, report = load_text_examples([row], tiny_tokenizer(), ExampleOptions())
    assert report.remarks == {Remark("made", "columns not used", "level"): 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_is_made_of_itself_is_read_like_any_other(kind: str) -> None:
    def read(values: dict[str, Any], columns: dict[str, str], **options: Any) -> tuple[Any, Any]:
        row = with_columns(rows(TEXT_ROWS[kind] | values)[0], columns)
        return load(kind, row.values, as_messages=True, used=row.used, **options)

    templates = {"system": "be {system}", "history": '[["one", {history}]]', "extra": "<{extra}>"}
    made, report = read({"system": "kind", "history": '"two"', "extra": "e"}, templates)
    assert text_of(made).startswith(FRONT + EARLIER + ASKED)
    unread = {} if kind == "prompts" else {Remark("made", "columns not used", "extra"): 1}
    assert report.remarks == unread
    with pytest.raises(DataError, match="made, row 1: column 'images' holds"):
        read({"images": "a.png"}, {"images": "folder/{images}"})


JSON_ROWS = {
    "prompts": {"prompt": json.dumps([USER])},
    "texts": {"prompt": json.dumps([USER]), "completion": json.dumps([REPLY])},
    "pairs": {"prompt": json.dumps([USER]), "chosen": json.dumps([REPLY]), "rejected": json.dumps([SYSTEM | REPLY])},
    "labelled": {"messages": json.dumps([USER, REPLY]), "label": "true"},
    "steps": {"prompt": json.dumps([USER]), "steps": ["re"], "labels": [1]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_messages_as_json_text_are_messages_and_said_to_be(kind: str) -> None:
    row = JSON_ROWS[kind] | (
        {"rejected": json.dumps({"role": "assistant", "content": "no"})} if kind == "pairs" else {}
    )
    made, report = load(kind, row)
    assert text_of(made).startswith(ASKED)
    columns = sorted(column for column in row if column not in ("label", "labels", "steps"))
    assert str(report).endswith(
        "; made: messages read from JSON text in: " + ", ".join(f"'{column}' (1 row)" for column in columns)
    )


def test_conversations_of_sharegpt_as_json_text_are_messages() -> None:
    assert text_of(load("texts", {"conversations": json.dumps(GPT)})[0]).startswith(ASKED)


LIKE_JSON = [
    *("[", "[1, 2]", "[]", "{}", "[ask", '["user"]', '[{"role": "user"}]', '[{"content": "a"}]'),
    '[{"role": "admin", "content": "a"}]',
    '[{"role": "user", "content": "a"}] in French',
    '{"from": "here", "value": 1}',
    '[{"role": "user", "content": "a"}, 5]',
]


def test_other_text_that_begins_like_json_stays_text() -> None:
    for text in LIKE_JSON:
        made, report = load("texts", {"prompt": text, "completion": text})
        assert text_of(made) == f"{text}{text}<|im_end|>"
        assert not report.remarks


@pytest.mark.parametrize(
    "text", ["[{'role': 'user', 'content': 'a'}]", " [{'from': 'human', 'value': 'a'},\n {'b': 1}]"]
)
def test_messages_in_pythons_notation_are_refused(text: str) -> None:
    with pytest.raises(
        DataError, match=r"made, row 1: column 'prompt' holds messages in Python's notation.*json.dumps"
    ):
        load("texts", {"prompt": text, "completion": "a"})


@pytest.mark.parametrize("text", ['{"role": "assistant", "content": "hi"}', '[{"role": "user", "content": "hi"}]'])
@pytest.mark.parametrize("dialect", [str, lambda text: str(json.loads(text))])
def test_an_answer_to_a_prompt_of_text_stays_the_text_that_it_is(text: str, dialect: Any) -> None:
    """A task may be to write messages, in JSON or in Python's notation."""
    text = dialect(text)
    for column, prompt in product(("response", "completion", "output"), ("prompt", "instruction")):
        row = {prompt: "ask", column: text}
        for kind in ("texts", "labelled"):
            made, report = load(kind, row | ({"label": True} if kind == "labelled" else {}))
            ids = made.token_ids if kind == "texts" else (*made.prompt_token_ids, *made.response_token_ids)
            assert FAMILIES["chatml"].tokenizer().decode(list(ids)) == f"ask{text}<|im_end|>"
            assert not report.remarks
        for asked in (row, {"prompt": [USER], column: text}):
            made, report = load("prompts", asked)
            assert (made.metadata[column], report.remarks) == (text, {})
            made, report = load("steps", asked | {"steps": ["re"], "labels": [1]})
            assert report.remarks == {Remark("made", "columns not used", column): 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_pictures_is_refused(kind: str) -> None:
    for column in ("images", "image", "videos", "audio"):
        with pytest.raises(DataError, match=rf"made, row 1: column '{column}' holds .*text only.*{column}: ''"):
            load(kind, TEXT_ROWS[kind] | {column: ["a.png"]})
        assert not load(kind, TEXT_ROWS[kind] | {column: []})[1].remarks


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "a part of type 'image_url'",
        ),
        ([{"type": "image"}], "a part of type 'image'"),
        ([{"type": "text", "text": None}], "a part of type 'text'"),
        (["a"], "the text 'a'"),
        ({"a": 1}, "an object with keys ['a']"),
    ],
)
def test_content_that_is_not_text_is_refused(content: Any, told: str) -> None:
    with pytest.raises(DataError, match=r"made, row 1: the content of 'messages', message 1 must be text") as caught:
        load("texts", {"messages": [{"role": "user", "content": content}, REPLY]})
    assert told in str(caught.value)


EXTRA = {"id": "a", "source": "web", "score": 3, "empty": None, "blank": "", "none": [], "keys": {}}


@pytest.mark.parametrize("kind", ["texts", "pairs", "labelled", "steps"])
def test_every_column_that_is_not_used_is_named_once_with_its_rows(kind: str) -> None:
    for row in (TEXT_ROWS[kind], MESSAGE_ROWS[kind]):
        _, report = load(kind, row | EXTRA, row | EXTRA | {"id": "b", "score": None})
        assert str(report).endswith("; made: columns not used: 'score' (1 row), 'source' (2 rows)")


def test_columns_of_another_form_are_not_used() -> None:
    _, report = load("texts", {"text": "a", "system": "b", "tools": [1]})
    assert [remark.column for remark in report.remarks] == ["system", "tools"]
    _, report = load("texts", TEXT_ROWS["pairs"] | {"margin": 1.0, "messages": [USER]})
    assert [remark.column for remark in sorted(report.remarks)] == ["margin", "messages"]
    assert not load("pairs", TEXT_ROWS["pairs"] | {"margin": 1.0})[1].remarks


def test_columns_of_prompts_are_given_to_rewards_and_none_is_unused() -> None:
    made, report = load("prompts", TEXT_ROWS["prompts"] | EXTRA)
    assert not report.remarks
    assert made.metadata == EXTRA
    told, _ = load("prompts", MESSAGE_ROWS["prompts"] | {"system": "Be brief."})
    assert told.metadata == {"system": "Be brief."}
    assert told.messages[0] == {"role": "system", "content": "Be brief."}


def test_columns_of_problem_sets_are_known() -> None:
    row = as_problem(rows({"question": "1 + 1?", "answer": "It is 2.\n#### 2"})[0], "gsm8k")
    assert not load_text_examples([row], FAMILIES["chatml"].tokenizer(), ExampleOptions())[1].remarks


def test_each_source_has_a_line_of_its_own() -> None:
    remarks = {
        Remark("b.jsonl", "columns not used", "x"): 1000,
        Remark("a.jsonl", "messages read from JSON text in", "prompt"): 2,
        Remark("a.jsonl", "columns not used", "y"): 1,
    }
    assert list(remark_lines(remarks)) == [
        "a.jsonl: columns not used: 'y' (1 row)",
        "a.jsonl: messages read from JSON text in: 'prompt' (2 rows)",
        "b.jsonl: columns not used: 'x' (1,000 rows)",
    ]


def test_a_column_is_not_used_by_asking_whether_it_is_there() -> None:
    remarks: Counter[Remark] = Counter()
    assert list(
        read_by_source(rows({"x": 1, "y": 2}), lambda _: lambda row: row.values["y"] * ("x" in row.values), remarks)
    )
    assert remarks == {Remark("made", "columns not used", "x"): 1}


NAMING = (
    "{% for m in messages %}{{ '<|im_start|>' + (m.name or m.role) + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if think is defined and not think %}"
    "{{ '<think></think>' }}{% endif %}{% endif %}"
)


def report_with(template: str, *messages: dict, **columns: Any) -> Any:
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.chat_template = template
    return load_text_examples(rows({"messages": messages} | columns), tokenizer, ExampleOptions())


def test_keys_of_messages_that_the_template_does_not_read_are_named() -> None:
    named, dated = {**USER, "name": "bo", "date": "now"}, {**REPLY, "date": "now", "name": None}
    assert report_with(CHATML, named, dated)[1].unread == {"message key 'date'": 1, "message key 'name'": 1}
    examples, report = report_with(NAMING, named, dated)
    assert report.unread == {"message key 'date'": 1}
    assert text_of(examples[0]).startswith("<|im_start|>bo\nask")
    assert str(report).endswith("; not read by the chat template: message key 'date' (1 row)")
    planned = CHATML.replace("m.content +", "m.get('tool-plan', '') + m.content +")
    assert report_with(planned, USER, {**REPLY, "tool-plan": "hm ", "no-plan": "a"})[1].unread == {
        "message key 'no-plan'": 1
    }


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_read_under_each_of_its_names(key: str) -> None:
    thinking = CHATML.replace("m.content +", "(m.reasoning_content or '') + m.content +")
    examples, report = report_with(thinking, USER, {**REPLY, key: "hm "})
    assert text_of(examples[0]).endswith("hm re<|im_end|>")
    assert not report.unread
    assert report_with(CHATML, USER, {**REPLY, key: "hm "})[1].unread == {f"message key '{key}'": 1}


@pytest.mark.parametrize("given", [{"think": False}, '{"think": false}'])
def test_options_of_a_row_are_given_to_its_template_or_named(given: Any) -> None:
    examples, report = report_with(NAMING, USER, REPLY, chat_template_kwargs=given)
    assert "assistant\n<think></think>re" in text_of(examples[0])
    assert not report.unread
    assert report_with(CHATML, USER, REPLY, chat_template_kwargs=given)[1].unread == {
        "column 'chat_template_kwargs'": 1
    }


def test_a_table_of_conversations_is_read_from_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('system,messages,x\nbe kind,"[{""role"": ""user"", ""content"": ""ask""}]",\n')
    read = read_source(DataSource(path=str(tmp_path / "a.csv")))
    (prompt,), _ = load_prompts(read, FAMILIES["chatml"].tokenizer(), PromptOptions())
    assert text_of(prompt) == FRONT + ASKED
