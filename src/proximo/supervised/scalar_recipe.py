"""What the recipes of reward models and process reward models share: a model with a scalar head."""

from typing import Self

from pydantic import model_validator

from proximo.config.recipe import TrainerRecipe, check_quantisation, check_tokenizer
from proximo.config.run import ScalarModelConfig, TokenizerConfig


class ScalarRecipe(TrainerRecipe):
    """A recipe that trains a model with a scalar head. Its base comes from a folder, the Hub or a configuration."""

    model: ScalarModelConfig
    """The model that it starts from."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Its tokenizer."""

    @model_validator(mode="after")
    def _starts_somewhere(self) -> Self:
        if self.model.init_from != "path":
            raise ValueError("model needs path (trained weights) or config (random weights)")
        check_quantisation(self.model, "model", self.run)
        check_tokenizer(self.model, "model", self.tokenizer)
        return self
