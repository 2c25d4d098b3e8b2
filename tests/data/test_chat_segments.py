"""What the assistant wrote is found under every chat template, or refused by name where a loss needs to know."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from builders import tiny_tokenizer
from chat_families import PLAIN_CHAT_TEMPLATE
from proximo.data.templates import limits
from proximo.data.templates.chat import end_of_turn_ids, render_conversation
from proximo.data.templates.turn_ends import end_of_turn
from proximo.data.tokenise import TextEncoder
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


def encoder_with(template: str | None) -> TextEncoder:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.name_or_path = "the/tokenizer"
    return TextEncoder(tokenizer)


def parts(template: str, prompt: list, *responses: list, **options) -> list[list[tuple[str, bool]]]:
    rendered = render_conversation(encoder_with(template), prompt, responses, origin="here", **options)
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
    assert parts(TEMPLATES["no mark"], [ASK], [empty], finished=False)[1] == []


@pytest.mark.parametrize(("name", "ids"), [("chatml", (2,)), ("trimming", (2,)), ("no mark", ()), ("plain", (2,))])
def test_a_rollout_learns_from_the_template_where_to_stop(name: str, ids: tuple[int, ...]) -> None:
    assert end_of_turn_ids(encoder_with(TEMPLATES[name])) == ids
    assert end_of_turn_ids(encoder_with(None)) == ()


def test_a_template_that_rewrites_earlier_turns_is_refused_only_where_each_of_them_is_learned() -> None:
    turns, asked = ([ASK, REPLY, ASK], [REPLY]), "one<eos>one<eos>"
    assert parts(LAST_ONLY, *turns) == [[(asked, False)], [("two", True), ("<eos>", True)]]
    for prompt, response in (turns, ([ASK], [REPLY, ASK, REPLY])):
        with pytest.raises(
            ModelError, match=r"here: the chat template of 'the/tokenizer' renders message 2.*train_on: last_response"
        ):
            parts(LAST_ONLY, prompt, response, learned="all")
    assert len(parts(LAST_ONLY, [ASK], [REPLY], learned="all")) == 2


def test_a_response_of_several_turns_to_a_prompt_that_it_rewrites_is_refused() -> None:
    counting = "{{ messages | length }}" + LAST_ONLY
    assert parts(counting, [ASK], [REPLY])[1] == [("two", True), ("<eos>", True)]
    with pytest.raises(ModelError, match="renders the prompt in another way once the first turn of the response"):
        parts(counting, [ASK], [REPLY, ASK, REPLY])


def test_words_that_only_open_a_turn_stand_before_the_response_as_it_is() -> None:
    """The template would drop them with the next rendering, but a policy is asked with them."""
    forced = TEMPLATES["chatml"].replace("'<|assistant|>\n'", "'<|assistant|>\nhm.\n'")
    assert parts(forced, [ASK], [REPLY]) == [
        [("<|user|>\none<eos>\n<|assistant|>\nhm.\n", False)],
        [("two", True), ("<eos>", True)],
    ]


def test_a_response_that_the_template_would_write_in_another_way_stands_as_it_is() -> None:
    shouting = TEMPLATES["chatml"].replace("m['content'] +", "m['content'] | upper +")
    assert parts(shouting, [ASK], [REPLY])[1] == [("two", True), ("", True)]


SPOKEN = TEMPLATES["chatml"].replace("<eos>", "(end)")


def test_an_end_that_is_plain_text_is_part_of_every_turn() -> None:
    """Behind the last one stands the EOS, at which a rollout stops."""
    prompt, reply = parts(SPOKEN, [ASK, REPLY, ASK], [REPLY])
    assert [text for text, written in prompt if written] == ["two", "(end)"]
    assert reply == [("two", True), ("(end)", True), ("", True)]
    assert parts(SPOKEN, [ASK], [REPLY], finished=False)[1] == [("two", True)]
    assert end_of_turn_ids(encoder_with(SPOKEN)) == ()


def test_a_conversation_may_begin_with_the_assistant() -> None:
    assert parts(TEMPLATES["chatml"], [REPLY, ASK], [REPLY])[0] == [
        ("<|assistant|>\n", False),
        ("two", True),
        ("<eos>", True),
        ("\n<|user|>\none<eos>\n<|assistant|>\n", False),
    ]
    indexing = "{% if messages[0]['role'] == 'system' %}{{ 'S' }}{% endif %}" + TEMPLATES["chatml"]
    assert parts(indexing, [REPLY, ASK], [REPLY])[0] == [
        ("<|assistant|>\ntwo<eos>\n<|user|>\none<eos>\n<|assistant|>\n", False)
    ]
    with pytest.raises(ModelError, match="renders message 1 in another way with the turns around it"):
        parts(indexing, [REPLY, ASK], [REPLY], learned="all")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HARMS = {
    "a loop in a marked answer": ("{%- generation -%}" + LOOP + "{%- endgeneration %}", "1 s of computing"),
    "a number without end": ("{{ 9 ** (9 ** (9 ** 9)) }}", "1 s of computing"),
    "a text of 10 GB": ("{{ 'a' * 10000000000 }}", "1024 MiB of memory"),
}


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("harm", HARMS)
def test_a_template_that_never_ends_is_refused_by_a_trial_in_another_process(harm: str) -> None:
    template, limit = HARMS[harm]
    with pytest.raises(ModelError, match=f"more than {limit}"):
        limits.try_template(template + TEMPLATES["chatml"], "{}")


def test_the_trial_comes_first_and_names_the_tokenizer() -> None:
    encoder = encoder_with(HARMS["a text of 10 GB"][0])
    with pytest.raises(ModelError, match="end of turn: the chat template of 'the/tokenizer' .* 1024 MiB of memory"):
        end_of_turn_ids(encoder)


def test_a_template_that_refuses_or_fails_passes_the_trial() -> None:
    for template in ("{{ raise_exception('no') }}", "{% if %}", "{{ strftime_now('%Y') | tojson(indent=1) }}"):
        limits.try_template(template, '{"eos_token": "<eos>"}')


LOOP_FOR_ONE = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + TEMPLATES["chatml"]
"""Loops over words that only one row has, so that no trial sees it."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second of computing for a rendering in this process."""
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.1)
    monkeypatch.setattr(limits, "WATCH_SECONDS", 0.02)


