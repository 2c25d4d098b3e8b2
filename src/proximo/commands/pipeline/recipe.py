"""The recipe of `proximo pipeline`: one recipe per stage."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import model_validator

from proximo.config.devices import DevicesConfig
from proximo.config.recipe import Recipe, TrainerRecipe
from proximo.config.rewards.sources import ModelRewardConfig, PRMRewardConfig
from proximo.config.run import RunConfig
from proximo.config.schema.fields import sections_of
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
    def _share_run_and_devices(cls, data: Any) -> Any:
        """Give every stage the pipeline's `run` and `devices`, with its own overrides, and its own folder."""
        if not isinstance(data, dict):
            return data
        stages = {name: dict(data[name]) for name in cls.stage_names() if isinstance(data.get(name), dict)}
        for key in ("run", "devices"):
            shared = data.get(key)
            for name, stage in stages.items():
                given = stage.get(key) or {}
                if isinstance(shared, dict) and isinstance(given, dict):
                    own = {"folder": f"{shared.get('folder')}/{name}"} if key == "run" else {}
                    if own and given.get("folder", own["folder"]) != own["folder"]:
                        raise ValueError(f"{name}.run.folder follows from run.folder ({own['folder']}): remove it")
                    stage[key] = {**shared, **given, **own}
        return {**data, **stages}

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        names = [stage.run.push.name for _, stage in self.given_stages() if stage.run.push is not None]
        if len(names) > len(set(names)):
            yield (
                f"several stages would push their model to {names[0]}: give push in the run of one stage, such as "
                "ppo.run.push, and not in the run of the pipeline"
            )
        for prefix, stage in self.given_stages():
            for name in ("num", "timeout_seconds"):
                given, shared = getattr(stage.devices, name), getattr(self.devices, name)
                if given != shared:
                    yield (
                        f"{prefix}devices.{name} is {given}, but all stages run on the ranks of the pipeline: set "
                        f"devices.{name} instead"
                    )


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

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        for index, source in enumerate(self.ppo.reward):
            if isinstance(source, ModelRewardConfig) and source.path in ("@reward", "@prm"):
                yield from self._of_reward(source, f"ppo.reward.{index}")

    def _of_reward(self, source: ModelRewardConfig, key: str) -> Iterator[str]:
        """What would fail only when PPO starts, after the stage that trains the model of this reward."""
        name, wanted = ("reward", "model") if source.path == "@reward" else ("prm", "prm")
        stage: RewardRecipe | PRMRecipe | None = getattr(self, name)
        if source.kind != wanted:
            yield f"{key}.kind is {source.kind}, but the model of {source.path} needs kind: {wanted}"
        if source.share_base and stage is not None:
            if stage.model.lora is None:
                yield f"share_base of {source.path} needs an adapter: give {name}.model.lora, or remove share_base"
            if stage.model.path != self.ppo.model.path:
                yield (
                    f"share_base of {source.path} needs one base, but {name}.model.path is {stage.model.path} and "
                    f"ppo.model.path is {self.ppo.model.path}: make them the same, or remove share_base"
                )
        if isinstance(source, PRMRewardConfig) and self.prm is not None:
            trained, adapter = self.prm.data.step_separator, self.prm.model.lora is not None
            if source.step_separator not in ((trained,) if adapter else (trained, None)):
                yield (
                    f"{key}.step_separator is {source.step_separator!r}, but the stage prm learns steps that end with "
                    f"{trained!r} (prm.data.step_separator), which an adapter does not record: make them the same"
                )
