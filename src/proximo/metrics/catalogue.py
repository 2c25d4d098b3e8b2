"""All declared metrics in one catalogue, in the order in which a line of metrics.jsonl has them."""

from proximo.metrics.declared.evaluation import EVALUATION
from proximo.metrics.declared.experience import EXPERIENCE, ROLLOUT, SCORE
from proximo.metrics.declared.run import RUN
from proximo.metrics.declared.supervised import REWARD_MODEL, SFT
from proximo.metrics.declared.updates import FIRST_MINIBATCH, POLICY, VALUE
from proximo.metrics.definitions import Catalogue

CATALOGUE = Catalogue(
    (*SCORE, *EXPERIENCE, *ROLLOUT, *FIRST_MINIBATCH, *POLICY, *VALUE, *SFT, *REWARD_MODEL, *EVALUATION, *RUN)
)
