"""The pages docs/coming-from: no option of the other system is missing, and what stands beside each exists here."""

import inspect
import pydoc
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import CODE, COMING_FROM, FENCE, blocks, links
from pydantic import TypeAdapter, ValidationError
from test_docs import METRIC, SETTING, fields_at
from test_parity_page import PLANNED
from test_parity_page import ROWS as PARITY
from their_options import SECTIONS

import proximo
from proximo import api
from proximo.cli import main
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.schema.fields import has_kinds
from proximo.config.shipped import shipped_recipes
from proximo.metrics.catalogue import catalogue
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.dpo_recipe import DPORecipe
from proximo.supervised.kto_recipe import KTORecipe
from proximo.supervised.prm_recipe import PRMRecipe
from proximo.supervised.reward_recipe import RewardRecipe
from proximo.supervised.sft_recipe import SFTRecipe

SYSTEMS = sorted(COMING_FROM.glob("[!R]*.md"))
LISTS = {page.stem: page for page in (*SYSTEMS, COMING_FROM.parent / "grpo-trainer.md")}
"""The pages that list the options of another system."""
KINDS = (SFTRecipe, RewardRecipe, PRMRecipe, DPORecipe, KTORecipe, PPORecipe, PipelineRecipe)
PRESETS = {recipe.name for recipe in shipped_recipes() if "docs/coming-from/" in recipe.text}
SAID_BY_MODELS = {"policy", "value"}
"""Sections of a recipe that stand for a whole role."""
OUR_WORDS = {
    "metrics.jsonl",
    "samples.jsonl",
    "kind",
    "answer",
    "token_rewards",
    '"@sft"',
    '"@reward"',
    "kl_coef",
    "key=null",
    "update",
    "code",
    "maths",
}
"""Code words in the right column that are neither settings nor functions: files, columns, marks, an override."""

DENIALS = ("not here", "no counterpart")
"""How a row begins that has nothing for an option."""


ROW = re.compile(r"^- (?!\*\*)(.+?): (.+)$", re.MULTILINE)


def rows(text: str) -> list[tuple[str, str]]:
    """(theirs, here) of every line of the lists. A line in bold is about a difference of the systems."""
    return [(match[1], match[2]) for match in ROW.finditer(FENCE.sub("", text))]


def section(text: str, heading: str) -> str:
    """From the heading to the next one of its level; the whole page for none."""
    if not heading:
        return text
    after = text.split(f"\n{heading}\n")[1]
    return re.split(r"\n## ", after)[0]


def exists_here(word: str) -> bool:
    """Whether a code word is a setting, a command, a metric, a recipe, or a name of the package."""
    key, *value = re.split(r"[=:] ?", word, maxsplit=1)
    if SETTING.fullmatch(key):
        types = [each for kind in KINDS for each in fields_at(kind, key.split("."))]
        return any(not value or takes(each, yaml.safe_load(value[0])) for each in types)
    if METRIC.fullmatch(word):
        return catalogue().find(word) is not None
    if word.startswith("proximo."):
        return pydoc.locate(word) is not None
    if word.startswith(("proximo ", "--")):
        return True  # commands and options of all pages are checked in test_docs.py
    if match := re.fullmatch(r"([\w.]+)\((\w+)=\)", word):
        return match[2] in inspect.signature(public(match[1])).parameters
    return word in OUR_WORDS | SAID_BY_MODELS or public(word) is not None


def takes(annotation: Any, value: object) -> bool:
    """Whether a setting of that type may have that value. A name alone is the kind of a section that has kinds."""
    if isinstance(value, str) and has_kinds(annotation):
        value = {"kind": value}
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def public(path: str) -> Any:
    """A name of proximo.api, or what it has; None where there is none."""
    first, *rest = path.split(".")
    found = getattr(proximo, first) if first in api.__all__ else None
    for name in rest:
        found = getattr(found, name, None)
    return found


def all_rows() -> Iterator[tuple[str, str, str]]:
    """(page, theirs, here)."""
    for page in LISTS.values():
        found = rows(page.read_text())
        assert found, page
        yield from ((page.stem, *row) for row in found)


def wanted() -> Iterator[tuple[str, str, str, set[str], str]]:
    """(page, heading, name, its rows of the parity page, what is said of it here); nothing where it is missing."""
    for stem, heading, names in SECTIONS:
        said = rows(section(LISTS[stem].read_text(), heading))
        for each in names.split():
            name, _, ids = each.partition(":")
            here = "\n".join(here for theirs, here in said if name in CODE.findall(theirs))
            yield stem, heading, name, set(filter(None, ids.split(","))), here


def test_no_option_of_the_other_system_is_missing() -> None:
    assert not [(stem, heading, name) for stem, heading, name, _, here in wanted() if not here]


def test_what_stands_beside_an_option_exists_here() -> None:
    named = [(page, theirs, word) for page, theirs, here in all_rows() for word in CODE.findall(here)]
    assert not [each for each in named if not exists_here(each[-1])]


def test_an_option_without_a_name_here_has_a_reason() -> None:
    bare = [each for each in all_rows() if not CODE.search(each[2])]
    assert not [each for each in bare if len(each[2].split()) < 2 and each[2] not in ("planned", "always")]


def test_a_line_denies_nothing_that_the_parity_page_has_and_promises_nothing_that_it_has_not() -> None:
    """What is planned there is planned here, and what is there is neither planned nor missing here."""
    known = {row.id for row in PARITY}
    faults, planned = [], set()
    for stem, _, name, ids, here in wanted():
        if not ids <= known:
            faults.append((stem, name, "no such row"))
        if ("planned" in here) < bool(PLANNED & ids):
            faults.append((stem, name, "planned there, and not here"))
        if ids and any(line.startswith(DENIALS) for line in here.split("\n")):
            faults.append((stem, name, "denied, although the parity page has it"))
        if PLANNED & ids:
            planned |= {(stem, line) for line in here.split("\n") if "planned" in line}
    promised = {(page, here) for page, _, here in all_rows() if "planned" in here}
    assert not faults
    assert promised <= planned


def test_the_index_links_each_page_and_names_each_preset_and_each_preset_names_its_page() -> None:
    index = COMING_FROM / "README.md"
    assert {page.name for page in SYSTEMS} <= set(links(index))
    assert {word for word in CODE.findall(index.read_text()) if word in PRESETS} == PRESETS
    for recipe in shipped_recipes():
        if recipe.name in PRESETS:
            (named,) = re.findall(r"docs/coming-from/([\w-]+\.md)", recipe.text)
            page = COMING_FROM / named
            assert re.search(rf"\b{recipe.name}\b", page.read_text()), recipe.name


@pytest.mark.parametrize("page", SYSTEMS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_copy_a_preset_and_pass_a_dry_run(page: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line) for block in blocks(page, "sh") for line in block.text.splitlines()]
    assert lines
    for words in lines:
        assert words[0] == "proximo"
        assert "--dry-run" in words or words[1] == "recipes"
        assert main(words[1:]) == 0, words
    # torchtune's own recipe compiles and checkpoints.
    note = "note: run.compile has no effect: under activation_checkpointing no layers are compiled"
    assert set(capsys.readouterr().err.splitlines()) == ({note} if page.stem == "torchtune" else set())
