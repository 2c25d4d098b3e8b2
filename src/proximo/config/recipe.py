"""What the recipes of all commands have in common. What one of them holds stands beside its trainer."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from proximo.config.rewards.kinds import RewardSourceConfig
from proximo.config.run import ModelConfig, OptimizerConfig, RunConfig, ScalarModelConfig, TokenizerConfig
from proximo.config.schema.base import Section
from proximo.errors import UserError


class Recipe(Section):
    """One YAML file."""

    run: RunConfig
    """Where and on what."""

    def stages(self) -> "Mapping[str, TrainerRecipe | None]":
        """Recipes of trainers by their key, in the order in which they run; None for one that is left out.

        The recipe of a single trainer is its own only stage, under the key "".
        """
        raise NotImplementedError

    def given_stages(self) -> "Iterator[tuple[str, TrainerRecipe]]":
        """Those that are not left out, each with what stands before its keys: `sft.`, or nothing."""
        for name, stage in self.stages().items():
            if stage is not None:
                yield f"{name}." if name else "", stage


class TrainerRecipe(Recipe):
    """The recipe of one trainer. Everything here follows from its sections; a trainer says what differs."""

    memory_settings: ClassVar[str] = "take smaller batches, or a smaller model"
    """What to change where memory runs out. None of it changes a result."""
    may_change: ClassVar[tuple[str, ...]] = ()
    """Keys of its own that may change on resume: they do not affect the steps already taken."""

    def stages(self) -> "Mapping[str, TrainerRecipe | None]":
        return {"": self}

    def sections(self) -> dict[str, Section]:
        """Its sections by key, items of lists by number (`reward.0`). Without those that this run does not use."""
        found: dict[str, Section] = {}
        for name, value in self:
            items = enumerate(value) if isinstance(value, tuple) else ()
            found |= {name: value} if isinstance(value, Section) else {}
            found |= {f"{name}.{index}": item for index, item in items if isinstance(item, Section)}
        return found

    def models(self) -> dict[str, ModelConfig | ScalarModelConfig]:
        """The sections that say where a model comes from, by key; what is trained comes first."""
        return {key: each for key, each in self.sections().items() if isinstance(each, ModelConfig | ScalarModelConfig)}

    def optimizers(self) -> dict[str, OptimizerConfig]:
        """The optimizers that this run uses, by key."""
        return {
            f"{key}.{name}": value
            for key, section in self.sections().items()
            for name, value in section
            if isinstance(value, OptimizerConfig)
        }

    def reward_sources(self) -> tuple[RewardSourceConfig, ...]:
        """What it is rewarded by, where it is."""
        return ()

    def longest_sequence(self) -> dict[str, int]:
        """The keys that limit the tokens of a sequence: of an example, or of a prompt and of what is written to it."""
        return {}

    def with_evaluation_settings(self, changes: Mapping[str, Any]) -> Self:
        """The recipe with other settings of how held-out prompts are answered. Raises UserError where none are."""
        names = " and ".join(changes)
        raise UserError(f"{names} change how responses are sampled, and this run samples none: leave them out")


def check_tokenizer(model: ModelConfig | ScalarModelConfig, key: str, tokenizer: TokenizerConfig) -> None:
    """Raises ValueError for a tokenizer that is not there before training."""
    if tokenizer.train_vocab_size is not None:
        raise ValueError("tokenizer.train_vocab_size is for fine-tuning, whose texts it is trained on; give a path")
    if model.config is not None and tokenizer.path is None:
        raise ValueError(f"{key}.config starts without a tokenizer beside it: give tokenizer.path")


def check_quantisation(model: ModelConfig | ScalarModelConfig, key: str, run: RunConfig) -> None:
    """Raises ValueError for a base that is stored in fewer bits than the run computes with."""
    if model.quantisation == "8bit" and run.precision != "bf16":
        raise ValueError(
            f"{key}.quantisation 8bit computes in 8 bits, which rounds more than run.precision {run.precision} stands "
            "for: set run.precision to bf16, or take 4bit"
        )


def check_reference(model: ModelConfig, key: str, reference: ModelConfig | None) -> None:
    """Raises ValueError for a reference that is trained, or beside an adapter whose base is the reference."""
    if model.lora is not None and reference is not None:
        raise ValueError(f"with {key}.lora the base is the reference: remove reference, or train without LoRA")
    if reference is not None and reference.lora is not None:
        raise ValueError("a reference is not trained: remove reference.lora")


def check_one_pass(optimizer: OptimizerConfig | None, *, longest: int, budget: int, section: str, rows: str) -> None:
    """Raises ValueError where weights step in the backward pass, and an update may be cut into micro-batches.

    longest: tokens of the longest update that the data may hold; budget: tokens of a micro-batch; rows: the key with
    the number of rows of an update.
    """
    if optimizer is None or not optimizer.in_backward or longest <= budget:
        return
    raise ValueError(
        "in_backward steps each weight in the backward pass, so an update must be one micro-batch, and the longest one "
        f"may have {longest:,} tokens: set {section}.tokens_per_microbatch (now {budget:,}) to that, lower {rows}, or "
        "set in_backward: false"
    )
