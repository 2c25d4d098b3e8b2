"""Config section `ppo`, for PPO and critic-free variants.

Also used by the library: `PPOTrainer(config=PPOConfig())`.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from proximo.config.ppo.advantage import Advantage, GAEConfig
from proximo.config.ppo.implied import pair_conflicts, policy_rate, with_implied
from proximo.config.ppo.losses import GuardConfig, PolicyLossConfig, PTXConfig, ValueLossConfig
from proximo.config.ppo.rewards import KL, RewardKLConfig, ScoreConfig, ScoredTruncationConfig, Truncation
from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section


class RolloutConfig(Section):
    """How responses are sampled."""

    max_new_tokens: int = Field(128, ge=1)
    """Maximum tokens of a response; a longer one is cut and has finish `length`."""
    min_new_tokens: int = Field(0, ge=0)
    """Minimum tokens before an end of sequence; a value above 0 changes the distribution, see docs/ppo.md."""
    random_limit_min: int | None = Field(None, ge=1)
    """Draw a random limit for each prompt's responses between this and `max_new_tokens`, both included; null always
    uses `max_new_tokens`."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in the rollout, the reference and the update. In place of 0 set `greedy`."""
    greedy: bool = False
    """Take the most likely token, also in evaluations: there is no exploration, see docs/ppo.md, "Greedy rollouts"."""
    top_k: int | None = Field(None, ge=1)
    """Sample only among the k most likely tokens. Log-probs are then over these, docs/rollout.md, "Options"."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample only among the most likely tokens that together have this probability. Log-probs are then over these."""
    stop_token_ids: tuple[int, ...] = ()
    """Additional tokens that end a response; the token is kept."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response; tokens up to the end of the string are kept."""
    max_num_seqs: int = Field(64, ge=1)
    """Concurrent responses in decoding; the others wait for a free row. Samples do not depend on it."""
    staleness: int = Field(0, ge=0)
    """Sample while the learner trains, with weights that are at most this many steps old when a response begins; 0
    samples before each step trains. docs/rollout.md, "Asynchronous rollouts"."""

    def conflicts(self) -> Iterator[str]:
        lowest, drawn, highest = self.min_new_tokens, self.random_limit_min or self.max_new_tokens, self.max_new_tokens
        if not lowest <= drawn <= highest:
            limit = "" if self.random_limit_min is None else f"random_limit_min ({drawn}) and "
            yield f"min_new_tokens ({lowest}) must be at most {limit}max_new_tokens ({highest}), in this order"
        if self.greedy and (self.top_k is not None or self.top_p is not None):
            yield "greedy makes top_k and top_p useless: remove them"

    @property
    def reshapes_distribution(self) -> bool:
        """True if tokens are drawn from another distribution than that of their log-probs (docs/ppo.md)."""
        return self.greedy or self.min_new_tokens > 0


