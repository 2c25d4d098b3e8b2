"""One law for every kind of tokenizer: a part of a text has the ids of its place, and reads as what it adds."""

import random
from itertools import product

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from builders import tiny_language_model
from proximo.data.codec import decode, end_of_prompt, response_text
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.formats.prompt_response import Exchange
from proximo.data.labelled import LabelledOptions, LabelledResponse, load_labelled_responses
from proximo.data.preferences import PairOptions, PreferencePair, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rendering import encode_exchanges, render_for
from proximo.data.rows import Row
from proximo.data.step_examples import StepExample, StepOptions, load_step_examples
from proximo.data.token_cache import MIN_TEXTS, TokenCache
from proximo.data.tokenise import Rendered, Segment, TextEncoder
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.ppo.roles.worker import answer_responses
from proximo.ppo.step_arguments import as_prompts, as_responses
from proximo.records import Prompt
from proximo.supervised.kto_trainer import label_sample
from proximo.supervised.pairs import pair_sample
from proximo.supervised.prm_trainer import solution_sample
from tokenizer_kinds import KINDS, legacy, metaspace, word_piece

PROMPTS = ["Once", "Once upon", "def a():\n", "a\U0001f642\U0001f642", "n\n\n", "a ", "  ", "\U0001f642 " * 9]
PARTS = [
    "a time",
    " a time",
    "  two",
    " ",
    "\n",
    "\n\n  \n",
    "    return x",
    "def a():\n    return 1\n\n",
    "\U0001f642",
    "\u00e9\U0001f642\n a",
    "na",
    "",
]


@pytest.fixture(params=[*KINDS, "gpt2", "qwen2.5", "tiny_bpe"])
def kind(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Each kind in turn, and the real ones where they are at hand."""
    if request.param in KINDS:
        return KINDS[request.param]()
    tokenizer = request.getfixturevalue("real_tokenizers")[request.param]
    if request.param == "tiny_bpe":
        tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    return tokenizer


def ids(tokenizer: PreTrainedTokenizerBase, prompt: str, part: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of prompt and response, without the EOS behind it."""
    encoder = TextEncoder(tokenizer)
    _, (encoded,) = encode_exchanges(encoder, [Exchange(origin="", prompt=prompt, responses=(part,))])
    *response, end = encoded.responses[0].ids
    assert end == tokenizer.eos_token_id
    return encoded.prompt.ids, tuple(response)


def can_write(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """A character that it does not have is lost, which the report of a load says."""
    return text in tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_what_is_learned_behind_a_prompt_reads_as_it_was_written(kind) -> None:
    for prompt, part in product(PROMPTS, PARTS):
        if can_write(kind, f"a{prompt}{part}"):
            prompt_ids, response_ids = ids(kind, prompt, part)
            assert response_text(kind, prompt_ids, response_ids) == part
            whole = decode(kind, (*prompt_ids, *response_ids))
            assert whole == decode(kind, prompt_ids) + part
            assert whole.lstrip(" ") == (prompt + part).lstrip(" "), "but for the space before a text"


def test_a_part_has_the_ids_of_its_place_in_the_whole(kind) -> None:
    """The oracle is the whole text's tokens, wherever none of them reaches across the boundary."""
    compared = 0
    for prompt, part in product(PROMPTS, PARTS):
        prompt_ids, response_ids = ids(kind, prompt, part)
        whole = tuple(kind(prompt + part)["input_ids"])
        if whole[: len(prompt_ids)] == prompt_ids:
            compared += 1
            assert whole == (*prompt_ids, *response_ids), (prompt, part)
    assert compared > 50


def test_behind_a_special_token_a_part_has_the_ids_of_its_place_in_the_whole() -> None:
    """A tokenizer may put its space there again, or not."""
    for (name, make), part in product(KINDS.items(), [part for part in PARTS if part]):
        tokenizer = make()
        for prompt in ("Once</s>", "<s>", "a\n<|assistant|>"):
            both = ids(tokenizer, prompt, part)
            assert (*both[0], *both[1]) == tuple(TextEncoder(tokenizer).start_ids if prompt != "<s>" else ()) + tuple(
                tokenizer(prompt + part, add_special_tokens=False)["input_ids"]
            ), (name, prompt, part)
        inside = ids(tokenizer, "Once", f" a</s>{part}")
        assert [*inside[0], *inside[1]] == tokenizer(f"Once a</s>{part}")["input_ids"]


@pytest.mark.parametrize("name", KINDS)
def test_white_space_that_a_mark_takes_in_is_taken_in_wherever_the_text_is_parted(name: str) -> None:
    """Phi-3's marks take in the line end behind them, and a space follows as behind the bare mark."""
    tokenizer = KINDS[name]()
    marks = [AddedToken("<|open|>", rstrip=True), AddedToken("<|fin|>", lstrip=True)]
    tokenizer.add_tokens(marks, special_tokens=True)
    encoder = TextEncoder(tokenizer)

    def joined(text: str) -> tuple[int, ...]:
        return (*encoder.start_ids, *tokenizer(text, add_special_tokens=False)["input_ids"])

    for part, gap in product([part for part in PARTS if part.strip()], ["", " ", "\n\n"]):
        for prompt in (f"Once<|open|>{gap}", f"a\n<|open|> {gap}", f"<|open|>{gap}"):
            both = ids(tokenizer, prompt, f"{part}{gap}<|fin|>{gap} a")
            assert (*both[0], *both[1]) == joined(f"{prompt}{part}{gap}<|fin|>{gap} a"), (prompt, part)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ '<|open|>' + m.role + '<|open|>GAP' + m.content + 'GAP<|fin|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|open|>assistant<|open|>GAP' }}{% endif %}"
        ).replace("GAP", gap.replace("\n", "\\n"))
        asked, answer = ({"role": "user", "content": "a"},), ({"role": "assistant", "content": part},)
        rendered, (encoded,) = encode_exchanges(encoder, [Exchange(origin="", prompt=asked, responses=(answer,))])
        text = f"<|open|>user<|open|>{gap}a{gap}<|fin|><|open|>assistant<|open|>{gap}{part}{gap}<|fin|>"
        assert encoded.prompt.ids + encoded.responses[0].ids == joined(text)[len(encoder.start_ids) :], (gap, part)
        assert encoder.count_merges(rendered, [encoded]) == (0, 1)
    pieces = tuple(Segment(text=text, written=False) for text in ("Once<|open|>", "\n", " ", "a time"))
    (encoded,) = encoder.rendered([Rendered(prompt=pieces)])
    assert (*encoder.start_ids, *encoded.prompt.ids) == joined("Once<|open|>\n a time")


