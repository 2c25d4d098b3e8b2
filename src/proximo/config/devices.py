"""The config section `devices`: how many ranks a run has, and how its models lie on them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from proximo.config.schema.base import Section

Shard = Literal["replicate", "grads", "full"]


class RoleDevicesConfig(Section):
    """How the model of one role lies on the ranks."""

    shard: Shard | None = None
    """Null means `devices.shard`."""
    offload: Literal["none", "idle", "always"] | None = None
    """Null means `devices.offload`."""


class DevicesConfig(Section):
    """The ranks of a run: processes with one device each, which train one model together. docs/scale.md."""

    num: int | None = Field(None, ge=1)
    """Number of ranks on this machine, which the command starts itself. Null: those that torchrun or Slurm started,
    else one. Results differ between numbers of ranks only in rounding."""
    shard: Shard = "full"
    """How models lie on the ranks. `replicate`: each rank has the whole model and optimizer. `grads`: gradients and
    optimizer state are divided among the ranks, and so are parameters, which are gathered for a whole update. `full`:
    parameters are gathered layer by layer, which takes the least memory."""
    shard_size: int | None = Field(None, ge=1)
    """Number of consecutive ranks that share one copy of a sharded model; null: all. With the ranks of one machine, the
    copies are replicated over machines, and gathers stay inside a machine (hybrid sharding)."""
    reduce_gradients: Literal["update", "microbatch"] = "update"
    """When gradients of sharded models are added up over the ranks: once per update, for which each rank keeps whole
    gradients between micro-batches; or after each micro-batch, with less memory and more traffic."""
    offload: Literal["none", "idle", "always"] = "none"
    """Keep models in the memory of the host: `idle`, while no call uses them; `always`, with the optimizer, which then
    steps on the host. `always` needs a sharded model."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a rank waits for the others before the run ends with the name of the one that is missing."""
    policy: RoleDevicesConfig = RoleDevicesConfig()
    """The policy of PPO."""
    reference: RoleDevicesConfig = RoleDevicesConfig()
    """The reference of PPO, DPO or KTO."""
    value: RoleDevicesConfig = RoleDevicesConfig()
    """The critic of PPO."""
    reward: RoleDevicesConfig = RoleDevicesConfig()
    """The reward models of PPO."""
    average: RoleDevicesConfig = RoleDevicesConfig()
    """The moving average of the policy in PPO."""
    model: RoleDevicesConfig = RoleDevicesConfig()
    """The trained model of SFT, reward training, DPO and KTO."""

    @model_validator(mode="after")
    def _offloads_shards(self) -> Self:
        for name in ROLES:
            shard, offload = self.shard_of(name), self.offload_of(name)
            if shard == "replicate" and offload == "always":
                given = f"devices.{name}" if getattr(self, name).offload == "always" else "devices"
                raise ValueError(
                    f"{given}.offload always needs a sharded model, and {name} is replicated: set its shard to full or "
                    "grads, or offload to idle"
                )
        return self

    def shard_of(self, role: str) -> Shard:
        """How the model of a role lies on the ranks."""
        return getattr(self, role).shard or self.shard

    def offload_of(self, role: str) -> Literal["none", "idle", "always"]:
        """When the model of a role lies on the host."""
        return getattr(self, role).offload or self.offload


ROLES = ("policy", "reference", "value", "reward", "average", "model")
"""The roles that have a subsection."""
