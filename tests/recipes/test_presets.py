"""The steps of the DeepSpeed-Chat preset that are also shipped one by one say what the pipeline says."""

import pytest

from proximo.config.loader import load_recipe

ELSEWHERE = {"@sft": "models/sft", "@reward": "models/reward"}
"""What a stage finds in the pipeline -> where a step by itself finds it."""


@pytest.mark.parametrize(("kind", "number"), [("sft", 1), ("reward", 2), ("ppo", 3)])
def test_a_step_by_itself_has_the_settings_of_its_stage(kind, number):
    stage = getattr(load_recipe("pipeline", "deepspeed-chat-13b", ()).recipe, kind).model_dump(mode="json")
    step = load_recipe(kind, f"deepspeed-chat-13b-step{number}", ()).recipe.model_dump(mode="json")
    assert stage["run"].pop("folder") != step["run"].pop("folder")
    assert step == _moved(stage)


def _moved(value):
    match value:
        case dict():
            return {key: _moved(item) for key, item in value.items()}
        case list():
            return [_moved(item) for item in value]
        case str():
            return ELSEWHERE.get(value, value)
    return value