def test_a_text_without_a_prompt_begins_the_whole(kind) -> None:
    for part in PARTS:
        prompt_ids, response_ids = ids(kind, "", part)
        begun = kind(part, add_special_tokens=False)["input_ids"]
        assert [*prompt_ids, *response_ids] == [*TextEncoder(kind).start_ids, *begun]


def test_a_response_reads_as_what_it_adds_to_its_prompt(kind) -> None:
    """Whatever was sampled: with a short end of the prompt the same as with all of it."""
    draw, compared = random.Random(0), 0
    for prompt in [*PROMPTS, "", "Once upon\n" * 9] * 4:
        prompt_ids = tuple(kind(prompt)["input_ids"])
        sampled = [draw.randrange(len(kind)) for _ in range(draw.randrange(1, 9))]
        before, after = (kind.decode(list(each), skip_special_tokens=True, clean_up_tokenization_spaces=False)
                         for each in (prompt_ids, (*prompt_ids, *sampled)))  # fmt: skip
        if after.startswith(before):
            compared += 1
            assert response_text(kind, prompt_ids, sampled) == after.removeprefix(before)
        else:  # bytes that are no character spoil one of single bytes before them
            assert response_text(kind, prompt_ids, sampled) == decode(kind, sampled)
    assert compared > 20


def test_the_end_of_a_prompt_is_short() -> None:
    for make in KINDS.values():
        tokenizer = make()
        for prompt in ("Once upon a time\n" * 50, "\u20ac" * 300, "a" + "\U0001f642" * 300):
            assert len(end_of_prompt(tokenizer, tokenizer(prompt)["input_ids"])) < 8
        assert end_of_prompt(tokenizer, (1, *[3] * 40)) == (1, *[3] * 40), "it has no text"
        assert end_of_prompt(tokenizer, ()) == ()


@pytest.mark.parametrize("make", [legacy, lambda: metaspace("first"), lambda: metaspace("always")])
def test_every_stage_learns_the_same_tokens_behind_a_prompt(make) -> None:
    tokenizer = make()
    asked, answer = {"prompt": "Once upon"}, " a time"

    def rows(**values) -> list[Row]:
        return [Row(source="made", name="made", number=1, values=asked | values)]

    ((prompt,), _) = load_prompts(rows(), tokenizer, PromptOptions())
    learned = load_text_examples(rows(response=answer), tokenizer, ExampleOptions())[0][0]
    pair = load_preference_pairs(rows(chosen=answer, rejected=" a"), tokenizer, PairOptions())[0][0]
    labelled = load_labelled_responses(rows(response=answer, label=True), tokenizer, LabelledOptions(max_tokens=99))
    read = render_for(TextEncoder(tokenizer), prompt, answer)
    assert read == (pair.prompt_token_ids, pair.chosen_token_ids)
    assert learned.token_ids == (*prompt.token_ids, *read[1])
    assert labelled[0][0].response_token_ids == read[1]
    steps = load_step_examples(rows(steps=["a time", "a"], labels=[True, True]), tokenizer, StepOptions())[0][0]
    assert tokenizer.decode(steps.token_ids, skip_special_tokens=True) == "Once upona time\na\n"
    assert tokenizer.decode(learned.token_ids, skip_special_tokens=True) == "Once upon a time"


