"""The recipe of `proximo ppo`."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from proximo.config.data import PromptDataConfig, TextDataConfig
from proximo.config.devices import PlacedRole
from proximo.config.engine import MAY_CHANGE as ENGINE_MAY_CHANGE
from proximo.config.engine import EngineConfig, LocalEngineConfig, ServersConfig, engine_named
from proximo.config.environment import ENVIRONMENT, ROWS, EnvironmentConfig, VerifiersEnvironmentConfig, with_rows
from proximo.config.ppo.implied import with_policy_rate
from proximo.config.ppo.losses import ENDING_GUARDS
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.run_checks import distillation_problem, environment_problem, served_reference_problem
from proximo.config.recipe import (
    TrainerRecipe,
    one_pass_conflicts,
    quantisation_conflicts,
    reference_conflicts,
    tokenizer_conflicts,
)
from proximo.config.rewards.kinds import RewardSourceConfig, WatchedSourceConfig, conflicts_of_names
from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import (
    RANDOM_BASE,
    ModelConfig,
    OptimizerConfig,
    ScalarModelConfig,
    TokenizerConfig,
)
from proximo.config.schema.base import Section
from proximo.errors import ConfigError, UserError


class PPORecipe(TrainerRecipe):
    """What `proximo ppo` reads: the roles, the rewards, the prompts, and how PPO trains on them."""

    memory_settings: ClassVar[str] = PPOConfig.memory_settings
    # A larger number of steps also stretches a decaying learning rate.
    may_change: ClassVar[tuple[str, ...]] = (
        "ppo.num_steps",
        "ppo.rollout.max_num_seqs",
        *(f"ppo.guards.{name}" for name in ENDING_GUARDS),
        *(f"engine.{name}" for name in ENGINE_MAY_CHANGE),
        *(f"devices.reference.{name}" for name in ServersConfig.model_fields),
    )
    reward_settings: ClassVar[tuple[str, ...]] = ("reward", "gold")

    model: ModelConfig
    """The policy: the model to train. Without `reference`, a frozen copy of it is the reference, or its base with
    LoRA."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The policy's tokenizer."""
    reference: ModelConfig | None = None
    """Another reference than a copy of the policy, such as a teacher (docs/distillation.md); it must have the policy's
    vocabulary."""
    value: ScalarModelConfig = ScalarModelConfig()
    """The critic; unused if `ppo.advantage` needs none."""
    data: PromptDataConfig
    """Prompts. With an `environment` each row begins an episode, and `sources` may be left out."""
    environment: Annotated[EnvironmentConfig, Field(discriminator="kind")] | None = None
    """Where the policy acts over several turns, and what rewards it; null for prompts with one answer.
    docs/environments.md."""
    ptx_data: TextDataConfig | None = None
    """Texts that are mixed into the updates of the policy, weighted by `ppo.ptx`."""
    reward: tuple[Annotated[RewardSourceConfig, Field(discriminator="kind")], ...]
    """What is rewarded: the weighted sum of these sources. An empty list rewards nothing: the policy then learns from
    `reference` alone (docs/distillation.md). With an `environment` they are added to its rewards, and may be left
    out."""
    gold: Annotated[WatchedSourceConfig, Field(discriminator="kind")] | None = None
    """A score that is only watched, never trained on: shown beside the reward to uncover over-optimisation."""
    engine: Annotated[EngineConfig, Field(discriminator="kind")] = LocalEngineConfig()
    """What samples the responses."""
    ppo: PPOConfig = PPOConfig()
    """Training settings."""

    @model_validator(mode="before")
    @classmethod
    def _with_implied(cls, values: Any) -> Any:
        return with_rows(with_policy_rate(values))

    @field_validator("engine", mode="before")
    @classmethod
    def _is_local_by_default(cls, engine: Any) -> Any:
        return {"kind": "local"} | engine if isinstance(engine, dict) else engine

    def conflicts(self) -> Iterator[str]:
        yield from chain(super().conflicts(), tokenizer_conflicts(self.model, "model", self.tokenizer))
        yield from chain(self._of_rewards(), self._of_steps(), self._of_models(), self._of_bases())

    def _of_rewards(self) -> Iterator[str]:
        yield from conflicts_of_names(self.reward)
        if self.reward and not self.environment and all(source.weight == 0 for source in self.reward):
            yield "every reward source has weight 0, so every score would be 0: set another weight"
        names = [*([ENVIRONMENT] if self.environment else []), *(source.name for source in self.reward)]
        if names and not self.ppo.task_reward_is_of(names):
            yield (
                f"ppo.task_reward is {self.ppo.task_reward}, which is no reward source and no part of one; sources: "
                f"{', '.join(names)}"
            )
        scorers = [source for source in self.reward if isinstance(source, ModelRewardConfig)]
        dense = [source.name for source in scorers if source.dense != "none"]
        if dense and not self.ppo.advantage.is_per_token:
            yield (
                f"reward source {dense[0]} has token-level rewards, but ppo.advantage "
                f"{self.ppo.advantage.kind} uses one advantage per response: use gae or a return to go, or "
                "set dense: none"
            )
        if self.ppo.uses_critic and self.value.init_from == "reward" and not scorers:
            yield "value.init_from is reward, but no reward source is of kind model"
        if not self.is_rewarded and (problem := distillation_problem(self.ppo, has_teacher=self.reference is not None)):
            yield problem
        if not self.is_rewarded and self.data.filter is not None:
            yield (
                "data.filter chooses prompts by their scores, and without a reward there are none: remove it, or give "
                "a reward"
            )
        names = [source.name for source in scorers]
        if self.environment and (problem := environment_problem(self.ppo, reads_text=names)):
            yield f"environment: {problem}"
        sources = (*self.data.sources, *(self.data.evaluation_sources or ()))
        if isinstance(self.environment, VerifiersEnvironmentConfig) and any(each.function != ROWS for each in sources):
            yield (
                "an environment of kind verifiers plays the tasks of its taskset, the first environment.num_rows of "
                "them, and reads no data: remove data.sources and data.evaluation_sources"
            )
        if any(source.name == ENVIRONMENT for source in self.reward):
            yield f"{ENVIRONMENT} is the name of what an environment gives: name the reward source otherwise"

    def _of_steps(self) -> Iterator[str]:
        if problem := self.ppo.trunk_problem(shares_trunk=self.value.init_from == "trunk"):
            yield problem
        if self.ppo.needs_sampled_logprobs and self.sampler_is_exact:
            weighs = self.ppo.policy_loss.behaviour_weight is not None
            yield (
                f"ppo.policy_loss.{'behaviour_weight' if weighs else 'rejection'} weighs the policy against its "
                "sampler, but with run.precision float32 and the built-in engine their log-probs are the same, "
                "and every weight 1: leave it out, or set run.precision to bf16, engine.kind to vllm or "
                "ppo.rollout.staleness"
            )
        if self.data.filter is not None and self.ppo.resamples:
            yield (
                "data.filter and ppo.advantage.zero_variance_groups: resample both choose the prompts of a step: "
                "remove data.filter, or use exclude"
            )
        if self.ppo.rollout.staleness and self.data.filter is not None:
            yield (
                "data.filter chooses the prompts of a step by all scores before it, but ppo.rollout.staleness samples "
                "them earlier: remove data.filter, or set staleness to 0"
            )
        if self.ppo.rollout.staleness and self.engine.kind == "vllm" and self.engine.sleep:
            yield (
                "engine.sleep gives up memory while nothing is sampled, but with ppo.rollout.staleness servers sample "
                "while the learner trains: set one of them to its default"
            )
        if (self.ptx_data is None) != (self.ppo.ptx is None):
            missing = "ptx_data (which texts)" if self.ptx_data is None else "ppo.ptx (their weight)"
            yield f"texts in the policy's updates need both ptx_data and ppo.ptx: set {missing} too"
        if self.ptx_data is not None and (self.ptx_data.held_out_rows or self.ptx_data.evaluation_sources):
            yield (
                "ptx_data is not used for evaluation: remove its held_out_rows and evaluation_sources; `proximo "
                "sft` measures the loss on held-out texts"
            )
        longest = self.ppo.responses_per_update * sum(self.longest)
        value_optimizer = self.ppo.value_optimizer if self.ppo.uses_critic else None
        for optimizer in (self.ppo.policy_optimizer, value_optimizer):
            budget, rows = self.ppo.tokens_per_microbatch, "ppo.minibatch_responses"
            yield from one_pass_conflicts(optimizer, longest=longest, budget=budget, section="ppo", rows=rows)

    def _of_models(self) -> Iterator[str]:
        if self.model.lora is not None and self.ppo.kl.reference_every_steps is not None:
            yield (
                "with model.lora the reference is the base, which cannot move: remove "
                "ppo.kl.reference_every_steps, or train without LoRA"
            )
        yield from reference_conflicts(self.reference, self.run)
        scorers = {f"reward.{i}": each for i, each in enumerate(self.reward) if isinstance(each, ModelRewardConfig)}
        shared = {name: (scorer.device, name) for name, scorer in scorers.items() if scorer.share_base}
        if self._shares_weights(self.value):
            shared["value"] = self.devices.value.device, "devices.value"
        if self.reference is None:
            shared["the reference"] = self.devices.reference.device, "devices.reference"
        for name, (device, key) in shared.items():
            if device is not None:
                yield (
                    f"{name} is made from the policy's own weights, so it is where the policy is: remove {key}.device"
                )
        places = [self.devices.policy.device or self.run.device, self.devices.reference.device or self.run.device]
        if self.reference is not None and self.ppo.kl.full_in is not None and places[0] != places[1]:
            yield (
                "ppo.kl.estimator full compares all probabilities of policy and reference at once, but these are on "
                f"{places[0]} and {places[1]}: put both on one device, or use "
                f"{'weighted_k3' if self.ppo.kl.full_in == 'loss' else 'k1'}"
            )
        yield from self._of_served_reference()

    def _of_served_reference(self) -> Iterator[str]:
        """What the run asks of a reference that servers have, and they cannot give."""
        if not (servers := self.devices.reference.addresses):
            return
        if problem := served_reference_problem(self.ppo):
            yield problem
        if self.reference is None or self.reference.path is None:
            yield (
                "devices.reference.addresses names servers of another model than the policy: set reference.path to "
                "that model, whose vocabulary is compared, or remove the addresses"
            )
        of_policy = self.engine.addresses if self.engine.kind == "vllm" else ()
        sides = [{each.rstrip("/").replace("//localhost", "//127.0.0.1") for each in x} for x in (servers, of_policy)]
        if both := set.intersection(*sides):
            yield (
                f"{both.pop()} is in devices.reference.addresses and engine.addresses, whose servers get the policy's "
                "weights: give each its own"
            )

    def _of_bases(self) -> Iterator[str]:
        if self.ppo.uses_critic and self.model.config and self.value.lora and self.value.init_from == "policy":
            yield f"value starts from the policy, which has random weights: {RANDOM_BASE}"
        yield from quantisation_conflicts(self.model, "model", self.run)
        yield from quantisation_conflicts(self.value, "value", self.run)
        stored = "none" if self.reference is None else self.reference.quantisation
        if stored != "none" and self.ppo.kl.reference_every_steps is not None:
            yield (
                f"reference.quantisation {stored} holds weights that cannot become those of the policy: remove it, or "
                "ppo.kl.reference_every_steps"
            )
        whole = self.ppo.uses_critic and self.value.init_from == "policy" and self.value.lora is None
        if self.model.quantisation != "none" and whole:
            yield (
                "value.init_from is policy, whose quantised base cannot train: set value.lora, or value.path for "
                "a separate model"
            )
        scorers = [source for source in self.reward if isinstance(source, ModelRewardConfig)]
        if any(scorer.share_base for scorer in scorers) and self.model.lora is None:
            yield (
                "share_base of a reward model needs model.lora: full training of the policy would change the "
                "weights of the reward model"
            )
        adapted = self.ppo.uses_critic and self.value.init_from == "reward" and scorers and scorers[0].share_base
        if adapted and (self.value.lora is not None or self.value.frozen_layers):
            yield (
                "value.init_from is reward, so the value model uses that adapter: remove value.lora and "
                "value.frozen_layers"
            )

    @property
    def is_rewarded(self) -> bool:
        """Whether responses have scores; else the policy learns from its reference alone."""
        return bool(self.reward) or self.environment is not None

    @property
    def loads_reference(self) -> bool:
        """Whether the run has a reference, and has it itself; else servers have it."""
        return self.ppo.kl.needs_reference and not self.devices.reference.addresses

    @property
    def longest(self) -> tuple[int, int]:
        """Most tokens of a prompt and of its response. In an environment, of the first observation and the rest."""
        if self.environment is None:
            return self.data.max_prompt_tokens, self.ppo.rollout.max_new_tokens
        whole = self.environment.max_tokens
        first = min(self.environment.max_observation_tokens, whole // 2)
        return first, whole - first

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the keys alone say that sampled log-probs are the learner's."""
        exact = self.run.precision == "float32" and self.engine.kind == "local"
        return exact and not self.ppo.rollout.staleness

    def sections(self) -> dict[str, Section]:
        sections = super().sections()
        return sections if self.ppo.uses_critic else {key: s for key, s in sections.items() if key != "value"}

    def placed_roles(self) -> tuple[PlacedRole, ...]:
        optimizers, ppo = self.optimizers(), self.ppo
        trained = {key: each for key, each in optimizers.items() if key == "ppo.policy_optimizer"}
        roles = [PlacedRole(role="policy", key="model", model=self.model, trains=True, optimizers=trained)]
        if self.loads_reference:
            base = "policy" if self.model.lora is not None and self.reference is None else None
            leader = "policy" if ppo.kl.reference_every_steps is not None else None
            common = self.reference is None and (base is not None or self.model.frozen_layers > 0)
            roles.append(
                PlacedRole(
                    role="reference",
                    key="reference",
                    model=self.reference,
                    shares=base,
                    follows=leader,
                    has_common_tensors=common,
                )
            )
        if ppo.uses_critic:
            own = {key: each for key, each in optimizers.items() if key == "ppo.value_optimizer"}
            base = "policy" if self._shares_weights(self.value) else None
            roles.append(
                PlacedRole(
                    role="value",
                    key="value",
                    model=self.value,
                    trains=True,
                    optimizers=own,
                    shares=base,
                    is_head=self.value.init_from == "trunk",
                )
            )
        for index, source in enumerate(self.reward):
            if isinstance(source, ModelRewardConfig):
                base = "policy" if source.share_base else None
                common = source.share_base
                roles.append(PlacedRole(role="reward", key=f"reward.{index}", shares=base, has_common_tensors=common))
        if ppo.average_decay is not None:
            common = self.model.lora is not None or self.model.frozen_layers > 0
            roles.append(
                PlacedRole(role="average", key="ppo.average_decay", follows="policy", has_common_tensors=common)
            )
        return tuple(roles)

    def _shares_weights(self, value: ScalarModelConfig) -> bool:
        """Whether the critic runs on the policy's weights: as a head on its trunk, or as an adapter on its base."""
        if value.init_from == "policy":
            return value.lora is not None and self.model.lora is not None
        scorers = [source for source in self.reward if isinstance(source, ModelRewardConfig)]
        return value.init_from == "trunk" or (
            value.init_from == "reward" and bool(scorers) and next(iter(scorers)).share_base
        )

    def optimizers(self) -> dict[str, OptimizerConfig]:
        optimizers = super().optimizers()
        unused = () if self.ppo.uses_critic else ("ppo.value_optimizer",)
        return {key: options for key, options in optimizers.items() if key not in unused}

    def reward_sources(self) -> tuple[RewardSourceConfig, ...]:
        return self.reward

    def longest_sequence(self) -> dict[str, int]:
        if self.environment is not None:
            return {"environment.max_tokens": self.environment.max_tokens}
        return {
            "data.max_prompt_tokens": self.data.max_prompt_tokens,
            "ppo.rollout.max_new_tokens": self.ppo.rollout.max_new_tokens,
        }

    def with_evaluation_settings(self, changes: Mapping[str, Any]) -> Self:
        given = dict(changes)
        engine = given.pop("engine", None)
        try:
            ppo = PPOConfig(**{**self.ppo.model_dump(), **given})
        except ConfigError as error:
            raise UserError(str(error).removeprefix(f"{PPOConfig.__name__}: ")) from error
        changed = self.model_copy(update={"ppo": ppo} | ({} if engine is None else {"engine": engine_named(engine)}))
        for conflict in changed._of_served_reference():
            raise UserError(conflict)
        return changed
