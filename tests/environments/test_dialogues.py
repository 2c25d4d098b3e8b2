"""What a policy reads next: cuts, ends of turns, thoughts, tools, templates that refuse, texts without a template."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from chat_families import CHATML, FAMILIES, Family
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.environments.dialogue import Dialogue
from proximo.environments.turn_renderer import TurnRenderer
from proximo.errors import ConfigError, DataError, ModelError
from proximo.records import Finish
from tokenizer_kinds import KINDS
from tool_templates import TOOL_FAMILIES
from turn_templates import QWEN_3, TURN_FAMILIES

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CHAT = FAMILIES["chatml"]
ASK = {"role": "user", "content": "Go."}


class Talk:
    """A dialogue whose policy says texts."""

    def __init__(
        self,
        family: Family | None,
        observation: Any = "Go.",
        *,
        tools: Any = None,
        texts: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """`texts`: whose frequent pieces are tokens, beside all bytes."""
        self.tokenizer = (family or CHAT).tokenizer(*texts)
        self.tokenizer.chat_template = family and family.template
        self.renderer = TurnRenderer(self.tokenizer, **options)
        self.dialogue = Dialogue(self.renderer, observation, tools=tools)
        self.goes_on: list[bool] = []
        """Whether the ids after each turn begin with those before."""

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def say(
        self, text: str, observation: Any = "So?", *, finish: Finish = Finish.EOS, ids: Sequence[int] = ()
    ) -> "Talk":
        said = list(ids) or self.ids(text)
        before = (*self.dialogue.prompt_ids, *said)
        self.dialogue.answered(said, finish, observation)
        self.goes_on.append(self.dialogue.prompt_ids[: len(before)] == before)
        return self

    @property
    def text(self) -> str:
        return self.tokenizer.decode(list(self.dialogue.prompt_ids))

    @property
    def new(self) -> str:
        """The text behind the last words of the policy, which are `§` and perhaps an end."""
        return self.text.rpartition("§")[2]


# The end of a turn


NEXT = "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"


def test_the_end_that_a_policy_did_not_write_is_context() -> None:
    for finish in (Finish.LENGTH, Finish.STOP):
        assert Talk(CHAT).say("§", finish=finish).new == "<|im_end|>" + NEXT
    for finish in (Finish.EOS, Finish.STOP, Finish.LENGTH):
        assert Talk(CHAT).say("§<|im_end|>", finish=finish).new == "<|im_end|>" + NEXT


def test_of_an_end_of_several_tokens_the_missing_ones_are_added() -> None:
    family = FAMILIES["command a"]
    ends = "<|END_RESPONSE|><|END_OF_TURN|>"
    for written, finish in (("", Finish.LENGTH), ("<|END_RESPONSE|>", Finish.LENGTH), (ends, Finish.EOS)):
        talk = Talk(family).say(f"<|START_RESPONSE|>§{written}", finish=finish)
        assert talk.new.startswith(f"{ends}<|START_OF_TURN|><|USER|>So?")
        assert talk.goes_on == [True]


def test_another_end_of_sequence_stands_for_the_end_of_the_turn() -> None:
    """As Llama 3's <|eom_id|>, which ends a call."""
    family = TOOL_FAMILIES["llama 3.1"]
    assert Talk(family).say("§<|end_of_text|>").new.startswith("<|end_of_text|><|start_header_id|>user")


def test_an_end_in_plain_words_is_written_or_added() -> None:
    family = FAMILIES["chatml in plain text"]
    assert Talk(family).say("§<|im_end|></s>").new == "<|im_end|></s>" + NEXT
    assert Talk(family).say("§", finish=Finish.LENGTH).new == "<|im_end|>" + NEXT
    assert Talk(family).say("§</s>").new == "</s><|im_end|>" + NEXT
    talk = Talk(family)
    assert talk.dialogue.turn_text(talk.ids("§<|im_end|></s>"), Finish.EOS) == "§"
    assert Talk(FAMILIES["plain, no end"]).say(" §</s>").new == "</s>\n\nHuman: So?\n\nAssistant:"


