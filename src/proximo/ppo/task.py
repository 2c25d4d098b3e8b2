"""PPO over a data set of prompts, step by step, with its samples and evaluations. Not the run around it
(run/loop.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from proximo.algorithms.scores import RunningMoments
from proximo.checkpoint.state import as_record
from proximo.checkpoint.store import Checkpoint, Writer
from proximo.data.difficulty import DifficultyFilter, FilterState
from proximo.data.order import rows_at
from proximo.metrics.report.sample_pairs import by_turns
from proximo.metrics.values import Last, Max, Mean, MetricValue
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.counted import sequence_kl
from proximo.ppo.difficulty import judge_difficulty
from proximo.ppo.evaluation import evaluate_policy
from proximo.ppo.scores import EqualSteps
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Prompt, Scored, ScoreState
from proximo.rewards.source import ClosableSource, RewardSource
from proximo.rewards.statistics import statistics_of
from proximo.run.build.conversion import schedule_notes
from proximo.run.checkpointing import restore_models, update_counts, writers_for
from proximo.run.logs import Record
from proximo.run.memory import peak_memory_mib

Gold = Sequence[float | None]


class PPOTask:
    """Drives a PPOTrainer over prompts in the order of each epoch."""

    best_metric: str | None = "evaluation/score"
    best_is_lowest: bool = False

    def __init__(
        self,
        ppo: PPOTrainer,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        *,
        reward: RewardSource,
        gold: RewardSource | None,
        samples_per_step: int,
        difficulty: DifficultyFilter | None = None,
        inputs_fingerprint: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        self.ppo = ppo
        self.prompts = prompts
        self.held_out = held_out
        self.reward = reward
        self.gold = gold
        self.samples_per_step = samples_per_step
        self.difficulty = difficulty
        self.inputs_fingerprint = inputs_fingerprint
        self.notes: Sequence[str] = (*notes, *schedule_notes(ppo.learners), *_repeat_note(ppo, prompts))
        self.device = str(ppo.policy.device)
        self.num_steps = ppo.config.num_steps

    def close(self) -> None:
        """End what the reward sources started."""
        for source in (self.reward, self.gold):
            if isinstance(source, ClosableSource):
                source.close()

    def step(self, step: int) -> Record:
        """Take one PPO step; `step` counts from 1."""
        size = self.ppo.config.prompts_per_step
        if self.difficulty is None:
            rows = rows_at((step - 1) * size, size, num_rows=len(self.prompts), seed=self.ppo.seed)
            outcome = self.ppo.run_step(prompts=[self.prompts[row] for row in rows])
            progress: dict[str, MetricValue] = {"progress/epoch": Last(step * size / len(self.prompts))}
        else:
            draws = self.difficulty.draw(size)
            outcome = self.ppo.run_step(prompts=[self.prompts[draw.row] for draw in draws])
            progress = judge_difficulty(
                self.difficulty, draws, outcome.sampled, task_reward=self.ppo.config.task_reward
            )
        scored = outcome.experience.scored
        gold = self._gold(scored)
        metrics = self.ppo.metrics(outcome) | _gold_metric("gold/mean", gold) | self._gold_statistics() | progress
        metrics["memory/peak_mib"] = Max(peak_memory_mib(self.ppo.policy.device))
        divergences = sequence_kl(outcome.experience)
        rows = rows_to_show(scored, self.samples_per_step)
        samples = [_sample("train", scored[i], divergences[i], gold[i]) for i in rows]
        return Record(metrics=metrics, samples=samples)

    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Responses to the held-out prompts, scored by the reward and by the gold source."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        ppo = self.ppo
        found = evaluate_policy(ppo.followers.evaluated, held_out, reward=self.reward, config=ppo.config, seed=ppo.seed)
        gold = self._gold(found.scored)
        samples = [
            _sample("evaluation", scored, kl, score) | _beside(other)
            for scored, kl, score, other in zip(found.scored, found.kl, gold, found.reference, strict=True)
        ]
        metrics = found.metrics | _gold_metric("evaluation/gold", gold) | self._gold_statistics()
        return Record(metrics=metrics, samples=samples)

    def writers(self) -> Mapping[str, Writer]:
        """Policy and value model with their optimizers; the average and a reference that moves."""
        return writers_for(self._models(), self.ppo.learners, self.ppo.tokenizer, head=self._trunk_head())

    def state(self) -> Mapping[str, Any]:
        """The KL coefficient, what is known of scores and returns, positions in schedules, who is left out."""
        return {
            "kl_coefficient": self.ppo.kl_coefficient,
            "score_moments": asdict(self.ppo.score_moments),
            "return_moments": asdict(self.ppo.return_moments),
            "equal_steps": asdict(self.ppo.equal_steps),
            "value_scale": self.ppo.value_scale.state(),
            "updates": update_counts(self.ppo.learners),
            "difficulty": None if self.difficulty is None else self.difficulty.state.to_json(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Weights, optimizers, coefficient, units and counters."""
        restore_models(checkpoint, self._models(), self.ppo.learners, head=self._trunk_head())
        state = checkpoint.state["task"]
        self.ppo.steps_done = checkpoint.step
        self.ppo.kl_coefficient = state["kl_coefficient"]
        self.ppo.score_moments = as_record(RunningMoments, state["score_moments"])
        self.ppo.return_moments = as_record(RunningMoments, state.get("return_moments", {}))
        self.ppo.equal_steps = as_record(EqualSteps, state["equal_steps"])
        self.ppo.value_scale.restore(state["value_scale"])
        if self.difficulty is not None:
            self.difficulty.state = FilterState.from_json(state["difficulty"])

    def _models(self) -> dict[str, LanguageModel | ScalarModel]:
        moving = self.ppo.config.kl.reference_every_steps is not None
        held = {
            "policy": self.ppo.policy,
            "value": None if self.ppo.roles.shares_trunk else self.ppo.roles.value,
            "average": self.ppo.followers.average,
            "reference": self.ppo.roles.reference if moving else None,
        }
        return {role: model for role, model in held.items() if model is not None}

    def _trunk_head(self) -> ScalarModel | None:
        return self.ppo.roles.value if self.ppo.roles.shares_trunk else None

    def _gold(self, scored: Sequence[Scored]) -> Gold:
        if self.gold is None:
            return [None] * len(scored)
        found = self.gold.score([each.response for each in scored])
        return [each.score if each.valid else None for each in found]

    def _gold_statistics(self) -> dict[str, MetricValue]:
        """Under a name that no reward source has."""
        return {name.replace("/", "/gold.", 1): value for name, value in statistics_of(self.gold).items()}


