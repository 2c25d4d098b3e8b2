"""What the assistant wrote is found under any prefix-stable chat template, and others are refused by name."""

import pytest

from builders import tiny_tokenizer
from proximo.data.chat import PLAIN_CHAT_TEMPLATE, end_of_turn_ids, render_conversation
from proximo.data.tokenise import Encoder
from proximo.errors import DataError, ModelError

SYSTEM = {"role": "system", "content": "be kind"}
ASK = {"role": "user", "content": "one"}
REPLY = {"role": "assistant", "content": "two"}
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<eos>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "trimming": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' <eos>' }}"
        "{% else %}{{ '(' + m['content'] | trim + ')' }}{% endif %}{% endfor %}"
    ),
    "thinking": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
        "{{ 'hm.\n' }}{% endif %}{{ m['content'] + '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    "no mark": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    "plain": PLAIN_CHAT_TEMPLATE,
}
LAST_ONLY = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] + '<eos>' }}{% endif %}"
    "{% endfor %}"
)


def encoder_with(template: str | None) -> Encoder:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.name_or_path = "the/tokenizer"
    return Encoder(tokenizer)


def parts(template: str, prompt: list, *responses: list, append_eos: bool = True) -> list[list[tuple[str, bool]]]:
    rendered = render_conversation(encoder_with(template), prompt, responses, origin="here", append_eos=append_eos)
    return [
        [(segment.text, segment.written) for segment in segments] for segments in (rendered.prompt, *rendered.responses)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [[("<|user|>\none<eos>\n<|assistant|>\n", False)], [("two", True), ("<eos>", True)]]),
        ("trimming", [[("(one)", False)], [(" two ", True), ("<eos>", True)]]),
        ("thinking", [[("<|user|>one<eos><|assistant|>", False)], [("hm.\ntwo", True), ("<eos>", True)]]),
        ("no mark", [[("user: one\nassistant: ", False)], [("two", True), ("", True)]]),
        ("plain", [[("\n\nHuman: one\n\nAssistant:", False)], [(" two", True), ("<eos>", True)]]),
    ],
)
def test_a_reply_is_what_the_assistant_wrote_and_the_mark_that_ends_its_turn(name: str, expected) -> None:
    assert parts(TEMPLATES[name], [ASK], [REPLY]) == expected


@pytest.mark.parametrize("name", ["chatml", "trimming", "plain"])
def test_earlier_turns_of_the_assistant_are_found_in_the_prompt(name: str) -> None:
    prompt, reply = parts(TEMPLATES[name], [SYSTEM, ASK, REPLY, ASK], [REPLY])
    assert [written for _, written in prompt] == [False, True, True, False]
    assert [text.strip() for text, written in (*prompt, *reply) if written] == ["two", "<eos>", "two", "<eos>"]
    whole = encoder_with(TEMPLATES[name]).tokenizer.apply_chat_template(
        [SYSTEM, ASK, REPLY, ASK, REPLY], tokenize=False
    )
    assert whole.startswith("".join(text for text, _ in (*prompt, *reply)))


def test_a_reply_of_several_turns_keeps_the_others_words_unwritten() -> None:
    _, reply = parts(TEMPLATES["plain"], [ASK], [REPLY, ASK, REPLY])
    assert [written for _, written in reply] == [True, True, False, True, True]


def test_spaces_around_a_reply_stay_where_the_template_keeps_them() -> None:
    spaced = {"role": "assistant", "content": "  two \n"}
    assert parts(TEMPLATES["chatml"], [ASK], [spaced])[1] == [("  two \n", True), ("<eos>", True)]
    assert parts(TEMPLATES["trimming"], [ASK], [spaced])[1] == [(" two ", True), ("<eos>", True)]


def test_an_empty_reply_is_its_end_of_turn() -> None:
    empty = {"role": "assistant", "content": ""}
    assert parts(TEMPLATES["chatml"], [ASK], [empty])[1] == [("<eos>", True)]
    assert parts(TEMPLATES["no mark"], [ASK], [empty], append_eos=False)[1] == []


@pytest.mark.parametrize(("name", "ids"), [("chatml", (2,)), ("trimming", (2,)), ("no mark", ()), ("plain", (2,))])
def test_a_rollout_learns_from_the_template_where_to_stop(name: str, ids: tuple[int, ...]) -> None:
    assert end_of_turn_ids(encoder_with(TEMPLATES[name])) == ids
    assert end_of_turn_ids(encoder_with(None)) == ()


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"here: the chat template of 'the/tokenizer' is not prefix-stable.*message 2"):
        parts(LAST_ONLY, [ASK, REPLY, ASK], [REPLY])
    assert len(parts(LAST_ONLY, [ASK], [REPLY])) == 2


def test_a_generation_prompt_that_the_history_does_not_have_is_refused() -> None:
    forced = TEMPLATES["chatml"].replace("'<|assistant|>\n'", "'<|assistant|>\nhm.\n'")
    with pytest.raises(ModelError, match="not prefix-stable"):
        parts(forced, [ASK], [REPLY])


def test_a_template_that_changes_what_was_written_is_refused() -> None:
    shouting = TEMPLATES["chatml"].replace("m['content'] +", "m['content'] | upper +")
    with pytest.raises(ModelError, match=r"changes what the assistant wrote \('two'"):
        parts(shouting, [ASK], [REPLY])


def test_a_tokenizer_without_a_template_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"here: messages need a chat template, and the tokenizer 'the/tokenizer'"):
        render_conversation(encoder_with(None), [ASK], [[REPLY]], origin="here")


def test_what_a_template_refuses_names_the_row_and_the_roles() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match=r"here: .*'the/tokenizer' refuses the messages \(roles: user, user\): roles must"
    ):
        parts(strict, [ASK, ASK])
    with pytest.raises(DataError, match=r"roles: none"):
        parts(TEMPLATES["chatml"], [REPLY], [REPLY])


def test_the_template_of_qwen_gives_the_ids_of_its_own_rendering(real_tokenizers) -> None:
    """The oracle is `apply_chat_template` of transformers, tokenised whole."""
    tokenizer = real_tokenizers["qwen2.5"]
    conversation = [
        SYSTEM,
        ASK,
        REPLY,
        {"role": "user", "content": "d\u00e9j\u00e0 vu?\n"},
        {**REPLY, "content": "Yes, 42."},
    ]
    encoder = Encoder(tokenizer)
    rendered = render_conversation(encoder, conversation[:-1], [conversation[-1:]], origin="here")
    encoded = encoder.rendered([rendered])[0]
    prompt = tokenizer.apply_chat_template(conversation[:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(conversation, return_dict=False)
    assert list(encoded.prompt.ids) == prompt
    newline = tokenizer("\n")["input_ids"]
    assert [*encoded.prompt.ids, *encoded.responses[0].ids, *newline] == whole
    assert end_of_turn_ids(encoder) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
