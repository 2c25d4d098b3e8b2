"""What the recipes of DPO and KTO share: a policy that is compared with a frozen reference."""

from typing import Self

from pydantic import model_validator

from proximo.config.placed_roles import PlacedRole
from proximo.config.recipe import TrainerRecipe, check_quantisation, check_reference, check_tokenizer
from proximo.config.run import ModelConfig, TokenizerConfig


class ReferenceRecipe(TrainerRecipe):
    """Policy, tokenizer and reference."""

    model: ModelConfig
    """The policy to train, preferably a fine-tuned model. The reference is a frozen copy of it, or its base with
    LoRA."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The policy's tokenizer."""
    reference: ModelConfig | None = None
    """Another reference than a copy of the policy; it must have the policy's vocabulary."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_tokenizer(self.model, "model", self.tokenizer)
        if self.model.lora is not None and self.reference is not None:
            raise ValueError("with model.lora the base is the reference: remove reference, or train without LoRA")
        check_reference(self.reference, self.run)
        check_quantisation(self.model, "model", self.run)
        return self

    def placed_roles(self) -> tuple[PlacedRole, ...]:
        trained, *_ = super().placed_roles()
        base = "model" if self.model.lora is not None else None
        common = self.reference is None and (base is not None or self.model.frozen_layers > 0)
        reference = PlacedRole(
            role="reference", key="reference", model=self.reference, shares=base, has_common_tensors=common
        )
        return trained, reference