def test_in_glm_the_first_token_of_the_next_turn_ends_a_turn() -> None:
    family = TURN_FAMILIES["glm"]
    said = "\n<think>hm</think>\n§"
    results = [{"role": "tool", "content": "4"}]
    assert Talk(family).say(said + "<|observation|>", results).new == (
        "<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>"
    )
    assert Talk(family).say("\n<think></think>\n§<|user|>").new == "<|user|>\nSo?<|assistant|>"
    assert Talk(family).say("\n<think></think>\n§<|endoftext|>").new == "<|endoftext|><|user|>\nSo?<|assistant|>"


def test_a_cut_inside_a_character_is_kept_as_it_is() -> None:
    talk = Talk(CHAT)
    half = talk.ids("é")[:1]
    talk.say("", ids=half, finish=Finish.LENGTH)
    assert talk.goes_on == [True]
    assert talk.text.endswith("assistant\n\ufffd<|im_end|>" + NEXT)


def test_an_end_that_the_template_writes_after_the_last_turn_alone_is_kept_as_it_was_written() -> None:
    """The end of the user's turn is not taken for it, nor is another mark in its place."""
    last = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if loop.last or m.role == 'user' %}"
    opened = "{{ '<eot>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    family = Family(template=last + opened, marks=("<|user|>", "<|assistant|>"), eos="<eot>")
    assert Talk(family).say("§<eot>").new == "<eot><|user|>So?<eot><|assistant|>"
    assert Talk(family).say("§", finish=Finish.LENGTH).new == "<|user|>So?<eot><|assistant|>"
    said = "<|channel|>final<|message|>§<|return|>"
    assert Talk(FAMILIES["gpt-oss"]).say(said).new.startswith("<|return|><|end|><|start|>user<|message|>So?")


# Thoughts


THINK = TURN_FAMILIES["qwen 3"]


def test_thoughts_stay_while_tools_answer_and_go_with_the_next_turn_of_the_user() -> None:
    talk = Talk(THINK, tools=[TOOL])
    result = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    talk.say("<think>\na\n</think>\n\none<|im_end|>", result).say("<think>\nb\n</think>\n\ntwo<|im_end|>", result)
    assert "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>" in talk.text
    assert talk.goes_on == [True, True]
    talk.say("<think>\nc\n</think>\n\n§<|im_end|>")
    assert talk.goes_on == [True, True, False]
    assert "think" not in talk.text
    for said in ("one", "two", "§"):
        assert f"<|im_start|>assistant\n{said}<|im_end|>" in talk.text


def test_a_thought_that_was_cut_is_ended_or_left_out() -> None:
    cut = "<think>\nz§"
    kept = Talk(THINK).say(cut, [{"role": "tool", "content": "4"}], finish=Finish.LENGTH)
    assert (kept.goes_on, kept.new[:21]) == ([True], "\n</think>\n\n<|im_end|>")
    left_out = Talk(THINK).say(cut, finish=Finish.LENGTH)
    assert left_out.goes_on == [False]
    assert left_out.text.endswith("Go.<|im_end|>\n<|im_start|>assistant\n<|im_end|>" + NEXT)


def test_an_environment_is_given_no_thoughts_of_a_model_whose_template_knows_them() -> None:
    said = {
        "<think>\nhm\n</think>\n\nyes": "yes",
        "<think>\nhm": "",
        "no thought": "no thought",
        "a</think>b</think>c": "c",
    }
    for name, opened in (("qwen 3", {}), ("deepseek, thinking", {"no thought": ""})):
        talk = Talk(TURN_FAMILIES[name])
        for text, given in (said | opened).items():
            assert talk.dialogue.turn_text(talk.ids(text), Finish.EOS) == given
    talk = Talk(CHAT)
    for text in said:
        assert talk.dialogue.turn_text(talk.ids(f"{text}<|im_end|>"), Finish.EOS) == text


