"""The reference page is what the schemas say, and the schemas say something about every key."""

from pathlib import Path

import pytest

from docs.configuration import configuration_page
from proximo.cli.recipes import json_schema
from proximo.config.schema.fields import key_paths
from proximo.trainer_kinds import recipe_kind, recipe_kinds

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_in_docs_is_the_generated_one():
    message = "the schemas have changed: PYTHONPATH=tests python -m docs.configuration > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), message


KINDS = tuple(kind.name for kind in recipe_kinds())


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_every_section_has_a_docstring(kind):
    for path, section in key_paths(recipe_kind(kind).schema):
        description = section.model_fields[path[-1]].description
        assert description, ".".join(path)
        assert description.rstrip().endswith("."), ".".join(path)
        assert section.__doc__


def test_every_key_is_on_the_page_with_its_type_and_default():
    page = configuration_page()
    for kind in KINDS:
        for path, _ in key_paths(recipe_kind(kind).schema):
            assert f"\n| `{path[-1]}` | " in page
    assert "| `gae_lambda` | number, at least 0, at most 1 | `0.95` |" in page
    assert "| `seed` | whole number, at least 0, below 2147483648 | `0` |" in page
    assert "| `clip` | number or null, above 0 | `0.2` |" in page
    assert "| `betas` | list of 2 (number) | `[0.9, 0.95]` |" in page
    assert "| `apply_to` | `reward` or `loss` or `margin` or `none` | `reward` |" in page
    assert "| `folder` | text | required |" in page


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
