"""`key=value`: how it is read, and where it goes."""

import pytest

from proximo.config.schema.overrides import apply_overrides, parse_override
from proximo.errors import ConfigError
from proximo.ppo.recipe import PPORecipe


def applied(tree, *overrides, schema=PPORecipe):
    return apply_overrides(tree, [parse_override(text) for text in overrides], schema)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1e-5", 1e-5),
        ("a.b=no", "no"),
        ("a.b=null", None),
        ("a.b=true", True),
        ("a.b= 3 ", 3),
        ("a.b=x=y", "x=y"),
        ("a.b=text with: colon # and hash", "text with: colon # and hash"),
        ("a.b=@sft", "@sft"),
        ('a.b="3"', "3"),
        ("a.b=''", ""),
        ("a.b=[1, no, '2']", [1, "no", "2"]),
        ("a.b={c: 1e3, d: [x]}", {"c": 1000.0, "d": ["x"]}),
    ],
)
def test_values_follow_the_rules_of_the_file(text, value):
    override = parse_override(text)
    assert override.path == ("a", "b")
    assert override.value == value
    assert type(override.value) is type(value)


@pytest.mark.parametrize("text", ["a", "=3", "a..b=3", ".a=3", "a.=3", ""])
def test_what_is_no_key_and_value_is_refused(text):
    with pytest.raises(ConfigError, match="key.sub=value"):
        parse_override(text)


def test_an_empty_value_is_refused_and_the_two_meanings_are_told_apart():
    with pytest.raises(ConfigError, match="null is none"):
        parse_override("a.b=")


def test_the_tree_that_was_given_is_left_as_it_was():
    tree = {"ppo": {"num_steps": 3}, "data": {"sources": [{"path": "a"}]}}
    changed = applied(tree, "ppo.num_steps=4", "data.sources.0.path=b")
    assert tree == {"ppo": {"num_steps": 3}, "data": {"sources": [{"path": "a"}]}}
    assert changed == {"ppo": {"num_steps": 4}, "data": {"sources": [{"path": "b"}]}}


def test_sections_and_lists_on_the_way_are_made():
    changed = applied({}, "ppo.kl.coefficient=0.1", "data.sources.0.path=a", "data.sources.1.path=b")
    assert changed == {"ppo": {"kl": {"coefficient": 0.1}}, "data": {"sources": [{"path": "a"}, {"path": "b"}]}}


def test_numbers_are_keys_inside_a_free_mapping():
    assert applied({}, "model.config.id2label.0=bad") == {"model": {"config": {"id2label": {"0": "bad"}}}}


def test_a_later_override_wins():
    assert applied({}, "run.seed=1", "run.seed=2") == {"run": {"seed": 2}}


def test_null_stays_where_the_key_may_be_null_and_else_restores_the_default():
    tree = {"ppo": {"value_loss": {"clip": 0.3}, "num_steps": 3}}
    assert applied(tree, "ppo.value_loss.clip=null", "ppo.num_steps=null") == {"ppo": {"value_loss": {"clip": None}}}


def test_another_kind_drops_what_only_the_kind_before_has():
    tree = {"reward": [{"kind": "model", "path": "x", "tokenizer": "t", "weight": 2, "name": "n"}]}
    changed = applied(tree, "reward.0.kind=function", "reward.0.function=m:f")
    assert changed == {"reward": [{"kind": "function", "weight": 2, "name": "n", "function": "m:f"}]}


def test_the_same_kind_drops_nothing():
    tree = {"reward": [{"kind": "model", "path": "x"}]}
    assert applied(tree, "reward.0.kind=model") == tree


@pytest.mark.parametrize(
    ("override", "piece"),
    [
        ("data.sources.3.path=x", "a list of 1"),
        ("data.sources.first.path=x", "by number from 0"),
        ("ppo.num_steps.x=1", "has no keys below it"),
    ],
)
def test_places_that_cannot_be_are_refused(override, piece):
    with pytest.raises(ConfigError, match=piece):
        applied({"ppo": {"num_steps": 3}, "data": {"sources": [{"path": "a"}]}}, override)
