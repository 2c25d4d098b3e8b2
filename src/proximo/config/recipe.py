"""Base classes of recipes. The recipe of a trainer is declared beside it."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from proximo.config.devices import ROLES, DevicesConfig, PlacedRole, devices_conflicts
from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.run import (
    WHOLE_WEIGHTS_TRAIN,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalarModelConfig,
    TokenizerConfig,
)
from proximo.config.schema.base import Section
from proximo.errors import UserError


class Recipe(Section):
    """The contents of one recipe file."""

    run: RunConfig
    """Run folder, device, seed, checkpoints and logging."""
    devices: DevicesConfig = DevicesConfig()
    """The ranks of the run, and how its models lie on them. For runs on several devices or machines."""

    def conflicts(self) -> Iterator[str]:
        if self.devices.num is not None:
            yield from devices_conflicts(self, self.devices.num)

    @abstractmethod
    def stages(self) -> "Mapping[str, TrainerRecipe | None]":
        """Key of a stage -> its trainer recipe, in the order of execution; None for a stage that is left out.

        The recipe of a single trainer has one stage, itself, under the key "".
        """

    def given_stages(self) -> "Iterator[tuple[str, TrainerRecipe]]":
        """The stages that are not left out, each with the prefix of its keys: `sft.`, or "" for a single trainer."""
        for name, stage in self.stages().items():
            if stage is not None:
                yield f"{name}." if name else "", stage

    @property
    def num_ranks(self) -> int:
        """How many ranks it starts on this machine; the same for all stages of a pipeline."""
        return max((stage.devices.num or 1 for _, stage in self.given_stages()), default=1)


class TrainerRecipe(Recipe):
    """The recipe of one trainer.

    The methods derive their results from its sections; a trainer overrides what differs.
    """

    memory_settings: ClassVar[str] = "take smaller batches, or a smaller model"
    """What to change when memory runs out. None of it changes the results."""
    may_change: ClassVar[tuple[str, ...]] = ()
    """Keys of this recipe that may change on resume, since they do not affect the steps already taken."""
    reward_settings: ClassVar[tuple[str, ...]] = ()
    """Keys of the sources of scores, which may change on resume with `--allow-changed-rewards`."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.devices.reference.addresses and any(each.role == "reference" for each in self.placed_roles()):
            yield "devices.reference.addresses is for PPO, and this trainer loads its reference: remove the addresses"

    def stages(self) -> "Mapping[str, TrainerRecipe | None]":
        return {"": self}

    def sections(self) -> dict[str, Section]:
        """Key -> section, with list items by index (`reward.0`).

        Trainers leave out sections that the run does not use.
        """
        sections: dict[str, Section] = {}
        for name, value in self:
            items = enumerate(value) if isinstance(value, tuple) else ()
            sections |= {name: value} if isinstance(value, Section) else {}
            sections |= {f"{name}.{index}": item for index, item in items if isinstance(item, Section)}
        return sections

    def models(self) -> dict[str, ModelConfig | ScalarModelConfig]:
        """Key -> section of a model. Trained models come first."""
        return {
            key: section
            for key, section in self.sections().items()
            if isinstance(section, ModelConfig | ScalarModelConfig)
        }

    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Key -> optimizer section that this run uses."""
        return {
            f"{key}.{name}": value
            for key, section in self.sections().items()
            for name, value in section
            if isinstance(value, OptimizerConfig)
        }

    def placed_roles(self) -> tuple[PlacedRole, ...]:
        """The models that the run has, as roles of the section `devices`."""
        optimizers = self.optimizers()
        return tuple(
            PlacedRole(role=key, key=key, model=section)
            if key in ROLES and key != "model"
            else PlacedRole(role="model", key=key, model=section, trains=True, optimizers=optimizers)
            for key, section in self.models().items()
        )

    def reward_sources(self) -> tuple[RewardSourceConfig, ...]:
        """The reward sources of the recipe; empty if the trainer has none."""
        return ()

    def longest_sequence(self) -> dict[str, int]:
        """Key of a length limit -> tokens: one key for an example, or one for the prompt and one for the response."""
        return {}

    def with_evaluation_settings(self, changes: Mapping[str, Any]) -> Self:
        """A copy with changed settings of evaluation sampling. Raises UserError if the trainer samples no responses."""
        raise UserError(
            f"{' and '.join(changes)}: how to sample responses, but this run samples none; leave such settings out"
        )


def tokenizer_conflicts(model: ModelConfig | ScalarModelConfig, key: str, tokenizer: TokenizerConfig) -> Iterator[str]:
    """A tokenizer that does not exist before training."""
    if tokenizer.train_vocab_size is not None:
        yield (
            "tokenizer.train_vocab_size works in fine-tuning only, which has the texts to train it on; "
            "set tokenizer.path"
        )
    if model.config is not None and tokenizer.path is None:
        yield f"{key}.config has no tokenizer: set tokenizer.path"


def quantisation_conflicts(
    model: ModelConfig | ScalarModelConfig, key: str, run: RunConfig, *, trains: bool = True
) -> Iterator[str]:
    """A quantised base that would train, and 8-bit weights in a run that is not in bf16.

    `trains`: whether the model learns, with its adapter if it has one.
    """
    if trains and model.quantisation != "none" and model.lora is None:
        yield f"{key}.{WHOLE_WEIGHTS_TRAIN}"
    if model.quantisation == "8bit" and run.precision != "bf16":
        yield (
            f"{key}.quantisation 8bit rounds more than run.precision {run.precision} allows: set run.precision to "
            "bf16, or use 4bit"
        )


def reference_conflicts(reference: ModelConfig | None, run: RunConfig) -> Iterator[str]:
    """A reference that is to train, or with 8-bit weights in a run that is not in bf16."""
    if reference is None:
        return
    for name in ("balancing_coefficient", "lora"):
        if getattr(reference, name) is not None:
            yield f"the reference does not train: remove reference.{name}"
    yield from quantisation_conflicts(reference, "reference", run, trains=False)


def one_pass_conflicts(
    optimizer: OptimizerConfig | None, *, longest: int, budget: int, section: str, rows: str
) -> Iterator[str]:
    """An optimizer that steps in the backward pass, where an update may need several micro-batches.

    `longest`: tokens of the longest possible update. `budget`: tokens of a micro-batch. `rows`: the key with the number
    of rows of an update.
    """
    if optimizer is not None and optimizer.in_backward and longest > budget:
        yield (
            "in_backward updates each weight in the backward pass, so an update must be one micro-batch, but the "
            f"longest one may have {longest:,} tokens: set {section}.tokens_per_microbatch (now {budget:,}) to that, "
            f"lower {rows}, or set in_backward: false"
        )
