"""Everything that is declared, in one place and in the order in which it is written and shown."""

from collections.abc import Mapping

from proximo.metrics.alarms import Rule
from proximo.metrics.curves import Curve
from proximo.metrics.declared.alarms_dpo import DPO_RULES
from proximo.metrics.declared.alarms_other import COMMON_RULES, REWARD_RULES, SFT_RULES
from proximo.metrics.declared.alarms_ppo import PPO_RULES
from proximo.metrics.declared.curves_dpo import DPO as DPO_CURVES
from proximo.metrics.declared.curves_other import MEMORY, SPEED
from proximo.metrics.declared.curves_other import REWARD as REWARD_CURVES
from proximo.metrics.declared.curves_other import SFT as SFT_CURVES
from proximo.metrics.declared.curves_ppo import PPO_MAIN, PPO_MORE, PPO_SPEED
from proximo.metrics.declared.dpo import DPO
from proximo.metrics.declared.evaluation import EVALUATION
from proximo.metrics.declared.experience import EXPERIENCE, ROLLOUT, SCORE
from proximo.metrics.declared.run import RUN
from proximo.metrics.declared.sources import SOURCES
from proximo.metrics.declared.supervised import REWARD_MODEL, SFT
from proximo.metrics.declared.updates import FIRST_MINIBATCH, POLICY, PTX, VALUE
from proximo.metrics.definitions import Catalogue
from proximo.metrics.trainers import Trainer

CATALOGUE = Catalogue(
    (
        *(*SCORE, *SOURCES, *EXPERIENCE, *ROLLOUT, *FIRST_MINIBATCH, *POLICY, *PTX, *VALUE),
        *(*SFT, *REWARD_MODEL, *DPO, *EVALUATION, *RUN),
    )
)

CURVES: Mapping[Trainer, tuple[Curve, ...]] = {
    Trainer.SFT: (*SFT_CURVES, *SPEED),
    Trainer.REWARD: (*REWARD_CURVES, *SPEED),
    Trainer.DPO: (*DPO_CURVES, *SPEED),
    Trainer.PPO: (*PPO_MAIN, *PPO_SPEED, MEMORY, *PPO_MORE),
}

RULES: Mapping[Trainer, tuple[Rule, ...]] = {
    Trainer.SFT: (*SFT_RULES, *COMMON_RULES),
    Trainer.REWARD: (*REWARD_RULES, *COMMON_RULES),
    Trainer.DPO: (*DPO_RULES, *COMMON_RULES),
    Trainer.PPO: (*PPO_RULES, *COMMON_RULES),
}
