"""The config section `devices`: how many ranks a run has, how its models lie on them, and what cannot lie there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import Field

from proximo.config.engine import ServersConfig
from proximo.config.run import Device, ModelConfig, OptimizerConfig, RunConfig, ScalarModelConfig
from proximo.config.schema.base import Section

Shard = Literal["replicate", "grads", "full"]


class RoleDevicesConfig(Section):
    """How the model of one role lies on the ranks."""

    shard: Shard | None = None
    """Null means `devices.shard`."""
    offload: Literal["none", "idle", "always"] | None = None
    """Null means `devices.offload`."""


class PlacedRoleDevicesConfig(RoleDevicesConfig):
    """How the model of a role lies on the ranks, or, in a run of one process, on which device."""

    device: Device | None = None
    """Null means `run.device`. For one process with several devices; each of several ranks has one device."""


class ReferenceDevicesConfig(PlacedRoleDevicesConfig, ServersConfig):
    """How the reference lies on the ranks; or servers that have it, for PPO alone. docs/distillation.md."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        placed = [name for name in PlacedRoleDevicesConfig.model_fields if getattr(self, name) is not None]
        if self.addresses and placed:
            yield f"{placed[0]} places a reference that is loaded, but addresses names servers: remove one"


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
    copies are replicated over machines, and gathers stay inside a machine (hybrid sharding). For several machines with
    a slow network."""
    reduce_gradients: Literal["update", "microbatch"] = "update"
    """When gradients of sharded models are added up over the ranks: once per update, for which each rank keeps whole
    gradients between micro-batches; or after each micro-batch, with less memory and more traffic."""
    offload: Literal["none", "idle", "always"] = "none"
    """Keep models in the memory of the host: `idle`, while no call uses them; `always`, with the optimizer, which then
    steps on the host. `always` needs a sharded model."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a rank waits for the others before the run ends with the name of the one that is missing. For slow file
    systems, from which the ranks load at different speeds."""
    policy: PlacedRoleDevicesConfig = PlacedRoleDevicesConfig()
    """The policy of PPO."""
    reference: ReferenceDevicesConfig = ReferenceDevicesConfig()
    """The reference of PPO, DPO or KTO."""
    value: PlacedRoleDevicesConfig = PlacedRoleDevicesConfig()
    """The critic of PPO."""
    reward: RoleDevicesConfig = RoleDevicesConfig()
    """The reward models of PPO."""
    average: RoleDevicesConfig = RoleDevicesConfig()
    """The moving average of the policy in PPO. It can lie on the host between its uses."""
    model: RoleDevicesConfig = RoleDevicesConfig()
    """The trained model of SFT, reward training, DPO and KTO."""

    def conflicts(self) -> Iterator[str]:
        for name in ROLES:
            shard, offload = self.shard_of(name), self.offload_of(name)
            if shard == "replicate" and offload == "always":
                given = f"devices.{name}" if getattr(self, name).offload == "always" else "devices"
                yield (
                    f"{given}.offload always needs a sharded model, and {name} is replicated: set its shard to full or "
                    "grads, or offload to idle"
                )

    def shard_of(self, role: str) -> Shard:
        """How the model of a role lies on the ranks."""
        return getattr(self, role).shard or self.shard

    def offload_of(self, role: str) -> Literal["none", "idle", "always"]:
        """When the model of a role lies on the host."""
        return getattr(self, role).offload or self.offload


ROLES = ("policy", "reference", "value", "reward", "average", "model")
"""The roles that have a subsection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRole:
    """A model of a run, and the subsection of `devices` that says how it lies on the ranks."""

    role: str
    """A subsection of `devices`."""
    key: str
    """The key of its model in the recipe."""
    model: ModelConfig | ScalarModelConfig | None = None
    """None for a copy of another role's model, or for one that has no section of this kind."""
    trains: bool = False
    optimizers: Mapping[str, OptimizerConfig] = field(default_factory=dict)
    """Key -> the optimizers of the recipe that train it."""
    shares: str | None = None
    """The role whose weights it runs on."""
    is_head: bool = False
    """Whether it is a head on the layers of that role, in one pass with it."""
    has_common_tensors: bool = False
    """Whether another role has some of its tensors."""
    follows: str | None = None
    """The role whose weights are copied or averaged into its own during the run."""


