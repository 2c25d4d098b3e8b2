"""The reference page is what the schemas say, and the schemas say something about every key."""

import re
from pathlib import Path

from docs.configuration import configuration_page
from proximo.cli.recipes import json_schema
from proximo.config.schema.fields import key_paths
from proximo.trainer_kinds import recipe_kind, recipe_kinds

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_in_docs_is_the_generated_one():
    message = "the schemas have changed: PYTHONPATH=tests python -m docs.configuration > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), message


KINDS = tuple(kind.name for kind in recipe_kinds())


def test_every_key_of_every_section_has_a_docstring():
    faults = []
    for kind in KINDS:
        for path, section in key_paths(recipe_kind(kind).schema):
            description = section.model_fields[path[-1]].description
            if not section.__doc__ or not (description or "").rstrip().endswith("."):
                faults.append(".".join((kind, *path)))
    assert not faults


def test_every_key_is_on_the_page_with_its_type_and_default():
    page = configuration_page()
    keys = {path[-1] for kind in KINDS for path, _ in key_paths(recipe_kind(kind).schema)}
    assert not [key for key in keys if f"\n- `{key}` (" not in page]
    wanted = (
        "- `gae_lambda` (number, ≥ 0, ≤ 1; `0.95`): ",
        "- `seed` (integer, ≥ 0, < 2147483648; `0`): ",
        "- `clip` (number or null, > 0; `0.2`): ",
        "- `betas` (list of 2 numbers; `[0.9, 0.95]`): ",
        "At `ppo.advantage`, kind `group_return_to_go`. ",
        "- `precision` (`float32`, `tf32`, `bf16`, `auto`): ",
        "- `tensorboard` (`true`, `false`): ",
        "- `folder` (text; required): ",
    )
    assert not [line for line in wanted if line not in page]


def test_every_section_is_printed_once_and_no_key_without_words():
    page = configuration_page()
    headings = re.findall("^### .*", page, flags=re.MULTILINE)
    assert sorted(headings) == sorted(set(headings))
    assert not re.findall(r"^- .*\): ?$", page, flags=re.MULTILINE)


def test_every_key_of_a_section_is_below_its_heading_or_below_one_that_it_refers_to():
    """What is inherited is printed once."""
    parts = {part.partition("\n")[0]: part for part in re.split(r"^### ", configuration_page(), flags=re.MULTILINE)}
    faults = []
    for kind in recipe_kinds():
        for path, section in key_paths(kind.schema):
            titles = [section.__name__.removesuffix("Config")]
            for title in titles:
                also = re.search(r"It has the keys of (.+?)(?: and:|\.)$", parts.get(title, ""), flags=re.MULTILINE)
                titles += re.findall(r"\[(\w+)\]", also[1]) if also else []
            text = "".join(parts.get(title, "") for title in titles)
            if len(path) > 1 and path[-1] != "kind" and not section.__name__.endswith("Recipe"):
                faults += [] if f"\n- `{path[-1]}` (" in text else [path]
    assert not faults


def test_every_link_on_the_page_leads_to_a_heading():
    page = configuration_page()
    anchors = {
        line.lstrip("# ").lower().replace(" ", "-").replace("`", "")
        for line in page.splitlines()
        if line.startswith("#")
    }
    links = {piece.partition(")")[0] for piece in page.split("](#")[1:]}
    assert links <= anchors


def test_the_json_schema_of_each_kind_refuses_unknown_keys():
    for kind in KINDS:
        schema = json_schema(kind)
        assert schema["additionalProperties"] is False
        assert all(part["additionalProperties"] is False for part in schema["$defs"].values())
