"""The training task of PPO over a data set of prompts, with samples and evaluations.

The loop that drives it: run/loop.py.
"""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Any

import torch

from proximo.algorithms.kl import k1, k3
from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.config.ppo.options import PPOConfig
from proximo.data.difficulty import DifficultyFilter, Draw, FilterOptions
from proximo.environments.engine import Arena
from proximo.message_text import count_of
from proximo.metrics.values import Last, Max, Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.ppo.episodes import episode_fields, evaluation_metrics
from proximo.ppo.experience import sequence_kl, task_reward_of
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.roles.worker import ReferenceWorker, ServedReferenceWorker, eager_begin, logprobs_of
from proximo.ppo.selection import check_scored_fraction
from proximo.ppo.step import Roles
from proximo.ppo.step_metrics import response_metrics, score_metrics
from proximo.ppo.train_state import TrainState
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Prompt, Scored, ScoreState
from proximo.rewards.source import ClosableSource, NoReward, RewardSource, checked_scores, score_on_ranks, statistics_of
from proximo.rollout.engine import Engine, sampling_with
from proximo.rollout.sampling import RandomKey
from proximo.run.checkpointing import update_counts
from proximo.run.make.conversion import schedule_notes
from proximo.run.make.engine import EngineServers
from proximo.run.memory import peak_memory_mib
from proximo.run.task import Record

Gold = Sequence[float | None]


