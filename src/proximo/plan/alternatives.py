"""Compares ways in which the models of a recipe may lie on ranks: what fits, and what is fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proximo.config.devices import DevicesConfig
from proximo.config.placed_roles import devices_problem
from proximo.config.recipe import Recipe
from proximo.plan.machine import Machine
from proximo.plan.profiling import ProfiledStage, plan_of, profile_stages
from proximo.plan.ranks_text import gib
from proximo.plan.record import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One way, for all models of a recipe alike."""

    settings: str
    """As overrides of the recipe: `devices.shard=full`."""
    plans: tuple[Plan, ...]

    @property
    def peak(self) -> int:
        """Bytes of a device at the largest phase of any stage."""
        return max(plan.peak for plan in self.plans)

    @property
    def host(self) -> int:
        """Bytes of a rank in its host's memory."""
        return max(plan.ranks.host for plan in self.plans if plan.ranks)

    @property
    def traffic(self) -> int:
        """Bytes that come to a rank in one step of each stage."""
        phases = [phase for plan in self.plans if plan.ranks for phase in plan.ranks.traffic.values()]
        return sum(sum(phase.values()) for phase in phases)

    @property
    def seconds(self) -> float:
        """Predicted time of one step of each stage."""
        return sum(sum(plan.ranks.seconds.values()) for plan in self.plans if plan.ranks)


def alternatives(recipe: Recipe, *, device: str, num_ranks: int, machine: Machine) -> list[Alternative]:
    """Ways that this recipe may take, fastest first. Keys of single roles are left out."""
    found, profiles = list[Alternative](), dict[str, list[ProfiledStage]]()
    for keys in _ways(num_ranks, machine):
        devices = DevicesConfig.model_validate({"num": recipe.devices.num, **keys})
        changed = _with_devices(recipe, devices)
        if devices_problem(changed, num_ranks) is not None:
            continue
        kind = _profile_of(devices)
        if kind not in profiles:
            profiles[kind] = profile_stages(changed, device=device, num_ranks=num_ranks)
        stages = profiles[kind]
        one_pass = all(len(stage.costs.update.groups) == 1 for stage in stages)
        if one_pass and devices.reduce_gradients == "microbatch":  # the same as without it
            continue
        plans = tuple(plan_of(stage, stage.costs.layout.on(devices), machine) for stage in stages)
        found.append(
            Alternative(settings=" ".join(f"devices.{key}={value}" for key, value in keys.items()), plans=plans)
        )
    return sorted(found, key=lambda each: each.seconds)


def _profile_of(devices: DevicesConfig) -> str:
    """What decides the memory of a pass. Its passes are the same in `grads` and `full`."""
    if devices.shard == "replicate":
        return devices.shard
    on_host = devices.offload == "always" and devices.reduce_gradients == "microbatch"
    return f"{devices.reduce_gradients} {on_host} {devices.shard_size}"


def fastest(found: Sequence[Alternative], memory: int) -> Alternative | None:
    """The fastest that fits; None if none does."""
    return next((each for each in found if each.peak <= memory), None)


def _ways(num_ranks: int, machine: Machine) -> Iterator[dict[str, object]]:
    offloads = ["none", "idle", "always"]
    for offload in offloads[:2]:
        yield {"shard": "replicate", "offload": offload}
    for offload in offloads:
        yield {"shard": "grads", "offload": offload}
        yield {"shard": "full", "offload": offload}
        yield {"shard": "full", "offload": offload, "reduce_gradients": "microbatch"}
    if num_ranks > machine.devices and num_ranks % machine.devices == 0:
        yield {"shard": "full", "offload": "none", "shard_size": machine.devices}


def _with_devices(recipe: Recipe, devices: DevicesConfig) -> Recipe:
    stages = {name: stage.model_copy(update={"devices": devices}) for name, stage in recipe.stages().items() if stage}
    return stages[""] if "" in stages else recipe.model_copy(update={"devices": devices, **stages})


def compare(found: Sequence[Alternative], *, memory: int | None, machine: Machine) -> str:
    """A table of the ways that a recipe may take, and the fastest that fits."""
    return "\n".join(_comparison(found, memory, machine))


def _comparison(found: Sequence[Alternative], memory: int | None, machine: Machine) -> Iterator[str]:
    width = max(len(each.settings) for each in found)
    head = f"{'device, GiB':>11}  {'host, GiB':>9}  {'received, GiB':>13}  {'step, s':>8}"
    yield f"  {'for all models':<{width}}  {head}" + ("  fits" if memory is not None else "")
    for each in found:
        sizes = f"{gib(each.peak):>11}  {gib(each.host):>9}  {gib(each.traffic):>13}  {each.seconds:>8.3g}"
        fits = "" if memory is None else f"  {'yes' if each.peak <= memory else 'no':>4}"
        yield f"  {each.settings:<{width}}  {sizes}{fits}"
    if memory is not None:
        best = fastest(found, memory)
        yield (
            f"  fastest that fits in {gib(memory)} GiB: {best.settings}"
            if best
            else (f"  none fits in {gib(memory)} GiB: the least takes {gib(min(each.peak for each in found))} GiB")
        )
    yield (
        f"  times are for {machine.flops / 1e12:.3g} TFLOP/s, {machine.memory / 1e9:,.0f} GB/s of memory and links of "
        f"{machine.inside / 1e9:.3g} GB/s inside a machine of {machine.devices}, {machine.between / 1e9:.3g} between "
        f"machines and {machine.host / 1e9:.3g} to the host, for each device; every rank is taken to have equal work"
    )