def test_a_prompt_that_opens_a_thought_is_forked_by_a_template_that_leaves_thoughts_out() -> None:
    family = FAMILIES["deepseek, thinking"]
    talk = Talk(family).say("hm</think>\n\n§<|finish|>")
    assert talk.text == "<|begin|><|User|>Go.<|Assistant|>\n\n§<|finish|><|User|>So?<|Assistant|><think>\n"
    talk.say("</think>\n\ny<|finish|>").say("never ends", finish=Finish.LENGTH)
    assert talk.goes_on == [False] * 3
    assert talk.text.count("<think>") == 1


def test_a_prompt_with_an_empty_thought_is_forked_after_each_turn() -> None:
    """Qwen 3 without thinking: the template leaves the empty thought out of earlier turns."""
    talk = Talk(THINK, variables={"enable_thinking": False})
    assert talk.text.endswith("assistant\n<think>\n\n</think>\n\n")
    talk.say("§<|im_end|>").say("y<|im_end|>")
    assert talk.goes_on == [False, False]
    asked = [ASK, {"role": "assistant", "content": "§"}, {"role": "user", "content": "So?"}]
    messages = [*asked, {"role": "assistant", "content": "y"}, asked[2]]
    assert talk.text == talk.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


def test_a_template_that_writes_an_empty_thought_forks_where_the_policy_wrote_none() -> None:
    family = TURN_FAMILIES["glm"]
    assert Talk(family).say("\n§<|user|>").goes_on == [False]
    assert Talk(family).say("\n<think></think>\n§<|user|>").goes_on == [True]


def test_where_an_answer_begins_inside_a_token_the_rest_of_it_is_written_as_text() -> None:
    family = Family(template=QWEN_3, marks=("<|im_start|>",), eos="<|im_end|>")
    talk = Talk(family, texts=["a><answer>"] * 99)
    straddling = talk.tokenizer.convert_tokens_to_ids("><")
    answer = talk.ids("answer>§<|im_end|>")
    talk.say("", ids=[*talk.ids("<think>\nhm\n</think"), straddling, *answer])
    assert talk.goes_on == [False]
    assert talk.text.endswith("<|im_start|>assistant\n<answer>§<|im_end|>" + NEXT)
    assert list(talk.dialogue.prompt_ids)[-len(answer) - len(talk.ids(NEXT)) : -len(talk.ids(NEXT))] == answer


def test_a_character_that_begins_inside_that_token_is_written_whole() -> None:
    family = Family(template=QWEN_3.replace("lstrip('\n')", "strip()"), marks=("<|im_start|>",), eos="<|im_end|>")
    talk = Talk(family, texts=[" é è ê ë à ù"] * 99)
    straddling, rest = talk.tokenizer.convert_tokens_to_ids(["\u0120\u00c3", "\u00a9"])
    assert talk.tokenizer.decode([straddling, rest]) == " é"
    talk.say("", ids=[*talk.ids("<think>hm</think>"), straddling, rest, *talk.ids("!<|im_end|>")])
    assert talk.text.endswith("<|im_start|>assistant\né!<|im_end|>" + NEXT)


# Tools