class PPOTask:
    """Runs the steps of a PPOTrainer over prompts, in the order of each epoch."""

    def __init__(  # noqa: PLR0913 - the parts of a run
        self,
        ppo: PPOTrainer,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        *,
        reward: RewardSource,
        gold: RewardSource | None,
        samples_per_step: int,
        servers: EngineServers | None = None,
        environments: Arena | None = None,
        difficulty: DifficultyFilter | None = None,
        inputs_fingerprint: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        self.ppo = ppo
        self.is_scored = not isinstance(reward, NoReward)
        self.best_metric: str | None = "evaluation/score" if self.is_scored else "evaluation/k3_per_token"
        self.best_is_lowest = not self.is_scored
        self.prompts = prompts
        self.held_out = held_out
        self.reward = reward
        self.gold = gold
        self.samples_per_step = samples_per_step
        self.servers = servers
        self.environments = environments
        self.difficulty = difficulty
        self.inputs_fingerprint = inputs_fingerprint
        self.notes: Sequence[str] = (*notes, *schedule_notes(ppo.learners), *_repeat_note(ppo, prompts))
        self.device = str(ppo.policy.device)
        self.num_steps = ppo.config.num_steps

    def close(self) -> None:
        """Close the reward sources, the environments and the engine, which ends their processes."""
        self.ppo.close()
        if isinstance(reference := self.ppo.roles.reference, ServedReferenceWorker):
            reference.close()
        for started in (self.environments, self.servers):
            if started is not None:
                started.close()
        for source in (self.reward, self.gold):
            if isinstance(source, ClosableSource):
                source.close()

    def step(self, step: int) -> Record:
        """Take one PPO step; `step` counts from 1, as the trainer's state does."""
        del step
        size = self.ppo.config.prompts_per_step
        if self.difficulty is None:
            outcome = self.ppo.run_step(prompts_of=self.ppo.in_order(self.prompts))
            progress: dict[str, MetricValue] = {
                "progress/epoch": Last(self.ppo.state.rollouts_done * size / len(self.prompts))
            }
        else:
            draws = self.difficulty.draw(size)
            outcome = self.ppo.run_step(prompts=[self.prompts[draw.row] for draw in draws])
            task_reward = self.ppo.config.task_reward
            progress = update_difficulty(self.difficulty, draws, outcome.sampled, task_reward=task_reward)
            self.ppo.state = replace(self.ppo.state, difficulty=self.difficulty.state)
        scored = outcome.experience.scored
        gold = self._gold(scored)
        metrics = self.ppo.metrics(outcome) | _gold_metric("gold/mean", gold) | self._gold_statistics() | progress
        metrics["memory/peak_mib"] = Max(peak_memory_mib(self.ppo.policy.device))
        divergences = sequence_kl(outcome.experience)
        rows = rows_to_log(scored, self.samples_per_step)
        samples = [self._sample("train", scored[i], divergences[i], gold[i]) for i in rows]
        return Record(metrics=metrics, samples=samples, guard=outcome.guard)

    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Sample responses to the held-out prompts, and score them by the reward and the gold source."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        ppo = self.ppo
        evaluation = evaluate_policy(ppo.roles, held_out, reward=self.reward, config=ppo.config, seed=ppo.seed)
        gold = self._gold(evaluation.scored)
        samples = [
            self._sample("evaluation", scored, kl, score) | _beside(other)
            for scored, kl, score, other in zip(
                evaluation.scored, evaluation.kl, gold, evaluation.reference, strict=True
            )
        ]
        metrics = evaluation.metrics | _gold_metric("evaluation/gold", gold) | self._gold_statistics()
        return Record(metrics=metrics, samples=samples)

    def writers(self) -> Mapping[str, Writer | RankWriter]:
        """Writers of all roles: models and optimizers, the policy's average, and a moving reference."""
        ppo = self.ppo
        return {name: write for worker in ppo.roles.workers for name, write in worker.writers(ppo.tokenizer).items()}

    def state(self) -> Mapping[str, Any]:
        """Train state, positions in schedules, and the state of the roles besides weights."""
        ppo = self.ppo
        of_roles = {name: value for worker in ppo.roles.workers for name, value in worker.state().items()}
        return {**ppo.state.to_json(), **of_roles, "updates": update_counts(ppo.learners)}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimizers and state of all roles, and the train state."""
        for worker in self.ppo.roles.workers:
            worker.restore(checkpoint)
        self.ppo.state = TrainState.from_json(checkpoint.state["task"], steps_done=checkpoint.step)
        if self.difficulty is not None and self.ppo.state.difficulty is not None:
            self.difficulty.state = self.ppo.state.difficulty

    def _sample(self, kind: str, scored: Scored, kl: float | None, gold: float | None) -> dict[str, Any]:
        sample = _sample(kind, scored, kl, gold)
        return sample if self.is_scored else sample | {"score": None}

    def _gold(self, scored: Sequence[Scored]) -> Gold:
        if self.gold is None:
            return [None] * len(scored)
        gold = score_on_ranks(self.gold, [s.response for s in scored])
        return [s.score if s.valid else None for s in gold]

    def _gold_statistics(self) -> dict[str, MetricValue]:
        """Statistics of the gold source, under a name that no reward source has."""
        return {name.replace("/", "/gold.", 1): value for name, value in statistics_of(self.gold).items()}


def rows_to_log(scored: Sequence[Scored], count: int) -> list[int]:
    """Indices of `count` responses, round robin over prompts, plus the first unscored response with its reason."""
    turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
    rows = sorted(range(len(scored)), key=lambda row: next(turns[scored[row].response.prompt.id]))[:count]
    unscored = [row for row, response in enumerate(scored) if not response.valid and row not in rows]
    return rows + (unscored[:1] if count else [])


def _repeat_note(ppo: PPOTrainer, prompts: Sequence[Prompt]) -> list[str]:
    size = ppo.config.prompts_per_step
    if len(prompts) >= size:
        return []
    there = count_of(len(prompts), "prompt")
    return [f"the data hold {there}, fewer than ppo.prompts_per_step = {size}: each step repeats some of them"]


def _gold_metric(name: str, gold: Gold) -> dict[str, MetricValue]:
    known = [score for score in gold if score is not None]
    return {name: Mean.of(known)} if known else {}


def _beside(reference: Scored | None) -> dict[str, Any]:
    """The reference's response to the same prompt and its score, for samples.jsonl."""
    if reference is None:
        return {}
    score = reference.score if reference.valid else None
    return {"reference_response": reference.response.text, "reference_score": score}


def _sample(kind: str, scored: Scored, kl: float | None, gold: float | None) -> dict[str, Any]:
    response, episode = scored.response, scored.response.episode
    messages = response.prompt.messages or ()
    return {
        "kind": kind,
        "prompt_id": response.prompt.id,
        "prompt": response.prompt.text or "\n".join(f"{m['role']}: {m['content']}" for m in messages),
        "response": response.text,
        "score": scored.score if scored.valid else None,
        "components": dict(scored.components),
        **({} if scored.token_rewards is None else {"token_rewards": scored.token_rewards}),
        **({} if scored.prefix_scores is None else {"prefix_scores": scored.prefix_scores}),
        "gold": gold,
        "kl": kl,
        "num_tokens": len(response.token_ids),
        **({} if episode is None else episode_fields(episode, num_forks=len(response.forks))),
        "finish": response.finish.value,
        **({} if scored.state is ScoreState.SCORED else {"state": scored.state.value, "reason": scored.reason}),
    }


def make_difficulty_filter(recipe: PPORecipe, prompts: Sequence[Prompt]) -> DifficultyFilter | None:
    """The recipe's difficulty filter, or None. Raises DataError if it could never leave a prompt out."""
    if recipe.data.filter is None:
        return None
    options = FilterOptions(**recipe.data.filter.model_dump(), min_prompts=recipe.ppo.prompts_per_step)
    return DifficultyFilter([prompt.base_score for prompt in prompts], options, seed=recipe.run.seed)


def update_difficulty(
    difficulty: DifficultyFilter, draws: Sequence[Draw], scored: Sequence[Scored], *, task_reward: str | None = None
) -> dict[str, MetricValue]:
    """Update the filter with the scores of a step, in the order of its draws, and return its metrics.

    It uses raw scores of the reward sources, or their component `task_reward`. Unscored responses do not count.
    """
    size, was_exhausted = len(scored) // len(draws), difficulty.is_used_up
    groups = [scored[start : start + size] for start in range(0, len(scored), size)]
    difficulty.learn(draws, [[task_reward_of(s, task_reward) for s in group if s.valid] for group in groups])
    state = difficulty.state
    if difficulty.is_used_up and not was_exhausted:
        warnings.warn(
            f"data.filter: {difficulty.num_active} prompts are left, as many as a step takes, so that "
            f"{state.kept_beyond_bounds} beyond the bounds stay: there is little left to learn from this data",
            stacklevel=2,
        )
    return {
        "progress/epoch": Last(difficulty.epochs_done),
        "filter/active": Last(difficulty.num_active),
        "filter/too_easy": Last(len(state.too_easy)),
        "filter/too_hard": Last(len(state.too_hard)),
        "filter/kept_beyond_bounds": Last(state.kept_beyond_bounds),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Scored responses to the held-out prompts, grouped by prompt, with metrics."""

    scored: tuple[Scored, ...]
    kl: tuple[float | None, ...]
    """Sum of k1 over the tokens of each response, in nats; None in a run without a reference."""
    reference: tuple[Scored | None, ...]
    """For each response the reference's response, sampled with the same random numbers; None if it is not sampled."""
    metrics: dict[str, MetricValue]


def evaluate_policy(
    roles: Roles, prompts: Sequence[Prompt], *, reward: RewardSource, config: PPOConfig, seed: int
) -> Evaluation:
    """Sample with the options of the rollout, or greedily with `evaluate_greedy`, and score.

    `evaluate_average` evaluates the policy's moving average. The random numbers do not depend on the step, so that
    evaluations are comparable across steps. Raises TrainingError if more than `guards.max_unscored_fraction` of the
    responses are unscored, because the mean over the rest might select the wrong best checkpoint.
    """
    size = config.evaluation_samples_per_prompt
    roles.policy.push_weights()

    def answered(engine: Engine, model: LanguageModel, where: str) -> list[Scored]:
        with sampling_with(engine, model):
            responses = engine.generate(
                prompts,
                num_samples=size,
                options=sampling_options(config, greedy=config.evaluate_greedy),
                key=RandomKey(seed=seed, purpose="evaluation", step=0),
                on_finished=eager_begin(reward),
            )
        scored = checked_scores(reward, responses)
        check_scored_fraction(scored, config.guards, where=where)
        return scored

    scored = answered(roles.evaluated.engine, roles.evaluated.model, "evaluation")
    responses = [s.response for s in scored]
    divergences: list[float | None] = [None] * len(responses)
    if roles.reference is not None:
        # Always k1, whatever kl.estimator is: a full KL over the vocabulary would cost a pass and is not shown.
        both = [
            logprobs_of(roles.evaluated.model, responses, config),
            roles.reference.logprobs(responses).logprobs,
        ]
        wrote = torch.cat([response.response_mask for response in responses]).to(both[0].device)
        both = [torch.where(wrote, logprobs, 0.0) for logprobs in both]  # not what an environment said
        parts = k1(*both).split([len(response.token_ids) for response in responses])
        divergences = [float(part.double().sum()) if s.valid else None for part, s in zip(parts, scored, strict=True)]
    is_scored = not isinstance(reward, NoReward)
    metrics = _metrics(scored, divergences, is_scored=is_scored) | statistics_of(reward)
    metrics |= evaluation_metrics(scored)
    if roles.reference is not None and not is_scored:
        metrics["evaluation/k3_per_token"] = Mean(float(k3(*both).double().sum()), int(wrote.sum()))
    if config.solved_score is not None:
        metrics |= pass_metrics(scored, size=size, config=config)
    if config.task_reward is not None:
        metrics["evaluation/task_reward"] = Mean.of(task_reward_of(s, config.task_reward) for s in scored if s.valid)
    opponents: list[Scored | None] = [None] * len(scored)
    if isinstance(roles.reference, ReferenceWorker) and roles.reference.engine is not None:
        opponents = list(answered(roles.reference.engine, roles.reference.model, "evaluation, the reference's answers"))
        metrics |= _duel_metrics(scored, opponents)
    return Evaluation(scored=tuple(scored), kl=tuple(divergences), reference=tuple(opponents), metrics=metrics)


def _metrics(
    scored: Sequence[Scored], divergences: Sequence[float | None], *, is_scored: bool
) -> dict[str, MetricValue]:
    responses, scores = response_metrics(scored), score_metrics(scored) if is_scored else {}
    whole = {"score/mean": "evaluation/score", "score/std": "evaluation/score_std"}
    components = {
        f"evaluation/score/{name.split('/')[1]}": value for name, value in scores.items() if name.count("/") == 2
    }
    return (
        components
        | {whole[name]: value for name, value in scores.items() if name in whole}
        | {
            "evaluation/tokens": responses["response/tokens_mean"],
            "evaluation/finished_fraction": responses["response/finished_fraction"],
            "evaluation/distinct_2": responses["response/distinct_2"],
            "evaluation/unscored": responses["response/unscored"],
            "evaluation/responses": Sum(len(scored)),
            "evaluation/kl": Mean.of(value for value in divergences if value is not None),
        }
    )


def pass_metrics(scored: Sequence[Scored], *, size: int, config: PPOConfig) -> dict[str, MetricValue]:
    """pass@k over `size` responses to each prompt. A response solves its prompt from `solved_score` on.

    k = 1, 2, 4, ... and `size`. Prompts with fewer than k scored responses are left out."""
    assert config.solved_score is not None
    solved = [task_reward_of(s, config.task_reward) >= config.solved_score if s.valid else None for s in scored]
    groups = [
        [result for result in solved[start : start + size] if result is not None]
        for start in range(0, len(scored), size)
    ]
    counts = [(len(group), sum(group)) for group in groups]
    sizes = sorted({2**power for power in range(size.bit_length())} | {size})
    return {
        f"evaluation/pass_at_{k}": Mean.of(pass_at_k(total, solved, k) for total, solved in counts if total >= k)
        for k in sizes
    }


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of all sets of k samples in which one is right (arXiv:2107.03374, eq. 1).

    Unbiased for the chance that k fresh samples hold a right one, unlike 1 - (1 - c / n)^k, which is too low. Exact in
    integers until the division. Raises ValueError for fewer samples than k.
    """
    if not 0 <= num_solved <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k wants 1 <= k <= samples and 0 <= solved <= samples, got {k=}, {num_samples=}, {num_solved=}"
        )
    return 1 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def _duel_metrics(scored: Sequence[Scored], opponents: Sequence[Scored | None]) -> dict[str, MetricValue]:
    """Mean reference score and win rate over pairs in which both responses have a score. A tie is half a win."""
    pairs = [
        (a.score, b.score) for a, b in zip(scored, opponents, strict=True) if b is not None and a.valid and b.valid
    ]
    return {
        "evaluation/reference_score": Mean.of(other for _, other in pairs),
        "evaluation/win_rate": Mean.of((own > other) + (own == other) / 2 for own, other in pairs),
    }
