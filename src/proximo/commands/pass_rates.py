"""`proximo pass-rate`: measures how often the initial policy of a run solves each training prompt.

It writes a data set: the prompts of the recipe with their scores as `base_scores`, by which `data.filter` leaves
prompts out.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from proximo.algorithms.shaping import common_score
from proximo.checkpoint.atomic import temporary_beside
from proximo.config.ppo.advantage import ReturnToGoConfig
from proximo.config.ppo.kl import NoKLConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.score import ScoreConfig, ScoredTruncationConfig
from proximo.errors import UserError, naming
from proximo.message_text import count_of, format_number
from proximo.metrics.catalogue import Recorder
from proximo.metrics.values import Mean, MetricValue
from proximo.ppo.experience import task_reward_of
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.roles.reward import eager_begin
from proximo.ppo.selection import check_scored_fraction
from proximo.ppo.task import PPOTask, pass_metrics
from proximo.records import Prompt, Scored
from proximo.rewards.source import checked_scores
from proximo.rollout.sampling import RandomKey
from proximo.run.checkpoint_lookup import verify_models
from proximo.run.preflight import inputs_of
from proximo.user_code import kept_working_directory


def run_pass_rates(recipe: PPORecipe, output: Path, *, samples_per_prompt: int, num_prompts: int | None = None) -> int:
    """Sample and score as the first step would, write one row per training prompt, and print a summary.

    Raises UserError if the file exists, its folder does not or the recipe has no reward, and TrainingError if too many
    responses could not be scored.
    """
    if output.exists():
        raise UserError(f"{output} exists and is left as it is: give a file that does not exist yet")
    if not output.parent.is_dir():
        raise UserError(f"there is no folder {output.parent} to write {output.name} to")
    if samples_per_prompt < 1 or (num_prompts is not None and num_prompts < 1):
        raise UserError(f"samples_per_prompt ({samples_per_prompt}) and num_prompts ({num_prompts}) must be at least 1")
    if not recipe.is_rewarded:
        raise UserError("the recipe has no reward, so no response passes or fails: give it one")
    verify_models(inputs_of(recipe))
    title = str(output)
    unfinished, output = temporary_beside(output.absolute()), output.absolute()
    with kept_working_directory():
        task = build_task(sampling_only(recipe))
    config = recipe.ppo.model_copy(update={"responses_per_prompt": samples_per_prompt, "samples_per_prompt": None})
    scored: list[Scored] = []
    console = Console(stderr=True)
    try:
        with closing(task), naming(unfinished), unfinished.open("w", encoding="utf-8") as lines:
            for group in rated(task, task.prompts[:num_prompts], config):
                lines.write(json.dumps(rated_row(group, config.task_reward), ensure_ascii=False, default=str) + "\n")
                scored += group
                if len(scored) % (config.prompts_per_step * samples_per_prompt) == 0:
                    done, wanted = len(scored) // samples_per_prompt, len(task.prompts[:num_prompts])
                    console.print(f"{done:,} of {count_of(wanted, 'prompt')} measured", highlight=False)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    _print(scored, config, title=title)
    return 0


def sampling_only(recipe: PPORecipe) -> PPORecipe:
    """The recipe without the parts that sampling does not need: reference, value model, filter and PTX texts."""
    ppo = recipe.ppo.model_copy(
        update={
            "kl": NoKLConfig(),
            "advantage": ReturnToGoConfig(),
            "score": ScoreConfig(),
            "rollout": recipe.ppo.rollout.model_copy(update={"greedy": False}),
            "ptx": None,
            "evaluate_reference": False,
            "average_decay": None,
            "evaluate_average": False,
            "critic_warmup_steps": 0,
            "truncation": ScoredTruncationConfig(),
        }
    )
    data = recipe.data.model_copy(update={"filter": None})
    return recipe.model_copy(update={"ppo": ppo, "data": data, "reference": None, "ptx_data": None, "gold": None})


def rated(task: PPOTask, prompts: Sequence[Prompt], config: PPOConfig) -> Iterator[list[Scored]]:
    """Scored responses, one group per prompt; prompts are sampled in batches as large as a step's."""
    size, policy = config.prompts_per_step, task.ppo.roles.policy
    policy.push_weights()
    for index, start in enumerate(range(0, len(prompts), size)):
        key = RandomKey(seed=task.ppo.seed, purpose="rating", step=index)
        responses = policy.engine.generate(
            prompts[start : start + size],
            num_samples=config.sampled_per_prompt,
            options=sampling_options(config),
            key=key,
            on_finished=eager_begin(task.reward),
        )
        scored = checked_scores(task.reward, responses)
        check_scored_fraction(scored, config.guards, where=f"step {index + 1}")
        each = config.responses_per_prompt
        yield from (list(scored[first : first + each]) for first in range(0, len(scored), each))


def rated_row(group: Sequence[Scored], task_reward: str | None) -> dict[str, Any]:
    """The prompt as a data row, with the outcomes of its scored responses.

    The prompt already contains the columns `system` and `history`.
    """
    prompt = group[0].response.prompt
    variables = dict(prompt.template_variables)
    tools = {"tools": variables.pop("tools")} if "tools" in variables else {}
    return {
        "id": prompt.id,
        "prompt": prompt.messages if prompt.text is None else prompt.text,
        **({} if prompt.answer is None else {"answer": prompt.answer}),
        **{name: value for name, value in prompt.metadata.items() if name not in ("system", "history")},
        **tools,
        **({"chat_template_kwargs": variables} if variables else {}),
        "base_scores": [task_reward_of(each, task_reward) for each in group if each.valid],
    }


def _print(scored: Sequence[Scored], config: PPOConfig, *, title: str) -> None:
    each = config.responses_per_prompt
    groups = [scored[start : start + each] for start in range(0, len(scored), each)]
    outcomes = [[task_reward_of(s, config.task_reward) for s in group if s.valid] for group in groups]
    metrics: dict[str, MetricValue] = {
        "score/task_reward_mean": Mean.of(number for group in outcomes for number in group),
        "group/zero_variance_fraction": Mean.of(float(common_score(group) is not None) for group in outcomes if group),
    }
    if config.solved_score is not None:
        metrics |= pass_metrics(scored, size=each, config=config)
    recorder = Recorder()
    recorder.record_all(metrics)
    print(f"{title}: {count_of(len(groups), 'prompt')}, {count_of(each, 'response')} each")
    table = Table("metric", "value")
    for name, value in recorder.line().items():
        table.add_row(name, format_number(value))
    Console().print(table)
