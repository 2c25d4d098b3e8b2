"""Engines for several ranks, and the transfer of the policy's weights to them."""

from contextlib import AbstractContextManager, nullcontext

from proximo.distributed.world import current
from proximo.models.language import LanguageModel
from proximo.rollout.engine import Engine, push_weights
from proximo.rollout.first_rank_engine import FirstRankEngine
from proximo.rollout.local import LocalEngine
from proximo.rollout.ranks_engine import RanksEngine


def on_ranks(engine: Engine) -> Engine:
    """The engine as all ranks of this world use it; the engine itself in a world of one. Every rank has to call it.

    The built-in engine samples a share on each rank. Any other engine is called only on rank 0.
    """
    if current().size == 1 or isinstance(engine, RanksEngine | FirstRankEngine):
        return engine
    return RanksEngine(engine) if isinstance(engine, LocalEngine) else FirstRankEngine(engine)


def push_to(engine: Engine, model: LanguageModel, *, version: int) -> bool:
    """Load the whole trained weights of `model` into its engine. Every rank has to call it. See `push_weights`."""
    if isinstance(engine, FirstRankEngine):
        return engine.push(version, model)
    # An engine that samples from the model's own tensors copies none, so that they need not be whole.
    shares = isinstance(engine, RanksEngine) and engine.own.samples_from(model)
    with nullcontext() if shares else model.backbone.gathered():
        return push_weights(engine, version, dict(model.trainable_parameters()))


def sampling_with(engine: Engine, model: LanguageModel) -> AbstractContextManager[None]:
    """Inside, the engine may sample: the weights of `model` are whole where it reads them."""
    return nullcontext() if isinstance(engine, FirstRankEngine) else model.backbone.gathered()
