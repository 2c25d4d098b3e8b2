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
    of_policy = {id(parameter) for parameter in roles.policy.model.model.parameters()}
    for worker in roles.workers:
        digests[f"state of the {worker.role}"] = _of_text(json.dumps(worker.state()))
        for role, learner in worker.learners.items():
            digests |= {f"{part} of the {role}": value for part, value in learner.digest().items()}
        for role, model in worker.saved_models.items():
            if role not in worker.learners and model.backbone.sharding is None:  # it moves after the policy
                own = [parameter for parameter in model.model.parameters() if id(parameter) not in of_policy]
                digests[f"weights of the {role}"] = f"{checksum(own):016x}"
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