def test_results_need_calls_in_templates_that_count_turns() -> None:
    talk = Talk(TURN_FAMILIES["mistral"], tools=[TOOL])
    results = [{"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "4"}]
    talk.say('[TOOL_CALLS] [{"name": "add", "arguments": {}}]</s>', results)
    talk.say('[TOOL_CALLS] [{"na', results, finish=Finish.LENGTH)
    assert talk.goes_on == [True, True]
    assert talk.text.endswith(
        '[TOOL_CALLS] [{"na</s>[TOOL_RESULTS] {"content": "4", "call_id": "call00000"}[/TOOL_RESULTS]'
    )
    talk.say(" §</s>")
    assert talk.goes_on == [True, True, False]  # the tools stand before the last turn of the user
    assert talk.text.count("[AVAILABLE_TOOLS]") == 1


def test_a_template_that_knows_no_tools_gets_them_and_their_results_as_text() -> None:
    talk = Talk(FAMILIES["gemma"], tools=[TOOL])
    assert '"name": "add"' in talk.text.partition("Go.")[0]
    assert "<tool_call>" in talk.text.partition("Go.")[0]
    talk.say("§<end_of_turn>", [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}])
    both = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert talk.new == f"<end_of_turn>\n<start_of_turn>user\n{both}<end_of_turn>\n<start_of_turn>model\n"
    assert talk.goes_on == [True]


def test_special_tokens_of_a_call_are_given_to_the_environment_and_others_are_not() -> None:
    talk = Talk(TURN_FAMILIES["mistral"])
    said = talk.ids("[TOOL_CALLS][INST]hm</s>")
    assert talk.dialogue.turn_text(said, Finish.EOS) == "[TOOL_CALLS]hm"


# What a template refuses, and what it says by itself


def test_a_refusal_says_what_to_do() -> None:
    for observation in ([ASK, ASK], [{"role": "system", "content": "Be kind."}, ASK]):
        with pytest.raises(DataError, match="environment: the chat template of 'family' refuses.*join messages of one"):
            Talk(FAMILIES["gemma"], observation)
    with pytest.raises(DataError, match="roles must take turns.*join messages of one role"):
        Talk(FAMILIES["gemma"]).say("§<end_of_turn>", [ASK, ASK])
    with pytest.raises(ModelError, match="messages need a chat template, and the tokenizer .* has none"):
        Talk(None, [ASK])
    with pytest.raises(ModelError, match="has none; give one as tokenizer.chat_template"):
        Talk(None, tools=[TOOL])
    with pytest.raises(DataError, match="the first observation is empty"):
        Talk(None, "")
    with pytest.raises(ConfigError, match="max_observation_tokens must be at least 1, got 0"):
        Talk(CHAT, max_observation_tokens=0)


def test_a_template_of_one_turn_is_refused_before_an_episode() -> None:
    once = CHATML.replace("{% for m", "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{% for m")
    with pytest.raises(ModelError, match="takes no turn of the user after one of the assistant"):
        Talk(Family(template=once, marks=CHAT.marks, eos=CHAT.eos))


def test_a_template_that_writes_a_turn_twice_is_refused() -> None:
    twice = CHATML.replace("m.content", "m.content + m.content")
    with pytest.raises(ModelError, match="writes a turn of the assistant more than once"):
        Talk(Family(template=twice, marks=CHAT.marks, eos=CHAT.eos)).say("§<|im_end|>")


def test_a_turn_that_the_template_leaves_out_is_left_out() -> None:
    last = CHATML.replace("in messages", "in messages[-1:]")
    talk = Talk(Family(template=last, marks=CHAT.marks, eos=CHAT.eos)).say("§<|im_end|>")
    assert talk.goes_on == [False]
    assert talk.text == NEXT.lstrip()


def test_a_dialogue_keeps_the_date_of_its_beginning() -> None:
    dated = "{{ strftime_now('%d %b %Y') + '\n' }}" + CHATML
    talk = Talk(Family(template=dated, marks=CHAT.marks, eos=CHAT.eos), now=datetime(2026, 11, 26, 23, 59))
    assert talk.text.startswith("26 Nov 2026\n")
    assert talk.say("§<|im_end|>").goes_on == [True]


def test_words_of_an_environment_are_no_placeholders() -> None:
    talk = Talk(CHAT, "kvxqz0a").say("§<|im_end|>", "kvxqz1a kvxqzz0a").say("§<|im_end|>", "kvxqz0a")
    assert talk.goes_on == [True, True]
    assert talk.text.count("kvxqz0a") == 2


def test_half_of_a_surrogate_pair_is_replaced() -> None:
    assert Talk(CHAT).say("§<|im_end|>", "a\ud800b").new.startswith("<|im_end|>\n<|im_start|>user\na\ufffdb<|im_end|>")


def test_the_first_prompt_has_the_ids_of_data_with_the_same_messages() -> None:
    messages = [{"role": "system", "content": "Be kind."}, ASK, {"role": "assistant", "content": "\n\nYes."}, ASK]
    for family in (CHAT, THINK, TURN_FAMILIES["llama 3"]):
        talk = Talk(family, messages, texts=["assistant\n\n\nYes."] * 99)
        (prompt,), _ = load_prompts(
            [Row(source="a", number=1, values={"messages": messages})], talk.tokenizer, PromptOptions()
        )
        assert talk.dialogue.prompt_ids == prompt.token_ids


# A whole conversation


def test_a_compacted_history_keeps_the_turns_that_it_names() -> None:
    talk = Talk(CHAT).say("one<|im_end|>", "b").say("two<|im_end|>", "c")
    said = talk.ids("§<|im_end|>")
    number = talk.dialogue.wrote(said, Finish.EOS)
    summary = {"role": "user", "content": "Before: one, two."}
    talk.dialogue.ask([summary, number, ASK])
    assert talk.text == (
        "<|im_start|>user\nBefore: one, two.<|im_end|>\n<|im_start|>assistant\n§<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    )
    before = talk.dialogue.prompt_ids
    talk.dialogue.ask([summary, number, ASK, talk.dialogue.wrote(said, Finish.EOS), ASK])
    assert talk.dialogue.prompt_ids[: len(before) + len(said)] == (*before, *said)


# Without a chat template


@pytest.mark.parametrize("kind", KINDS)
def test_plain_texts_follow_each_other(kind: str) -> None:
    tokenizer = KINDS[kind]()
    dialogue = Dialogue(TurnRenderer(tokenizer), "Once upon a time")
    (prompt,), _ = load_prompts(
        [Row(source="a", number=1, values={"prompt": "Once upon a time"})], tokenizer, PromptOptions()
    )
    assert dialogue.prompt_ids == prompt.token_ids
    said = [tokenizer.convert_tokens_to_ids(piece) for piece in ("a", "na")]
    for observation in (" a  time", "\nno:"):
        before = dialogue.prompt_ids
        assert dialogue.turn_text(said, Finish.LENGTH) == "ana"
        dialogue.answered(said, Finish.LENGTH, observation)
        assert dialogue.prompt_ids[: len(before) + 2] == (*before, *said)
    assert tokenizer.decode(list(dialogue.prompt_ids), skip_special_tokens=True).strip() == (
        "Once upon a timeana a  timeana\nno:"
    )


# Long observations


def test_a_long_answer_loses_its_middle_and_is_counted() -> None:
    talk = Talk(CHAT, "long " * 99, max_observation_tokens=10)
    assert "long " * 99 in talk.text
    talk.say("§<|im_end|>", "0123456789")
    assert talk.dialogue.num_cut_observations == 0
    talk.say("§<|im_end|>", "0123456789abcdefghij")
    assert talk.dialogue.num_cut_observations == 1
    assert "user\n01234\n[... 10 characters left out ...]\nfghij<|im_end|>" in talk.text
    talk.say("§<|im_end|>", [{"role": "tool", "content": text} for text in ("0123456", "ab", "z" * 10**6)])
    assert talk.dialogue.num_cut_observations == 3
    for kept in ("01\n[... 4 characters left out ...]\n6", "ab", "zz\n[... 999997 characters left out ...]\nz"):
        assert f"tool\n{kept}<|im_end|>" in talk.text


def test_a_cut_leaves_no_part_of_a_character() -> None:
    talk = Talk(CHAT, max_observation_tokens=3).say("§<|im_end|>", "éaé")
    assert "user\né\n[... 1 characters left out ...]\né" not in talk.text
    assert "\ufffd" not in talk.text
    talk = Talk(CHAT, max_observation_tokens=1).say("§<|im_end|>", "éaé")
    assert "user\n\n[... 3 characters left out ...]\n<|im_end|>" in talk.text
