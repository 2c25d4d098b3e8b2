"""How much the policy goes on learning texts while it is rewarded. Not which texts: those are `ptx_data`."""

from pydantic import Field

from proximo.config.schema.base import Section


class PTXConfig(Section):
    """Loss on texts in every update of the policy, which preserves earlier abilities."""

    coefficient: float = Field(gt=0)
    """Weight of the mean token loss of the texts beside the policy loss, which is a mean over tokens too."""
    examples_per_update: int = Field(8, ge=1)
    """Texts that join each update."""
