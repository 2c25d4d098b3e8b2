"""Token ids from disk are those of the tokenizer, whatever has changed, and whatever became of the file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from builders import CHARACTERS, tiny_tokenizer
from proximo.data.examples import ExampleOptions, load_text_examples
from proximo.data.load_report import LoadReport
from proximo.data.preferences import PairOptions, load_preference_pairs
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.rows import Row
from proximo.data.token_cache import MIN_TEXTS, TokenCache
from proximo.data.tokenise import TextEncoder
from proximo.supervised.sft_recipe import SFTRecipe
from proximo.supervised.sft_trainer import build_task
from tiny_runs import changed, make_inputs, recipe_of


def word(number: int) -> str:
    return "".join(CHARACTERS[int(digit)] for digit in str(number))


def rows(change: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda _, values: values) -> list[Row]:
    """Longer than the cache's smallest list; prompts differ, so that ids cannot be those of other rows."""
    values = [
        {"prompt": word(n), "response": word(3 * n), "chosen": word(n), "rejected": word(2 * n)} for n in range(300)
    ]
    return [Row(source="made", number=n, values=change(n, each), name="made") for n, each in enumerate(values, start=1)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of the tokenizer was given."""
    seen: list[int] = []
    really = TextEncoder._call
    monkeypatch.setattr(TextEncoder, "_call", lambda self, texts: (seen.append(len(texts)), really(self, texts))[1])
    return seen


LOADS: Mapping[str, Callable[..., tuple[list[Any], LoadReport]]] = {
    "prompts": lambda tokenizer, cache: load_prompts(
        rows(), tokenizer, PromptOptions(max_tokens=9, too_long="truncate"), cache=cache
    ),
    "texts": lambda tokenizer, cache: load_text_examples(rows(), tokenizer, ExampleOptions(max_tokens=6), cache=cache),
    "pairs": lambda tokenizer, cache: load_preference_pairs(
        rows(), tokenizer, PairOptions(as_messages=True, max_tokens=14), cache=cache
    ),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_the_second_load_has_the_same_records_and_report_and_asks_the_tokenizer_for_a_sample(
    load: Callable, tmp_path: Path, calls: list[int]
) -> None:
    tokenizer = tiny_tokenizer()
    plain = load(tokenizer, None)
    first = load(tokenizer, TokenCache(tmp_path))
    calls.clear()
    again = TokenCache(tmp_path)
    assert plain == first == load(tokenizer, again)
    assert max(calls) < 60
    assert "read from" in again.notes[0]


def loaded(cache: TokenCache | None, tokenizer: PreTrainedTokenizerBase, rows: list[Row], **options: Any) -> Any:
    how = PromptOptions(**({"as_messages": True} | options))
    return load_prompts(rows, tokenizer, how, cache=cache)


def other_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens(["aa", "ab"])


def other_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", "!<eos>")


def other_normaliser(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("b", "c")


CHANGES: dict[str, Callable[[], tuple[PreTrainedTokenizerBase, list[Row], dict[str, Any]]]] = {
    "a row": lambda: (tiny_tokenizer(), rows(lambda n, v: v | {"prompt": "z"} if n == 200 else v), {}),
    "the order of rows": lambda: (tiny_tokenizer(), rows()[::-1], {}),
    "a row less": lambda: (tiny_tokenizer(), rows()[:-1], {}),
    "the system message": lambda: (tiny_tokenizer(), rows(), {"system": "abc"}),
    "text in the place of messages": lambda: (tiny_tokenizer(), rows(), {"as_messages": False}),
    "the limit": lambda: (tiny_tokenizer(), rows(), {"max_tokens": 4}),
    **{
        change.__name__.replace("_", " "): lambda change=change: ((t := tiny_tokenizer()), change(t), (t, rows(), {}))[
            2
        ]
        for change in (other_vocabulary, other_template, other_normaliser)
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stale_comes_out_when_something_has_changed(change: str, tmp_path: Path) -> None:
    before = loaded(TokenCache(tmp_path), tiny_tokenizer(), rows())
    tokenizer, changed_rows, options = CHANGES[change]()
    wanted = loaded(None, tokenizer, changed_rows, **options)
    assert wanted != before
    for _ in range(2):
        assert loaded(TokenCache(tmp_path), tokenizer, changed_rows, **options) == wanted


def test_other_versions_have_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(TokenCache(tmp_path), tiny_tokenizer(), rows())
    monkeypatch.setattr("proximo.data.token_cache.version", lambda name: f"another {name}")
    loaded(TokenCache(tmp_path), tiny_tokenizer(), rows())
    assert len(list(tmp_path.iterdir())) == 2


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_a_damaged_file_is_made_anew_with_a_note(tmp_path: Path) -> None:
    wanted = loaded(TokenCache(tmp_path), tiny_tokenizer(), rows())
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    places = (len(whole) // 4, len(whole) // 3, len(whole) - 5)
    damaged = [whole[: len(whole) // 2], b"", b"\x80\x04K\x01." * 99, *(flipped(whole, place) for place in places)]
    for content in damaged:
        file.write_bytes(content)
        cache = TokenCache(tmp_path)
        assert loaded(cache, tiny_tokenizer(), rows()) == wanted
        assert f"{file} is unusable and is written again" in cache.notes[0]
        assert file.read_bytes() == whole


def test_ids_of_something_that_the_key_does_not_see_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(TokenCache(tmp_path), tiny_tokenizer(), rows())
    really = TextEncoder._call
    monkeypatch.setattr(TextEncoder, "_call", lambda self, texts: [[*ids, 5] for ids in really(self, texts)])
    cache = TokenCache(tmp_path)
    assert loaded(cache, tiny_tokenizer(), rows()) == loaded(None, tiny_tokenizer(), rows())
    assert "its ids differ from the tokenizer's" in cache.notes[0]


@pytest.mark.parametrize("kind", ["a file in its place", "a folder that is full"])
def test_a_folder_that_cannot_be_used_costs_a_note(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    if kind == "a file in its place":
        folder.write_text("")
    else:
        monkeypatch.setattr(
            parquet, "write_table", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
    cache = TokenCache(folder)
    assert loaded(cache, tiny_tokenizer(), rows()) == loaded(None, tiny_tokenizer(), rows())
    assert "not saved" in cache.notes[0]
    assert folder.is_file() or not list(folder.iterdir())


def test_a_write_that_is_cut_off_leaves_no_file_that_could_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "write_table", lambda table, path, **_: (path.write_bytes(b"PAR1"), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            loaded(TokenCache(tmp_path), tiny_tokenizer(), rows())
    assert not list(tmp_path.iterdir())


WRITER = """
import sys
from pathlib import Path
from proximo.data.token_cache import TokenCache

class Fixed:
    split_special_tokens = False
    class backend_tokenizer:
        to_str = staticmethod(lambda: "fixed")

texts = [f"text {n}" for n in range(4000)]
wanted = [[n, n + 1] * (n % 7) for n in range(4000)]
look = dict(zip(texts, wanted))
for turn in range(20):
    cache = TokenCache(Path(sys.argv[1]))
    assert cache.ids(Fixed(), texts, lambda given: [look[text] for text in given], within=False) == wanted
    assert not any("unusable" in note or "not saved" in note for note in cache.notes), cache.notes
    if turn % 3 == int(sys.argv[2]):
        for file in Path(sys.argv[1]).glob("*.parquet"):
            file.unlink(missing_ok=True)
"""


def test_two_processes_that_write_and_remove_the_same_file_see_it_whole_or_not_at_all(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(n)], env=os.environ) for n in (0, 1)]
    assert [writer.wait(60) for writer in writers] == [0, 0]


def test_a_run_keeps_its_ids_where_it_is_told_to(tmp_path: Path) -> None:
    place = make_inputs(tmp_path)
    lines = [json.dumps({"prompt": word(n), "response": word(n + 7)}) for n in range(MIN_TEXTS + 10)]
    (place / "texts.jsonl").write_text("\n".join(lines))
    recipe = changed(recipe_of("sft", place), {"run.token_cache": str(place / "ids")})
    tasks = [build_task(SFTRecipe.model_validate(recipe)) for _ in range(2)]
    assert tasks[0].examples == tasks[1].examples
    assert any("read from" in note for note in tasks[1].notes)
    assert not any("read from" in note for note in tasks[0].notes)
