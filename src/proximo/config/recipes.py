"""What one YAML file holds, for each command. Not how it is read (loader.py) nor what is built from it (trainers)."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from proximo.config.data import PreferenceDataConfig, PromptDataConfig, TextDataConfig
from proximo.config.dpo import DPOConfig
from proximo.config.in_backward_check import check_one_pass
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.trunk import trunk_problem
from proximo.config.rewards.kinds import RewardSourceConfig, WatchedSourceConfig
from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import (
    RANDOM_BASE,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalarModelConfig,
    TokenizerConfig,
)
from proximo.config.schema.base import Section


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

    @property
    def rows_per_update(self) -> int:
        """Examples of one update."""
        return self.examples_per_step


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
    score_centring: float = Field(0.0, ge=0)
    """Weight of the squared sum of both scores, which keeps scores near 0; for `bradley_terry`."""
    dropout: bool = False
    """Keep the model's own dropout in training."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="linear")
    """Optimizer of the model."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.score_centring > 0 and self.loss != "bradley_terry":
            raise ValueError(f"score_centring belongs to loss: bradley_terry; with {self.loss} leave it out")
        return self

    @property
    def rows_per_update(self) -> int:
        """Pairs of one update."""
        return self.pairs_per_step


def _check_tokenizer(model: ModelConfig | ScalarModelConfig, key: str, tokenizer: TokenizerConfig) -> None:
    if tokenizer.train_vocab_size is not None:
        raise ValueError("tokenizer.train_vocab_size is for fine-tuning, whose texts it is trained on; give a path")
    if model.config is not None and tokenizer.path is None:
        raise ValueError(f"{key}.config starts without a tokenizer beside it: give tokenizer.path")


def _check_quantisation(model: ModelConfig | ScalarModelConfig, key: str, run: RunConfig) -> None:
    if model.quantisation == "8bit" and run.precision != "bf16":
        raise ValueError(
            f"{key}.quantisation 8bit computes in 8 bits, which rounds more than run.precision {run.precision} stands "
            "for: set run.precision to bf16, or take 4bit"
        )


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
        _check_quantisation(self.model, "model", self.run)
        if self.tokenizer.train_vocab_size is None:
            _check_tokenizer(self.model, "model", self.tokenizer)
        elif self.model.path is not None:
            raise ValueError(
                "tokenizer.train_vocab_size makes a new tokenizer, whose ids mean nothing to trained weights: give "
                "model.config, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = self.sft.examples_per_step * self.data.max_tokens, self.sft.tokens_per_microbatch
        check_one_pass(self.sft.optimizer, longest=longest, budget=budget, section="sft", rows="sft.examples_per_step")
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
        if self.model.init_from != "path":
            raise ValueError("model needs path (trained weights) or config (a random start)")
        _check_quantisation(self.model, "model", self.run)
        _check_tokenizer(self.model, "model", self.tokenizer)
        return self

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = 2 * self.reward.pairs_per_step * self.data.max_tokens, self.reward.tokens_per_microbatch
        check_one_pass(
            self.reward.optimizer, longest=longest, budget=budget, section="reward", rows="reward.pairs_per_step"
        )
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
        _check_quantisation(self.model, "model", self.run)
        return self

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = 2 * self.dpo.pairs_per_step * self.data.max_tokens, self.dpo.tokens_per_microbatch
        check_one_pass(self.dpo.optimizer, longest=longest, budget=budget, section="dpo", rows="dpo.pairs_per_step")
        return self


class RewardSection(Section):
    """A file that has the `reward` section of a PPO recipe alone, for `proximo serve-reward`."""

    reward: tuple[Annotated[RewardSourceConfig, Field(discriminator="kind")], ...] = Field(min_length=1)
    """What is served: the weighted sum of these sources."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_names(self.reward)
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
    ptx_data: TextDataConfig | None = None
    """Texts that the policy goes on learning, with the weight that `ppo.ptx` gives them."""
    reward: tuple[Annotated[RewardSourceConfig, Field(discriminator="kind")], ...] = Field(min_length=1)
    """What is rewarded: the weighted sum of these sources."""
    gold: Annotated[WatchedSourceConfig, Field(discriminator="kind")] | None = None
    """A score that is only watched, never trained on: shown beside the reward to uncover over-optimisation."""
    ppo: PPOConfig = PPOConfig()
    """How it learns."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_tokenizer(self.policy, "policy", self.tokenizer)
        _check_names(self.reward)
        if all(source.weight == 0 for source in self.reward):
            raise ValueError("every source of reward has weight 0, so every score would be 0: give one another weight")
        names = [source.name for source in self.reward]
        if not self.ppo.task_reward_is_of(names):
            raise ValueError(
                f"ppo.task_reward is {self.ppo.task_reward}, which is no reward source and no part of one; sources: "
                f"{', '.join(names)}"
            )
        dense = [source.name for source in self.reward if source.kind == "model" and source.dense != "none"]
        if dense and not self.ppo.advantage.goes_by_token:
            raise ValueError(
                f"reward source {dense[0]} rewards single tokens, but ppo.advantage {self.ppo.advantage.estimator} "
                "judges a response as a whole: use gae or a return to go, or set dense: none"
            )
        if self.ppo.uses_critic and self.value.init_from == "reward" and all(s.kind != "model" for s in self.reward):
            raise ValueError("value.init_from is reward, but no reward source is of kind model")
        _check_reference(self.policy, "policy", self.reference)
        if (
            self.ppo.uses_critic
            and self.policy.config is not None
            and self.value.lora
            and self.value.init_from == "policy"
        ):
            raise ValueError(f"value starts from the policy, which is a random start: {RANDOM_BASE}")
        if self.policy.lora is not None and self.ppo.kl.reference_every_steps is not None:
            raise ValueError(
                "with policy.lora the reference is the base below the adapter, which cannot move: remove "
                "ppo.kl.reference_every_steps, or train without LoRA"
            )
        if self.reference is not None and self.reference.lora is not None:
            raise ValueError("a reference is not trained: remove reference.lora")
        return self

    @model_validator(mode="after")
    def _loss_fits_the_run(self) -> Self:
        if problem := trunk_problem(self.ppo, shares_trunk=self.value.init_from == "trunk"):
            raise ValueError(problem)
        if self.ppo.policy_loss.asks_the_sampler and self.run.precision == "float32":
            weighs = self.ppo.policy_loss.behaviour_weight != "none"
            raise ValueError(
                f"ppo.policy_loss.{'behaviour_weight' if weighs else 'rejection'} weighs the policy against its "
                "sampler, but with run.precision float32 their log-probs are the same, and every weight 1: set "
                "run.precision to bf16, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _texts_with_their_weight(self) -> Self:
        if (self.ptx_data is None) != (self.ppo.ptx is None):
            missing = "ptx_data (which texts)" if self.ptx_data is None else "ppo.ptx (their weight)"
            raise ValueError(f"texts in the policy's updates need both ptx_data and ppo.ptx: give {missing} too")
        if self.ptx_data is not None and (self.ptx_data.held_out_rows or self.ptx_data.evaluation_sources):
            raise ValueError(
                "nothing is evaluated on ptx_data: remove its held_out_rows and evaluation_sources; `proximo sft` "
                "measures the loss on held-out texts"
            )
        return self

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest = self.ppo.responses_per_update * (self.data.max_prompt_tokens + self.ppo.rollout.max_new_tokens)
        value_optimizer = self.ppo.value_optimizer if self.ppo.uses_critic else None
        for optimizer in (self.ppo.policy_optimizer, value_optimizer):
            check_one_pass(
                optimizer,
                longest=longest,
                budget=self.ppo.tokens_per_microbatch,
                section="ppo",
                rows="ppo.minibatch_responses",
            )
        return self

    @model_validator(mode="after")
    def _can_be_quantised(self) -> Self:
        _check_quantisation(self.policy, "policy", self.run)
        _check_quantisation(self.value, "value", self.run)
        whole = self.ppo.uses_critic and self.value.init_from == "policy" and self.value.lora is None
        if self.policy.quantisation != "none" and whole:
            raise ValueError(
                "value.init_from is policy, whose quantised base cannot train: give value.lora, or value.path with a "
                "model of its own"
            )
        return self

    @model_validator(mode="after")
    def _base_can_be_shared(self) -> Self:
        scorers = [source for source in self.reward if isinstance(source, ModelRewardConfig)]
        if any(scorer.share_base for scorer in scorers) and self.policy.lora is None:
            raise ValueError(
                "share_base of a reward model needs policy.lora: a policy that trains in full changes the weights that "
                "the reward model reads"
            )
        adapted = self.ppo.uses_critic and self.value.init_from == "reward" and scorers and scorers[0].share_base
        if adapted and (self.value.lora is not None or self.value.frozen_layers):
            raise ValueError(
                "value.init_from is reward, whose adapter the value model takes over and trains: remove value.lora and "
                "value.frozen_layers"
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


def _check_names(sources: Sequence[RewardSourceConfig]) -> None:
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"reward sources need different names, got {', '.join(names)}")
