"""What all ranks must have in the same bits after a step: its records, the state, and weights that are not sharded."""

import hashlib
import json
from dataclasses import fields

from torch import Tensor

from proximo.distributed.world import checksum
from proximo.ppo.roles.build import Roles
from proximo.ppo.train_state import TrainState
from proximo.records import Experience


def step_digest(experience: Experience, state: TrainState, roles: Roles) -> dict[str, str]:
    """Name of a part -> digest. The weights of a sharded model are not compared: each rank has other ones."""
    digests = {"records": _of_records(experience), "state": _of_text(json.dumps(state.to_json()))}
    for worker in roles.workers:
        for role, learner in worker.learners.items():
            digests[f"updates of the {role}"] = str(learner.updates_done)
            if learner.sharding is None:
                digests[f"weights of the {role}"] = f"{checksum(list(learner.parameters.values())):016x}"
    return digests


def _of_records(experience: Experience) -> str:
    digest = hashlib.sha256()
    for field in fields(experience):
        value = getattr(experience, field.name)
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    for scored in experience.scored:
        digest.update(repr((scored.response.token_ids, scored.score, scored.state)).encode())
    return digest.hexdigest()[:16]


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
