"""The recipe of `proximo pipeline`: one recipe per stage."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from proximo.config.devices import DevicesConfig
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.config.rewards.sources import ModelRewardConfig, PRMRewardConfig
from proximo.config.run import RunConfig, ScalarModelConfig
from proximo.config.schema.fields import sections_of
from proximo.config.stages import MARK
from proximo.ppo.recipe import PPORecipe
from proximo.supervised.prm_recipe import PRMRecipe
from proximo.supervised.reward_recipe import RewardRecipe
from proximo.supervised.sft_recipe import SFTRecipe


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
    """`proximo pipeline`: up to four stages; `run` of a stage gives its differences from the pipeline's `run`."""

    run: RunConfig
    """Shared by all stages; each stage writes to its own folder below `run.folder`: sft, reward, prm, ppo."""
    devices: DevicesConfig = DevicesConfig()
    """Shared by all stages; `devices` of a stage gives its differences. For several devices or machines."""
    sft: SFTRecipe | None = None
    """Fine-tuning; null skips it."""
    reward: RewardRecipe | None = None
    """The reward model; null skips it."""
    prm: PRMRecipe | None = None
    """The process reward model; null skips it."""
    ppo: PPORecipe
    """PPO, the last stage."""

    @model_validator(mode="after")
    def _rewards_read_their_stages(self) -> Self:
        """Raises ValueError for rewards that would fail only when PPO starts, after the earlier stages."""
        for index, source in enumerate(self.ppo.reward):
            if not isinstance(source, ModelRewardConfig) or source.path not in ("@reward", "@prm"):
                continue
            key, wanted = f"ppo.reward.{index}", "model" if source.path == "@reward" else "prm"
            if source.kind != wanted:
                raise ValueError(f"{key}.kind is {source.kind}, but the model of {source.path} needs kind: {wanted}")
            stage = self.reward if source.path == "@reward" else self.prm
            if source.share_base and stage is not None:
                self._check_base(source.path, stage.model)
            if isinstance(source, PRMRewardConfig) and self.prm is not None:
                self._check_separator(source, key, self.prm)
        return self

    def _check_base(self, path: str, model: ScalarModelConfig) -> None:
        key = f"{path.removeprefix(MARK)}.model"
        if model.lora is None:
            raise ValueError(f"share_base of {path} needs an adapter: give {key}.lora, or remove share_base")
        if model.path != self.ppo.model.path:
            raise ValueError(
                f"share_base of {path} needs one base, but {key}.path is {model.path} and "
                f"ppo.model.path is {self.ppo.model.path}: make them the same, or remove share_base"
            )

    def _check_separator(self, source: PRMRewardConfig, key: str, stage: PRMRecipe) -> None:
        trained = stage.data.step_separator
        if source.step_separator is None and stage.model.lora is not None:
            raise ValueError(
                f"prm trains an adapter, which does not record its separator: set {key}.step_separator to that "
                f"of prm.data, {trained!r}"
            )
        if source.step_separator not in (None, trained):
            raise ValueError(
                f"{key}.step_separator is {source.step_separator!r}, but the stage prm learns steps that end with "
                f"{trained!r} (prm.data.step_separator): make them the same"
            )