class PPOConfig(Section):
    """One step: sample, score, compare with the reference, estimate advantages, update."""

    memory_settings: ClassVar[str] = (
        "lower ppo.tokens_per_microbatch or, for a rollout, ppo.rollout.max_num_seqs, or set "
        "model.activation_checkpointing and value.activation_checkpointing"
    )
    """What to change where memory runs out. None of it changes a result."""

    num_steps: int = Field(100, ge=1)
    """Steps of the run; one step is one rollout batch with all its epochs."""
    prompts_per_step: int = Field(64, ge=1)
    """Prompts per step."""
    responses_per_prompt: int = Field(1, ge=1)
    """Responses per prompt; they form a group for group-wise advantages. 2 by default with the objectives
    `online_dpo` and `online_ipo`."""
    samples_per_prompt: int | None = Field(None, ge=2)
    """Sample this many responses per prompt and train on the `responses_per_prompt` with the best scores, or with the
    objectives `online_dpo` and `online_ipo` on the best and the worst one; null trains on all samples. This changes the
    objective, see docs/ppo.md, "Best of n"."""
    epochs_per_step: int = Field(2, ge=1)
    """Epochs over a rollout batch."""
    num_minibatches: int = Field(4, ge=1)
    """Minibatches that the batch is divided into, each of them an update in every epoch. The last may be smaller, and a
    small batch has fewer of them."""
    minibatch_responses: int | None = Field(None, ge=1)
    """Responses per update, in place of `num_minibatches`. The last minibatch may be smaller."""
    keep_groups_together: bool = False
    """Put the responses to one prompt into the same update, or into consecutive ones where they are more than an update
    takes: they share its computation, but an update then sees fewer prompts. For long prompts. docs/ppo.md, "Shared
    prompts"."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Maximum tokens of one forward and backward pass; changes memory and speed, not the gradient. On CUDA a recipe
    that leaves it out gets what fits the memory of the device, from 2048 to 32768."""
    release_cache: bool = False
    """Release torch's cached accelerator memory between the rollout and the updates; costs some time in each step. For
    a device whose memory hardly suffices."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Number of first steps in which only the value model trains; the policy's schedule counts its own updates only. On
    a shared trunk only the value head trains. For a value model with a fresh head, as in VAPO."""
    truncation: Truncation = ScoredTruncationConfig()
    """What a response is worth that was cut at the limit. A name alone is its kind: `truncation: mask`."""
    evaluate_greedy: bool = False
    """Evaluate with the most likely token instead of sampling, as published results often do."""
    evaluation_samples_per_prompt: int = Field(1, ge=1)
    """Responses per held-out prompt in an evaluation. More than 1 for pass@k, and for less noise."""
    task_reward: str | None = None
    """The score component that measures whether the task was solved, such as the name of a reward source, before any
    shaping; null means the whole score. `advantage.zero_variance_groups`, `solved_score`, `data.filter` and
    `guards.max_constant_reward_steps` use it, so that format rewards do not mislead them."""
    solved_score: float | None = None
    """A response with at least this `task_reward` solves its prompt, and evaluations report pass@k; null means no such
    score."""
    evaluate_reference: bool = False
    """Also let the reference answer the held-out prompts, and report how often the policy's answer scores higher: the
    win rate of RLHF."""
    average_decay: float | None = Field(None, gt=0, lt=1)
    """Keep a moving average of the policy with this decay per step, saved as `average` in every checkpoint. For a final
    model that varies less from step to step; DeepSpeed-Chat uses 0.992."""
    evaluate_average: bool = False
    """Evaluate this average instead of the policy."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled."""
    score: ScoreConfig = ScoreConfig()
    """Shaping of scores."""
    kl: KL = RewardKLConfig()
    """The KL, which keeps the policy near the reference. A name alone is its kind: `kl: none`."""
    advantage: Advantage = GAEConfig()
    """How advantages are estimated: with a critic, or by comparing responses. A name alone is its kind: `advantage:
    group_centred`."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The policy loss."""
    value_loss: ValueLossConfig = ValueLossConfig()
    """The value loss."""
    ptx: PTXConfig | None = None
    """Add the loss of texts (`ptx_data`) to every update of the policy; null does not."""
    guards: GuardConfig = GuardConfig()
    """Conditions that skip an update or stop the run."""
    policy_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy. Its learning rate in a recipe is by default 1e-6, or 1e-5 with LoRA."""
    value_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """Optimizer of the value model. On a shared trunk `policy_optimizer` is used, and this one only trains the head in
    the critic warm-up."""

    @model_validator(mode="before")
    @classmethod
    def _with_implied(cls, values: Any) -> Any:
        return with_implied(values)

    @property
    def responses_per_step(self) -> int:
        """Number of responses that a step trains on."""
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def sampled_per_prompt(self) -> int:
        """Number of responses sampled for each prompt, including those that are not trained on."""
        return self.samples_per_prompt or self.responses_per_prompt

    @property
    def resamples(self) -> bool:
        """True if further prompts are sampled in place of those whose responses have equal scores."""
        return self.advantage.most_rollouts > 1

    @property
    def responses_per_update(self) -> int:
        """Number of responses in one minibatch."""
        unit = 2 if self.policy_loss.objective.is_pairwise else 1
        return self.minibatch_responses or unit * -(-self.responses_per_step // (unit * self.num_minibatches))

    @property
    def groups_together(self) -> bool:
        """True if the responses to a prompt are put into the same update."""
        return self.policy_loss.objective.is_pairwise or (self.keep_groups_together and self.responses_per_prompt > 1)

    @property
    def needs_sampled_logprobs(self) -> bool:
        """True if the policy loss needs the sampler's log-probs in addition to the old log-probs."""
        return self.policy_loss.behaviour_weight is not None or self.policy_loss.rejection is not None

    @property
    def uses_critic(self) -> bool:
        """True if a value model is trained."""
        return self.advantage.needs_critic

    @property
    def baseline_answer(self) -> Literal["reference", "greedy"] | None:
        """The answer whose score is the baseline: the row's reference answer, the greedy response, or none."""
        if self.advantage.needs_greedy:
            return "greedy"
        return "reference" if self.score.minus_reference_answer else None

    @property
    def shapes_scores(self) -> bool:
        """True if the reward of a response may differ from its score."""
        cut = not self.truncation.keeps_score or self.truncation.scale != 1
        return cut or self.score.shapes or self.baseline_answer is not None

    def task_reward_is_of(self, sources: Sequence[str]) -> bool:
        """True if `task_reward` names one of the sources, a component `<source>.<part>`, or the whole score."""
        name = self.task_reward
        return name is None or any(name == source or name.startswith(f"{source}.") for source in sources)

    def conflicts(self) -> Iterator[str]:
        if self.responses_per_update > self.responses_per_step:
            yield (
                f"minibatch_responses ({self.minibatch_responses}) exceeds the batch of "
                f"prompts_per_step * responses_per_prompt = {self.responses_per_step} responses: lower it, or set it "
                f"to null and say with num_minibatches ({self.num_minibatches}) how the batch is divided"
            )
        if self.samples_per_prompt is not None and self.samples_per_prompt <= self.responses_per_prompt:
            yield (
                f"samples_per_prompt ({self.samples_per_prompt}) must exceed responses_per_prompt "
                f"({self.responses_per_prompt}); remove it to train on all samples"
            )
        if self.critic_warmup_steps and not self.uses_critic:
            yield (
                f"critic_warmup_steps ({self.critic_warmup_steps}) trains a value model, but advantage "
                f"{self.advantage.kind} has none: remove it, or use advantage: gae"
            )
        if self.critic_warmup_steps >= self.num_steps:
            yield (
                f"critic_warmup_steps ({self.critic_warmup_steps}) leaves no steps for the policy: it must be "
                f"below num_steps ({self.num_steps})"
            )
        if self.evaluate_average and self.average_decay is None:
            yield "evaluate_average needs average_decay"
        yield from chain(self._of_the_estimator(), self._of_samples(), self._of_updates(), self._of_scores())

    def _of_the_estimator(self) -> Iterator[str]:
        if self.truncation.bootstraps and not self.uses_critic:
            yield "truncation: bootstrap needs a value model: use advantage: gae, or truncation: unscored"
        yield from pair_conflicts(
            self.policy_loss,
            self.advantage,
            kl=self.kl,
            responses_per_prompt=self.responses_per_prompt,
            responses_per_update=self.responses_per_update,
        )
        if problem := self.advantage.problem(self.responses_per_prompt):
            yield problem
        if self.advantage.needs_greedy and self.rollout.greedy:
            yield (
                f"advantage {self.advantage.kind} compares samples with the greedy response, but rollout.greedy makes "
                "all responses greedy: remove rollout.greedy, or use another estimator"
            )
        if self.advantage.needs_greedy and self.score.minus_reference_answer:
            yield (
                f"score.minus_reference_answer and advantage {self.advantage.kind} are two baselines of one score: use "
                "one of them"
            )

    def _of_samples(self) -> Iterator[str]:
        if self.resamples and self.samples_per_prompt is not None:
            yield (
                "advantage.zero_variance_groups: resample compares all responses to a prompt, but samples_per_prompt "
                "trains on the best ones only: remove it, or use exclude"
            )
        if self.resamples and self.rollout.staleness:
            yield (
                "advantage.zero_variance_groups: resample decides on further prompts by the scores of a step, but "
                "rollout.staleness samples them before: use exclude, or set staleness to 0"
            )
        if self.rollout.greedy and self.sampled_per_prompt > 1:
            yield (
                "rollout.greedy gives only one response per prompt, but the configuration asks for "
                f"{self.sampled_per_prompt}: remove samples_per_prompt and set responses_per_prompt to 1, or do "
                "not decode greedily"
            )
        if (self.evaluate_greedy or self.rollout.greedy) and self.evaluation_samples_per_prompt > 1:
            yield (
                f"evaluation_samples_per_prompt ({self.evaluation_samples_per_prompt}) would give copies of one "
                "response: set it to 1 with evaluate_greedy or rollout.greedy"
            )
        if self.evaluate_reference and (not self.kl.needs_reference or self.kl.reference_every_steps is not None):
            yield (
                "evaluate_reference needs a fixed reference: kl: none has none, and with "
                "kl.reference_every_steps every evaluation would compare with another one"
            )

    def _of_updates(self) -> Iterator[str]:
        guards = [name for name in ("max_ratio", "max_kl", "target_kl") if getattr(self.guards, name) is not None]
        if guards and self.policy_optimizer is not None and self.policy_optimizer.in_backward:
            yield (
                f"policy_optimizer.in_backward changes weights during the backward pass, so guards.{guards[0]} "
                "cannot skip an update: set it to null, or in_backward: false"
            )
        if self.ptx is not None and self.policy_optimizer is not None and self.policy_optimizer.in_backward:
            yield (
                "ppo.ptx adds a backward pass to every update, but policy_optimizer.in_backward allows only one: "
                "remove one of them"
            )
        adaptive = self.kl.adaptive
        if adaptive is not None and self.responses_per_step >= 5 * adaptive.horizon:
            yield (
                f"kl.adaptive.horizon ({adaptive.horizon}) must exceed a fifth of the {self.responses_per_step} "
                "responses of a step; otherwise one step below the target sets the coefficient to 0, where it stays"
            )

    def _of_scores(self) -> Iterator[str]:
        for key in ("missing_eos_penalty", "overlong_buffer_tokens"):
            if getattr(self.score, key) is not None and not self.truncation.keeps_score:
                yield (
                    f"score.{key} is for cut responses, and truncation: {self.truncation.kind} gives them no score: "
                    "they would escape the penalty"
                )
        yield from self.score.length_conflicts(self.rollout.max_new_tokens, self.rollout.random_limit_min)
        if self.score.whiten_rewards != "none" and not self.uses_critic:
            yield (
                "score.whiten_rewards needs advantage: gae; it shifts the reward of every token, so the answers "
                "of one group would be compared by length"
            )

    def trunk_problem(self, *, shares_trunk: bool) -> str | None:
        """The first option that does not fit where the value head is, with the reason; None if all fit.

        `shares_trunk`: the value model is a head on the policy's trunk (`value.init_from: trunk`).
        """
        if not self.uses_critic:
            return None
        if not shares_trunk and self.value_loss.coefficient is not None:
            return (
                "ppo.value_loss.coefficient weighs the value loss against the policy loss where one update moves both, "
                "on a shared trunk (value.init_from: trunk); a value model of its own has an optimizer of its own: "
                "remove it, and set ppo.value_optimizer.learning_rate"
            )
        own = self.value_optimizer != type(self).model_fields["value_optimizer"].default
        if shares_trunk and own and not self.critic_warmup_steps:
            return (
                "ppo.value_optimizer is not used on a shared trunk (value.init_from: trunk), where policy and value "
                "head have one optimizer, ppo.policy_optimizer: remove it, or set ppo.critic_warmup_steps, in which "
                "the head learns alone, with it"
            )
        return None

    def optimizer_of_policy(self, *, has_adapter: bool) -> OptimizerConfig:
        """The optimizer of the policy; by default one with the rate for an adapter, or for whole weights."""
        return self.policy_optimizer or OptimizerConfig(learning_rate=policy_rate(has_adapter=has_adapter))
