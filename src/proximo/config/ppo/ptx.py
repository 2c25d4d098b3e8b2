"""Config section `ppo.ptx`: a language-modelling loss in PPO's updates. The texts: section `ptx_data`."""

from pydantic import Field

from proximo.config.schema.base import Section


class PTXConfig(Section):
    """Loss on texts in every update of the policy, which preserves earlier abilities."""

    coefficient: float = Field(gt=0)
    """Weight of the mean token loss of the texts beside the policy loss, which is a mean over tokens too."""
    examples_per_update: int = Field(8, ge=1)
    """Texts that join each update."""