def rows_to_show(scored: Sequence[Scored], count: int) -> list[int]:
    """So many responses, one to each prompt before a second to any; and the first that has no score, which says why."""
    rows = by_turns(range(len(scored)), lambda row: scored[row].response.prompt.id)[:count]
    faulty = [row for row, each in enumerate(scored) if not each.valid and row not in rows]
    return rows + (faulty[:1] if count else [])


def _repeat_note(ppo: PPOTrainer, prompts: Sequence[Prompt]) -> list[str]:
    size = ppo.config.prompts_per_step
    if len(prompts) >= size:
        return []
    return [f"there are {len(prompts)} prompts, fewer than prompts_per_step = {size}: each step repeats some of them"]


def _gold_metric(name: str, gold: Gold) -> dict[str, MetricValue]:
    known = [score for score in gold if score is not None]
    return {name: Mean.of(known)} if known else {}


def _beside(reference: Scored | None) -> dict[str, Any]:
    """What the reference answered to the same prompt."""
    if reference is None:
        return {}
    score = reference.score if reference.valid else None
    return {"reference_response": reference.response.text, "reference_score": score}


def _sample(kind: str, scored: Scored, kl: float | None, gold: float | None) -> dict[str, Any]:
    response = scored.response
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
        "finish": response.finish.value,
        **({} if scored.state is ScoreState.SCORED else {"state": scored.state.value, "reason": scored.reason}),
    }
