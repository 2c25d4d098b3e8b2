"""PPO as a library: bring prompts and a reward, or your own loop and scores. Not the run around it: see from_recipe.py.

trainer = PPOTrainer(policy, tokenizer, config=PPOConfig(...))
responses = trainer.generate(prompts)
stats = trainer.step(prompts, responses, scores)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.algorithms.controllers import KLController
from proximo.algorithms.losses import PolicyStatistics
from proximo.algorithms.scores import NOTHING_SEEN, RunningMoments
from proximo.config.ppo.options import PPOConfig
from proximo.data.examples import TextExample
from proximo.data.order import rows_at
from proximo.dataflow.executor import Handler, LocalExecutor
from proximo.learner.own_optimizer import OwnOptimizer
from proximo.learner.update import Learner
from proximo.metrics.recorder import Recorder
from proximo.metrics.values import Last, MetricValue
from proximo.models.cpu.thread_split import side_by_side
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.experience import make_experience
from proximo.ppo.extra_calls import ExtraCall, calls_of, check_extra_calls, handlers_of, values_of
from proximo.ppo.graph import absent_inputs, step_graph
from proximo.ppo.inputs.coerce import (
    PromptLike,
    ResponseLike,
    Score,
    as_policy,
    as_prompts,
    as_reference,
    as_responses,
    as_scored,
    as_value,
    check_models,
)
from proximo.ppo.inputs.parts import as_seed, as_source, check_config, check_tokenizer, check_training
from proximo.ppo.inputs.token_ids import Mask
from proximo.ppo.invariants import check_first_minibatch, likely_causes
from proximo.ppo.kl_coefficient import adapted_coefficient, first_coefficient
from proximo.ppo.roles.inference import InferenceCalls
from proximo.ppo.roles.learners import make_learners
from proximo.ppo.roles.models import Followers, make_roles
from proximo.ppo.roles.value_scale import ValueScale
from proximo.ppo.scores import EqualSteps, keep_best, refuse_equal, score_responses
from proximo.ppo.step_metrics import StepOutcome, step_metrics
from proximo.ppo.update.ptx import make_text_loss
from proximo.ppo.update.updates import UpdateCalls
from proximo.records import Experience, Passes, Prompt, Response, Scored
from proximo.rewards.function import RewardFunction
from proximo.rewards.source import RewardSource
from proximo.rewards.statistics import statistics_of
from proximo.rollout.sampling import RandomKey
from proximo.run.memory import check_release, release_cache, with_memory_advice
from proximo.run.user_code import tell_step


class PPOTrainer:
    """Owns the policy, its reference, the critic and their optimizers, and takes them from step to step.

    Args:
        policy: trained in place.
        tokenizer: the policy's.
        reference: what the KL pulls towards; None takes a frozen copy of the policy, or its base under LoRA, beside
            which none may be given. Unused where the configuration gives the KL no place.
        value: the critic; None starts one from a copy of the policy's backbone with a fresh head; "trunk" puts the head
            on the policy's own (or a `scalar_on(policy)` of models/sharing/trunk.py).
        reward: scores responses in `train`, a source or a function; `step` is given scores instead.
        ptx: texts that it goes on learning, as `config.ptx` says.
        config: what is done.
        seed: of all sampling and shuffling.
        extra_calls: calls of your own in the graph of every step (docs/dataflow.md).
        optimizers: optimizers of your own for "policy" and "value", in the place of those of the configuration.
        kl_controller: keeps the KL coefficient in the place of `config.kl`; it is given the KL of each response that
            counted, after each step in which the policy learned.

    Raises:
        ModelError: a model cannot be packed, has bfloat16 or float16 weights, or the vocabularies differ.
        ConfigError: ptx without config.ptx, or the reverse; an extra call, an optimizer or a KL controller that was
            brought and does not fit.
    """

    def __init__(  # noqa: PLR0913 - each is a part that a caller may bring
        self,
        policy: LanguageModel | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reference: LanguageModel | PreTrainedModel | None = None,
        value: ScalarModel | PreTrainedModel | Literal["trunk"] | None = None,
        reward: RewardSource | RewardFunction | None = None,
        ptx: Sequence[TextExample | str] | None = None,
        config: PPOConfig | None = None,
        seed: int = 0,
        extra_calls: Sequence[ExtraCall] = (),
        optimizers: Mapping[str, OwnOptimizer] | None = None,
        kl_controller: KLController | None = None,
    ) -> None:
        check_config(config)
        check_tokenizer(tokenizer)
        reward, seed = as_source(reward), as_seed(seed)
        self.config = config or PPOConfig()
        check_extra_calls(extra_calls, self.config)
        self.extra_calls = tuple(extra_calls)
        self.seed = seed
        self.tokenizer = tokenizer
        self.policy = as_policy(policy)
        reference, value = as_reference(reference, self.policy), as_value(value)
        moves = self.config.kl.reference_every_steps is not None
        check_models(self.policy, tokenizer, reference=reference, value=value, moves=moves)
        check_release(self.config.release_cache, self.policy.device)
        self.roles = make_roles(self.policy, tokenizer, reference=reference, value=value, config=self.config, seed=seed)
        self.followers = Followers(self.roles, tokenizer, self.config)
        self.kl_controller = kl_controller
        self.kl_coefficient = first_coefficient(self.config.kl, kl_controller)
        self.score_moments: RunningMoments = NOTHING_SEEN
        self.return_moments: RunningMoments = NOTHING_SEEN
        self.equal_steps = EqualSteps()
        self.steps_done = 0
        self._inference = InferenceCalls(self.roles, reward, self.config)
        policy_learner, value_learner = make_learners(self.roles, self.config, optimizers)
        self._updates = UpdateCalls(
            self._inference,
            policy=policy_learner,
            value=value_learner,
            seed=seed,
            check_first=self._check_first_minibatch,
            texts=make_text_loss(ptx, self.policy, tokenizer, config=self.config, seed=seed),
        )

    def _check_first_minibatch(self, statistics: PolicyStatistics, experience: Experience, step: int) -> None:
        kind = {"precision": self.policy.precision, "objective": self.config.policy_loss.objective}
        causes = likely_causes(experience, policy_version=self.policy_version)
        check_first_minibatch(statistics, **kind, causes=causes, step=step + 1)

    @property
    def learners(self) -> dict[str, Learner]:
        """Role -> learner of every trained model."""
        value = self._updates.value_learner
        return {"policy": self._updates.policy_learner} | ({} if value is None else {"value": value})

    @property
    def value_scale(self) -> ValueScale:
        """What the value model's outputs mean."""
        return self._inference.value_scale

    @property
    def policy_version(self) -> int:
        """Optimizer steps that the policy has taken."""
        return self._updates.policy_learner.updates_done

    @property
    def sampled_logprobs_serve(self) -> bool:
        """True where the sampler's log-probs are those of the policy, so that no pass is needed for the old ones.

        Not where behaviour weights or a rejection compare the two: the responses may then be those of any sampler.
        """
        compared = self.config.policy_loss.asks_the_sampler
        return self.policy.precision == "float32" and not (compared or self.config.rollout.reshapes_distribution)

    def generate(self, prompts: Sequence[PromptLike]) -> list[Response]:
        """Sample `samples_per_prompt`, or else `responses_per_prompt`, responses to each prompt, as this step would.

        A prompt is a text, its token ids (a list or a tensor without padding) or a record.
        """
        return self._inference.generate(
            self._prompts(prompts), key=self._rollout_key, policy_version=self.policy_version
        )

    @property
    def _rollout_key(self) -> RandomKey:
        return RandomKey(seed=self.seed, purpose="rollout", step=self.steps_done)

    def _prompts(self, prompts: Sequence[PromptLike]) -> list[Prompt]:
        return as_prompts(self.tokenizer, prompts, num_tokens=self.policy.vocab_size)

    def step(
        self,
        prompts: Sequence[PromptLike],
        responses: Sequence[ResponseLike],
        scores: Sequence[Score] | Tensor,
        *,
        response_masks: Sequence[Mask] | None = None,
    ) -> dict[str, float]:
        """Learn from responses that you scored yourself, and return the step's metrics.

        `responses` come from `generate`, or are token ids (lists or tensors, without the prompt and without padding);
        then the policy's log-probs are computed for them. One score per response, or one reward for each of its tokens,
        whose sum is the score; None, or a number that is not finite, leaves the response out of everything. Prompts as
        given to `generate` (one for each response, or each group). `response_masks`: for each response True (or 1)
        where the policy wrote the token; the others, such as a tool's output, are read, and left out of loss, KL and
        advantages.

        Raises DataError where the numbers of prompts, responses, scores and masks do not fit together.
        """
        return self._line(self.run_step(scored=as_scored(self._adopt(prompts, responses, response_masks), scores)))

    def train(
        self,
        prompts: Sequence[PromptLike],
        *,
        reward: RewardSource | RewardFunction | None = None,
        on_step: Callable[[int, Mapping[str, float]], Any] | None = None,
    ) -> list[dict[str, float]]:
        """Run the steps that are left, over the prompts in the order of each epoch, scored by `reward`.

        `reward` is a source, or a function of lists of prompts, responses and metadata; None keeps the trainer's.
        Returns the metrics of every step; `on_step(number, metrics)` gets each as it comes, and what it raises ends the
        call. Raises ConfigError where no step is left, and for a function that cannot be called so.
        """
        if reward is not None:
            self._inference.reward = as_source(reward)
        known, size = self._prompts(prompts), self.config.prompts_per_step
        scored = self._inference.reward is not None or any(call.name == "score" for call in self.extra_calls)
        check_training(known, self.config, scored=scored, on_step=on_step, steps_done=self.steps_done)
        history: list[dict[str, float]] = []
        while self.steps_done < self.config.num_steps:
            rows = rows_at(self.steps_done * size, size, num_rows=len(known), seed=self.seed)
            history.append(self._line(self.run_step(prompts=[known[row] for row in rows])))
            if on_step is not None:
                tell_step(on_step, self.steps_done, history[-1])
        return history

    def run_step(
        self, *, prompts: Sequence[Prompt] | None = None, scored: Sequence[Scored] | None = None
    ) -> StepOutcome:
        """One step, from prompts or from scored responses, through the graph of calls.

        Raises TrainingError where too much of the batch could not be scored, too many updates were skipped, the
        learner's log-probs are not the sampler's, or memory ran out. A step that failed may have moved some weights.
        """
        given = "prompts" if scored is None else "scored"
        learns = self.steps_done >= self.config.critic_warmup_steps
        serve, extra = self.sampled_logprobs_serve, calls_of(self.extra_calls)
        modes = {"sampled_serve": serve, "policy_learns": learns, "shares_trunk": self.roles.shares_trunk}
        graph = step_graph(self.config, given=given, **modes, extra=extra)
        inputs: dict[str, Any] = {"prompts": prompts}
        if scored is not None:
            taken = {"responses": [s.response for s in scored], "scored": scored}
            inputs = taken if self.config.samples_per_prompt is None else {"candidates": scored}
        handlers = with_memory_advice(
            self._handlers() | handlers_of(self.extra_calls), self.config.memory_settings, step=self.steps_done + 1
        )
        together = set(self._updates.calls_side_by_side).difference(call.name for call in extra)
        executor = LocalExecutor(graph, handlers, together=together, side_by_side=side_by_side)
        outcome = executor.run(inputs | absent_inputs(graph))
        step = StepOutcome(
            experience=outcome.values["experience"],
            raw_advantages=outcome.values["raw_advantages"],
            shaped_scores=outcome.values["shaped_scores"] if self.config.shapes_scores else None,
            policy=outcome.values.get("policy_report"),
            value=outcome.values.get("value_report"),
            candidates=outcome.values.get("candidates"),
            seconds=outcome.seconds,
            kl_coefficient=None if self.config.kl.apply_to == "none" else self.kl_coefficient,
            compares_groups=self.config.advantage.compares_groups,
            extra=values_of(self.extra_calls, graph, outcome.values),
        )
        if step.policy is not None:  # while the critic warms up, the policy and its coefficient wait
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient, step.experience, self.config.kl, self.kl_controller
            )
        self.score_moments = outcome.values["shaped_scores"].moments
        self.return_moments = step.raw_advantages.spread.seen
        self.equal_steps = self.equal_steps.after(step.sampled, task_reward=self.config.task_reward)
        self.steps_done += 1
        self.followers.move(self.steps_done)
        return step

    def metrics(self, outcome: StepOutcome) -> dict[str, MetricValue]:
        """The declared metrics of a step that was just taken."""
        own: dict[str, MetricValue] = {
            "progress/policy_version": Last(self.policy_version),
            "progress/prompts": Last(self.steps_done * self.config.prompts_per_step),
        }
        found = step_metrics(outcome, self.config, precision=self.policy.precision)
        return found | own | statistics_of(self._inference.reward)

    def _handlers(self) -> dict[str, Handler]:
        calls, updates = self._inference, self._updates
        return {
            "generate": lambda prompts: (self.generate(prompts),),
            "generate_greedy": lambda prompts: calls.generate_greedy(prompts, key=self._rollout_key),
            "score": lambda responses, greedy=(): (
                score_responses(responses, calls, self.tokenizer, step=self.steps_done + 1, greedy=greedy),
            ),
            "select": self._select,
            "sampled_logprobs": calls.sampled_logprobs,
            "policy_logprobs": calls.policy_logprobs,
            "reference_logprobs": calls.reference_logprobs,
            "values": calls.values,
            "policy_logprobs_and_values": calls.policy_logprobs_and_values,
            "experience": self._experience,
            "train_value": lambda experience: (updates.train_value(experience, step=self.steps_done),),
            "train_policy": lambda experience: (
                updates.train_policy(experience, kl_coefficient=self.kl_coefficient, step=self.steps_done),
            ),
            "train_policy_and_value": lambda experience: updates.train_policy_and_value(
                experience, kl_coefficient=self.kl_coefficient, step=self.steps_done
            ),
        }

    def _experience(self, scored: Sequence[Scored], *passes: Any) -> tuple[Any, ...]:
        if self.config.release_cache:  # the rollout's keys and values are freed, and the updates come next
            release_cache(self.policy.device)
        old, reference, full, values = passes
        gathered = Passes(old_logprobs=old, reference_logprobs=reference, full_kl=full, values=values)
        if self.config.samples_per_prompt is None:
            self._refuse_equal(scored)
        return make_experience(
            scored,
            gathered,
            config=self.config,
            kl_coefficient=self.kl_coefficient,
            moments=self.score_moments,
            returns_seen=self.return_moments,
        )

    def _select(self, candidates: Sequence[Scored]) -> tuple[list[Response], list[Scored]]:
        self._refuse_equal(candidates)  # the best of a healthy source may well be equal
        scored = keep_best(candidates, self._inference)
        return [each.response for each in scored], scored

    def _refuse_equal(self, sampled: Sequence[Scored]) -> None:
        equal = self.equal_steps.after(sampled, task_reward=self.config.task_reward)
        refuse_equal(equal, self.config.guards, step=self.steps_done + 1)

    def _line(self, outcome: StepOutcome) -> dict[str, float]:
        recorder = Recorder()
        recorder.record_all(self.metrics(outcome))
        return recorder.line()

    def _adopt(
        self, prompts: Sequence[PromptLike], responses: Sequence[ResponseLike], masks: Sequence[Mask] | None
    ) -> list[Response]:
        """Responses as records; those written by somebody else get the log-probs that the policy gives them."""
        version = self.policy_version
        records = as_responses(
            self.tokenizer, self._prompts(prompts), responses, policy=self.policy, policy_version=version, masks=masks
        )
        return self._inference.with_logprobs(records)