def test_what_shows_a_response_shows_what_it_adds_to_its_prompt() -> None:
    tokenizer = legacy()
    asked, answered = ids(tokenizer, "def a():\n", "    return x")
    pair = PreferencePair(id="p", prompt_token_ids=asked, chosen_token_ids=answered, rejected_token_ids=answered[:1])
    shown = pair_sample(tokenizer, pair, (1.0, 0.0))
    assert (shown["prompt"], shown["chosen"], shown["rejected"]) == ("def a():\n", "    return x", "    ")
    labelled = LabelledResponse(id="p", prompt_token_ids=asked, response_token_ids=answered, desirable=True)
    assert label_sample(tokenizer, labelled, 1.0)["response"] == "    return x"
    steps = StepExample(id="p", token_ids=(*asked, *answered), ends=(), labels=(), num_prompt_tokens=len(asked))
    assert solution_sample(tokenizer, steps, [0.0])["response"] == "    return x"


def test_what_a_library_is_given_reads_as_what_it_adds_to_its_prompt() -> None:
    tokenizer = legacy()
    policy = LanguageModel(tiny_language_model(vocab_size=len(tokenizer)))
    asked, answered = ids(tokenizer, "Once upon", " a time")
    prompts = as_prompts(tokenizer, [asked, "Once upon"])
    assert [prompt.text for prompt in prompts] == ["<s>Once upon", "Once upon"]
    found = as_responses(tokenizer, prompts, [answered, answered], policy=policy, policy_version=0)
    assert [response.text for response in found] == [" a time"] * 2
    known = [
        Prompt(id="p", token_ids=asked, answer=" a time"),
        Prompt(id="p", token_ids=asked, text="Once upon", answer=" a time"),
    ]
    for response in answer_responses(known, tokenizer):
        assert response.token_ids == (*answered, tokenizer.eos_token_id)


def test_the_report_of_a_load_counts_a_boundary_that_merges_and_no_other() -> None:
    for make in KINDS.values():
        for response, merges in ((" a time", 0), ("na time", 0), ("a time", 1)):
            row = Row(source="made", number=1, values={"prompt": "Once upon", "response": response})
            _, report = load_text_examples([row], make(), ExampleOptions())
            assert report.num_merged_boundaries == merges, response  # "upon" and "a" have the token "na" in them


def test_a_character_that_is_lost_is_named_although_a_space_is_put_before_it() -> None:
    tokenizer = metaspace("always")
    tokenizer.backend_tokenizer.model.byte_fallback = False
    _, report = load_prompts([Row(source="made", number=1, values={"prompt": "a\u20ac"})], tokenizer, PromptOptions())
    assert report.unwritable == {"\u20ac": 1}


def test_a_tokenizer_that_keeps_no_white_space_is_refused_where_a_response_is_learned() -> None:
    tokenizer = word_piece()
    ids_of_prompt = load_prompts(
        [Row(source="made", number=1, values={"prompt": "once a"})], tokenizer, PromptOptions()
    )
    assert tokenizer.decode(ids_of_prompt[0][0].token_ids, skip_special_tokens=True) == "once a"
    with pytest.raises(ModelError, match=r"'the/tokenizer' cannot write one text after another: 'a' and then 'b' read"):
        ids(tokenizer, "once", " a")
    with pytest.raises(ModelError, match="for example byte-level BPE or sentencepiece"):
        render_for(TextEncoder(tokenizer), Prompt(id="p", token_ids=(), text="once"), "a")


def test_parts_and_whole_texts_are_kept_apart_on_disk(tmp_path) -> None:
    tokenizer = legacy()
    texts = [f"a{number}" for number in range(MIN_TEXTS)]
    for _ in range(2):
        encoder = TextEncoder(tokenizer, TokenCache(tmp_path))
        within = encoder.placed([(text, None) for text in texts])
        assert encoder.texts(texts) != within == TextEncoder(tokenizer).placed([(text, None) for text in texts])
    assert len(list(tmp_path.iterdir())) == 2
