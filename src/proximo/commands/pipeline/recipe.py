"""The recipe of `proximo pipeline`: one recipe per stage."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from proximo.config.devices import DevicesConfig
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import RunConfig
from proximo.config.schema.fields import sections_of
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.reward.recipe import RewardRecipe
from proximo.supervised.sft.recipe import SFTRecipe


class StagedRecipe(Recipe):
    """Base of recipes with several stages. Each field that is the recipe of a trainer is a stage; stages run in the
    order of the fields, and a stage that is null is skipped.
    """

    def stages(self) -> Mapping[str, TrainerRecipe | None]:
        return {name: getattr(self, name) for name in self.stage_names()}

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        """Keys that hold the recipe of a stage, in the order in which stages run."""
        sections = {name: sections_of(field.annotation) for name, field in cls.model_fields.items()}
        return tuple(name for name, kinds in sections.items() if any(issubclass(kind, TrainerRecipe) for kind in kinds))

    @model_validator(mode="before")
    @classmethod
    def _share_run(cls, data: Any) -> Any:
        """Give every stage the pipeline's `run`, with its own folder and its own overrides."""
        if not isinstance(data, dict) or not isinstance(data.get("run"), dict):
            return data
        shared, stages = data["run"], {}
        for name in cls.stage_names():
            if not isinstance(data.get(name), dict):
                continue
            given, folder = data[name].get("run") or {}, f"{shared.get('folder')}/{name}"
            if given.get("folder", folder) != folder:
                raise ValueError(f"{name}.run.folder follows from run.folder ({folder}): remove it")
            stages[name] = {**data[name], "run": {**shared, **given, "folder": folder}}
        return {**data, **stages}

    @model_validator(mode="before")
    @classmethod
    def _share_devices(cls, data: Any) -> Any:
        """Give every stage the pipeline's `devices`, with its own overrides."""
        if not isinstance(data, dict) or not isinstance(data.get("devices"), dict):
            return data
        shared, stages = data["devices"], {}
        for name in cls.stage_names():
            if isinstance(data.get(name), dict):
                stages[name] = {**data[name], "devices": {**shared, **(data[name].get("devices") or {})}}
        return {**data, **stages}

    @model_validator(mode="after")
    def _pushes_to_different_names(self) -> Self:
        names = [stage.run.push.name for _, stage in self.given_stages() if stage.run.push is not None]
        if len(names) > len(set(names)):
            raise ValueError(
                f"several stages would push their model to {names[0]}: give push in the run of one stage, such as "
                "ppo.run.push, and not in the run of the pipeline"
            )
        return self

    @model_validator(mode="after")
    def _one_world(self) -> Self:
        for prefix, stage in self.given_stages():
            for name in ("num", "timeout_seconds"):
                given, shared = getattr(stage.devices, name), getattr(self.devices, name)
                if given != shared:
                    raise ValueError(
                        f"{prefix}devices.{name} is {given}, but all stages run on the ranks of the pipeline: set "
                        f"devices.{name} instead"
                    )
        return self


class PipelineRecipe(StagedRecipe):
    """`proximo pipeline`: the three steps; `run` of a stage gives what differs from the pipeline's `run`."""

    run: RunConfig
    """Shared by all stages; each stage writes to its own folder below `run.folder`: sft, reward, ppo."""
    devices: DevicesConfig = DevicesConfig()
    """Shared by all stages; `devices` of a stage gives what differs."""
    sft: SFTRecipe | None = None
    """First step; null skips it."""
    reward: RewardRecipe | None = None
    """Second step; null skips it."""
    ppo: PPORecipe
    """Third step."""

    @model_validator(mode="after")
    def _base_can_be_shared(self) -> Self:
        sharing = [s for s in self.ppo.reward if isinstance(s, ModelRewardConfig) and s.share_base]
        if self.reward is None or all(source.path != "@reward" for source in sharing):
            return self
        if self.reward.model.lora is None:
            raise ValueError("share_base of @reward needs an adapter: give reward.model.lora, or remove share_base")
        if self.reward.model.path != self.ppo.policy.path:
            raise ValueError(
                f"share_base of @reward needs one base, but reward.model.path is {self.reward.model.path} and "
                f"ppo.policy.path is {self.ppo.policy.path}: make them the same, or remove share_base"
            )
        return self