@pytest.mark.usefixtures("short")
def test_a_rendering_that_never_ends_is_ended_here_with_its_row_and_template() -> None:
    encoder = encoder_with(LOOP_FOR_ONE)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"here: the chat template of 'the/tokenizer' could not be.* 0\.1 s of"):
            render_conversation(encoder, [{"role": "user", "content": "loop"}], origin="here")
        assert render_conversation(encoder, [ASK], origin="here").prompt, "the next rendering is not disturbed"


@pytest.mark.usefixtures("short")
def test_the_watchdog_ends_the_rendering_of_a_thread_that_is_late_and_no_other() -> None:
    encoder = encoder_with(LOOP_FOR_ONE)

    def rendered(content: str) -> bool:
        try:
            return bool(render_conversation(encoder, [{"role": "user", "content": content}], origin="here").prompt)
        except ModelError:
            return False

    with ThreadPoolExecutor(4) as threads:
        words = [str(number) for number in range(40)]
        assert list(threads.map(rendered, ["loop", *words, "loop"])) == [False, *[True] * 40, False]


def test_what_a_template_may_not_touch_is_its_refusal() -> None:
    with pytest.raises(DataError, match="refuses the messages .*unsafe"):
        parts("{{ ''.__class__.__mro__ }}", [ASK])


def test_a_tokenizer_without_a_template_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"here: messages need a chat template, and the tokenizer 'the/tokenizer'"):
        render_conversation(encoder_with(None), [ASK], [[REPLY]], origin="here")


def test_what_a_template_refuses_names_the_row_and_the_roles() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match=r"here: .*'the/tokenizer' refuses the messages \(roles: user, user\): roles must"
    ):
        parts(strict, [ASK, ASK])


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
    encoder = TextEncoder(tokenizer)
    rendered = render_conversation(encoder, conversation[:-1], [conversation[-1:]], origin="here")
    encoded = encoder.rendered([rendered])[0]
    prompt = tokenizer.apply_chat_template(conversation[:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(conversation, return_dict=False)
    assert list(encoded.prompt.ids) == prompt
    newline = tokenizer("\n")["input_ids"]
    assert [*encoded.prompt.ids, *encoded.responses[0].ids, *newline] == whole
    assert end_of_turn_ids(encoder) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


COUNTED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' (' + m['content'] + ')<eos>' }}{% endfor %}"
CALLING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') }}{% if m['tool_calls'] %}"
    "{{ '<|user|>' + m['tool_calls'] | tojson }}{% endif %}{{ '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize("answer", ["kvxqz", "kvxqzz kvxqz", "a", "(", ""])
def test_what_a_template_writes_twice_stands_once_as_it_is(answer: str) -> None:
    said = [{"role": "assistant", "content": answer}]
    opened = COUNTED + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    assert "".join(text for text, _ in parts(opened, [ASK], said)[1]) == answer


def test_an_unfinished_response_has_nothing_that_the_template_puts_behind_it() -> None:
    assert parts(TEMPLATES["trimming"], [ASK], [REPLY], finished=False)[1] == [(" two", True)]


def test_calls_of_tools_are_learned_with_their_turn_even_behind_special_tokens() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    written = [('<|user|>[{"name": "add"}]', True), ("<eos>", True)]
    assert parts(CALLING, [ASK], [call])[1] == written
    assert parts(CALLING, [ASK], [{**call, "content": "so"}])[1] == [("so" + written[0][0], True), written[1]]
    with pytest.raises(ModelError, match="here: .*'the/tokenizer' does not write the answer in one piece"):
        parts(CALLING.replace("'<|assistant|>'", "'<|assistant|>hm'"), [ASK], [call])


@pytest.mark.parametrize(
    ("last", "inner", "end"),
    [
        ("<a>", "<a><c>user", "<a>"),
        ("<a><eos>", "<a><eos><c>user", "<a><eos>"),
        ("<a><b>\n", "<a><b>\n<c>", "<a><b>"),
        ("<a><eos>", "<a><c>user", "<a>"),  # the EOS ends the conversation
        ("<a>\n<eos>", "<a>\n<c>user", "<a>"),
        ("<a>\n<eos>\n", "<a>\n<eos>\n<c>user", "<a>\n<eos>"),
        ("<a>\n<b>\n", "<a>\n<b>\n<c>user", "<a>"),
        ("<b>", "<a><c>user", "<b>"),
        ("<a><eos><b>", None, "<a><eos>"),
        (" <a>", None, "<a>"),
        (" (end)\n", "(end)\nuser", "(end)"),
        ("", None, ""),
    ],
)
def test_what_ends_a_turn(last: str, inner: str | None, end: str) -> None:
    assert end_of_turn(last, inner, ("<eos>", "<a>", "<b>", "<c>"), "<eos>") == end
