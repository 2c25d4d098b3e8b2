"""Refuses a push that cannot work, before anything is built. Imports no torch."""

from proximo.config.recipe import TrainerRecipe
from proximo.errors import ConfigError, UserError
from proximo.hub import is_hub_name, is_local


def check_push_name(push: str | None, *, private: bool) -> None:
    """Raises UserError if an export cannot be pushed under this name."""
    if push is None and private:
        raise UserError("private is for a model that push creates: give the model's name on the Hub as push too")
    if push is not None and not is_hub_name(push):
        raise UserError(f"push needs a name on the Hub, for example me/my-model, got {push!r}")


def check_push(recipe: TrainerRecipe) -> None:
    """Raises ConfigError for a push that cannot work. The Hub is not asked."""
    push = recipe.run.push
    if push is None:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("run.push needs the Hub, and HF_HUB_OFFLINE is set: unset it, or leave run.push out")
    if not get_token():
        raise ConfigError(
            f"run.push.name is {push.name}, and there is no token of the Hub: run `hf auth login`, or set HF_TOKEN"
        )
    key, model = next(iter(recipe.models().items()))
    if model.lora is not None and model.path is not None and is_local(model.path):
        raise ConfigError(
            f"run.push would push an adapter whose base, {key}.path, is the folder {model.path} of this machine, so "
            "that it would load nowhere else: leave run.push out, and use proximo export --merge --push at the end"
        )