class Placing(Protocol):
    """What the recipe of one trainer says about ranks."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def devices(self) -> DevicesConfig: ...

    def sections(self) -> dict[str, Section]: ...

    def placed_roles(self) -> tuple[PlacedRole, ...]: ...


class Staged(Protocol):
    """A recipe of one trainer or more, each with the prefix of its keys."""

    def given_stages(self) -> Iterator[tuple[str, Placing]]: ...


def devices_conflicts(recipe: Staged, num_ranks: int) -> Iterator[str]:
    """The reasons why a recipe cannot run on that many ranks. docs/scale.md lists them."""
    for prefix, stage in recipe.given_stages():
        yield from _conflicts_of_stage(stage, num_ranks, prefix)


def _conflicts_of_stage(recipe: Placing, num_ranks: int, prefix: str) -> Iterator[str]:
    devices, at = recipe.devices, f"{prefix}devices"
    for placed in recipe.placed_roles():
        if placed.has_common_tensors and not placed.trains and devices.offload_of(placed.role) == "idle":
            yield (
                f"{at}.{placed.role}.offload idle would take weights of {placed.key} to the host that another model "
                f"uses at the same time: set {at}.{placed.role}.offload to none"
            )
    if num_ranks == 1:
        return
    placing = {f"devices.{role}": getattr(devices, role) for role in ("policy", "reference", "value")}
    for key, section in (recipe.sections() | placing).items():
        device = getattr(section, "device", None)
        if device is not None and (key != "run" or ":" in device or device == "mps"):
            yield (
                f"{prefix}{key}.device is {device}, but each of {num_ranks} ranks has one device, the CUDA device of "
                "its number or the CPU, for all its models: remove it, or run on one rank"
            )
    if devices.shard_size is not None and num_ranks % devices.shard_size:
        fitting = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        yield (
            f"{at}.shard_size ({devices.shard_size}) must divide the number of ranks ({num_ranks}): use one of "
            f"{', '.join(map(str, fitting))}, or null for all"
        )
    for placed in recipe.placed_roles():
        yield from _other_place(placed, devices, at)
        if placed.shares is None and devices.shard_of(placed.role) != "replicate":
            yield from _unshardable(placed, recipe, prefix)


def _other_place(placed: PlacedRole, devices: DevicesConfig, at: str) -> Iterator[str]:
    given = getattr(devices, placed.role).shard is not None
    if (base := placed.shares) is not None and (given or not placed.is_head):
        shard = devices.shard_of(base)
        if devices.shard_of(placed.role) != shard:
            yield (
                f"{placed.key} runs on the weights of {base}, so both must be sharded alike: set "
                f"{at}.{placed.role}.shard to {shard}"
            )
    if (leader := placed.follows) is not None:
        shard, offload = devices.shard_of(leader), devices.offload_of(leader)
        if devices.shard_of(placed.role) != shard:
            yield (
                f"{placed.key} takes over the weights of {leader} shard by shard, so both must be sharded alike: set "
                f"{at}.{placed.role}.shard to {shard}"
            )
        if "always" in (offload, other := devices.offload_of(placed.role)) and other != offload:
            yield (
                f"{placed.key} takes over the weights of {leader} shard by shard, so both must be on the host or "
                f"neither: set {at}.{placed.role}.offload to {offload}"
            )


def _unshardable(placed: PlacedRole, recipe: Placing, prefix: str) -> Iterator[str]:
    instead = f"{prefix}devices.{placed.role}.shard to replicate"
    if placed.model is not None and placed.model.quantisation != "none":
        yield (
            f"{prefix}{placed.key}.quantisation {placed.model.quantisation} stores blocks with scales of their own, "
            f"which cannot be divided among ranks: set {instead}, or quantisation to none"
        )
    if placed.trains and recipe.run.compile != "none":
        yield (
            f"run.compile {recipe.run.compile} compiles whole layers, but those of {placed.key} are sharded: set "
            f"{instead}, or run.compile to none"
        )
    for key, optimizer in placed.optimizers.items():
        if optimizer.kind != "adamw":
            yield (
                f"{prefix}{key}.kind {optimizer.kind} rounds its moments in blocks of whole tensors, which cannot be "
                f"divided among ranks: set {instead}, or kind to adamw"
            )


def unused_devices_keys(recipe: Placing, shared: DevicesConfig) -> Iterator[tuple[str, str]]:
    """Keys of the section `devices` that have no effect, each with the reason.

    `shared`: the section of the pipeline, whose values a stage does not answer for; or one of defaults.
    """
    devices, placed = recipe.devices, recipe.placed_roles()
    for name in ServersConfig.model_fields if not devices.reference.addresses else ():
        if getattr(devices.reference, name) != getattr(shared.reference, name):
            yield f"reference.{name}", "addresses is empty"
    given = {name for name, value in devices if value != getattr(shared, name)}
    if devices.num == 1:
        yield from ((name, "num is 1") for name in ("shard", "shard_size", "reduce_gradients") if name in given)
        return
    used = {each.role for each in placed}
    if "policy" in used and devices.reference.addresses:
        used.add("reference")
    if "model" in used and devices.reference.device is not None:
        yield "reference.device", "only PPO has models on several devices of one process"
    yield from ((name, "the run has no such model") for name in ROLES if name in given and name not in used)
    sharded = [each for each in placed if devices.shard_of(each.role) != "replicate"]
    if "shard_size" in given and not sharded:
        yield "shard_size", "no model is sharded"
    if "reduce_gradients" in given and not any(each.trains for each in sharded):
        yield "reduce_gradients", "no model that trains is sharded"
