"""What one YAML file holds, for each command. Not how it is read (loader.py) nor what is built from it (trainers)."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from proximo.config.base import Section
from proximo.config.data import PreferenceDataConfig, PromptDataConfig, TextDataConfig
from proximo.config.dpo import DPOConfig
from proximo.config.ppo import FunctionRewardConfig, PPOConfig, RewardSourceConfig
from proximo.config.run import (
    RANDOM_BASE,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalarModelConfig,
    TokenizerConfig,
)


class SFTConfig(Section):
    """Supervised fine-tuning."""

    num_epochs: float = Field(1.0, gt=0)
    """Passes over the data; a fraction stops inside one."""
    examples_per_step: int = Field(32, ge=1)
    """Examples of one update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    dropout: bool = False
    """Keep the model's own dropout in training."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, schedule="cosine")
    """Optimizer of the model."""


class RewardTrainingConfig(Section):
    """Training of a reward model on preference pairs."""

    num_epochs: float = Field(1.0, gt=0)
    """Passes over the pairs; more than one overfits soon."""
    pairs_per_step: int = Field(32, ge=1)
    """Pairs of one update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    loss: Literal["bradley_terry", "divergence_window"] = "bradley_terry"
    """`bradley_terry` compares the scores of the last tokens; `divergence_window` those of all tokens from where
    the two answers part (as DeepSpeed-Chat)."""
    centring: float = Field(0.0, ge=0)
    """Weight of the squared sum of both scores, which keeps scores near 0; for `bradley_terry`."""
    dropout: bool = False
    """Keep the model's own dropout in training."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="linear")
    """Optimizer of the model."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.centring > 0 and self.loss != "bradley_terry":
            raise ValueError(f"centring belongs to loss: bradley_terry; with {self.loss} leave it out")
        return self


def _check_tokenizer(model: ModelConfig | ScalarModelConfig, key: str, tokenizer: TokenizerConfig) -> None:
    if tokenizer.train_vocab_size is not None:
        raise ValueError("tokenizer.train_vocab_size is for fine-tuning, whose texts it is trained on; give a path")
    if model.config is not None and tokenizer.path is None:
        raise ValueError(f"{key}.config starts without a tokenizer beside it: give tokenizer.path")


def _check_reference(model: ModelConfig, key: str, reference: ModelConfig | None) -> None:
    if model.lora is not None and reference is not None:
        raise ValueError(f"with {key}.lora the base is the reference: remove reference, or train without LoRA")
    if reference is not None and reference.lora is not None:
        raise ValueError("a reference is not trained: remove reference.lora")


class SFTRecipe(Section):
    """`proximo sft`."""

    run: RunConfig
    """Where and on what."""
    model: ModelConfig
    """The model that is trained."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Its tokenizer."""
    data: TextDataConfig
    """What it learns from."""
    sft: SFTConfig = SFTConfig()
    """How it learns."""

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Self:
        if self.tokenizer.train_vocab_size is None:
            _check_tokenizer(self.model, "model", self.tokenizer)
        return self


class RewardRecipe(Section):
    """`proximo reward`."""

    run: RunConfig
    """Where and on what."""
    model: ScalarModelConfig
    """The backbone that the reward model starts from."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Its tokenizer."""
    data: PreferenceDataConfig
    """Preference pairs."""
    reward: RewardTrainingConfig = RewardTrainingConfig()
    """How it learns."""

    @model_validator(mode="after")
    def _starts_somewhere(self) -> Self:
        if self.model.start != "path":
            raise ValueError("model needs path (trained weights) or config (a random start)")
        _check_tokenizer(self.model, "model", self.tokenizer)
        return self


class DPORecipe(Section):
    """`proximo dpo`."""

    run: RunConfig
    """Where and on what."""
    model: ModelConfig
    """The policy that is trained, best a fine-tuned one; a frozen copy (or its base, with LoRA) is the reference."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The policy's tokenizer."""
    reference: ModelConfig | None = None
    """Another reference than a copy of the policy; it must share the policy's vocabulary."""
    data: PreferenceDataConfig
    """Preference pairs."""
    dpo: DPOConfig = DPOConfig()
    """How it learns."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_tokenizer(self.model, "model", self.tokenizer)
        _check_reference(self.model, "model", self.reference)
        return self


class PPORecipe(Section):
    """`proximo ppo`."""

    run: RunConfig
    """Where and on what."""
    policy: ModelConfig
    """The model that is trained; a frozen copy (or its base, with LoRA) is the reference."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The policy's tokenizer."""
    reference: ModelConfig | None = None
    """Another reference than a copy of the policy; it must share the policy's vocabulary."""
    value: ScalarModelConfig = ScalarModelConfig()
    """The critic; unused where `ppo.advantage` needs none."""
    data: PromptDataConfig
    """Prompts."""
    reward: tuple[Annotated[RewardSourceConfig, Field(discriminator="kind")], ...] = Field(min_length=1)
    """What is rewarded: the weighted sum of these sources."""
    gold: FunctionRewardConfig | None = None
    """A score that is only watched, never trained on: shown beside the reward to uncover over-optimisation."""
    ppo: PPOConfig = PPOConfig()
    """How it learns."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_tokenizer(self.policy, "policy", self.tokenizer)
        names = [source.name for source in self.reward]
        if len(set(names)) < len(names):
            raise ValueError(f"reward sources need different names, got {', '.join(names)}")
        if self.ppo.uses_critic and self.value.start == "reward" and all(s.kind != "model" for s in self.reward):
            raise ValueError("value.start is reward, but no reward source is of kind model")
        _check_reference(self.policy, "policy", self.reference)
        if self.ppo.uses_critic and self.policy.config is not None and self.value.lora and self.value.start == "policy":
            raise ValueError(f"value starts from the policy, which is a random start: {RANDOM_BASE}")
        if self.policy.lora is not None and self.ppo.kl.reference_every_steps is not None:
            raise ValueError(
                "with policy.lora the reference is the base below the adapter, which cannot move: remove "
                "ppo.kl.reference_every_steps, or train without LoRA"
            )
        if self.policy.lora is not None and self.ppo.average_decay is not None:
            raise ValueError("ppo.average_decay averages whole models: remove it, or train without LoRA")
        if self.ppo.policy_loss.behaviour_weight != "none" and self.run.precision == "float32":
            raise ValueError(
                "ppo.policy_loss.behaviour_weight weighs the policy against its sampler, but with run.precision "
                "float32 their log-probs are the same, and every weight 1: set run.precision to bf16, or leave it out"
            )
        return self


class PipelineRecipe(Section):
    """`proximo pipeline`: the three steps; `run` of a stage gives what differs from the pipeline's `run`."""

    run: RunConfig
    """Shared by all stages; each writes in its own folder below `run.folder`: sft, reward, ppo."""
    sft: SFTRecipe | None = None
    """First step; null skips it."""
    reward: RewardRecipe | None = None
    """Second step; null skips it."""
    ppo: PPORecipe
    """Third step."""

    @model_validator(mode="before")
    @classmethod
    def _share_run(cls, data: Any) -> Any:
        """Every stage runs with the pipeline's `run`, in a folder of its own, with its own changes on top."""
        if not isinstance(data, dict) or not isinstance(data.get("run"), dict):
            return data
        shared = data["run"]
        for name in ("sft", "reward", "ppo"):
            given = (data[name].get("run") or {}) if isinstance(data.get(name), dict) else {}
            if given.get("folder", f"{shared.get('folder')}/{name}") != f"{shared.get('folder')}/{name}":
                raise ValueError(
                    f"{name}.run.folder follows from run.folder ({shared.get('folder')}/{name}): remove it"
                )
        stages = {
            name: {
                **data[name],
                "run": {**shared, **(data[name].get("run") or {}), "folder": f"{shared.get('folder')}/{name}"},
            }
            for name in ("sft", "reward", "ppo")
            if isinstance(data.get(name), dict)
        }
        return {**data, **stages}
