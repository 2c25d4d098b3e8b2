"""Episodes of two ranks are those of one: each rank plays its share, and all learn from the same trajectories."""

from typing import Any

import pytest

from builders import tiny_language_model, tiny_tokenizer
from distributed.paths import plain_paths
from distributed.ranks import Ranks
from example_environments import Riddle
from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.distributed.world import current
from proximo.models.language import LanguageModel
from proximo.ppo.trainer import PPOTrainer
from proximo.run.make.environments import PythonEnvironment

ROWS = [{"prompt": word} for word in ("abc", "de", "fgh")]
TIMES = ("time/", "throughput/", "memory/", "environment/model_s", "environment/waiting_s", "environment/environment_s")


@plain_paths()
def play(shard: str) -> tuple[list[dict[str, float]], list[Any], int]:
    """Metrics of two steps, trajectories afterwards, and how many episodes this rank began."""
    begun = 0

    class Counted(Riddle):
        def reset(self, **given: Any) -> tuple[str, dict[str, Any]]:
            nonlocal begun
            begun += 1
            return super().reset(**given)

    trainer = PPOTrainer(
        LanguageModel(tiny_language_model(initializer_range=0.2)),
        tiny_tokenizer(),
        environment=PythonEnvironment(make=Counted, max_turns=2, max_tokens=60),
        config=PPOConfig(
            num_steps=2,
            prompts_per_step=3,
            responses_per_prompt=2,
            rollout={"max_new_tokens": 4},
            policy_optimizer={"learning_rate": 1e-3},
        ),
        devices=DevicesConfig.model_validate({"shard": shard}),
    )
    lines = trainer.train(ROWS)
    num_begun = begun
    played = [(r.prompt, r.token_ids, r.response_mask.tolist(), r.finish, r.episode) for r in trainer.generate(ROWS)]
    kept = [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]
    assert any("environment/model_seconds" in line for line in lines)
    return kept, played, num_begun if current().size > 1 else 0


def test_two_ranks_play_and_learn_what_one_does(two: Ranks) -> None:
    wanted, wanted_episodes, _ = play("replicate")
    results = two.run(play, "full")
    for lines, episodes, _ in results:
        assert episodes == wanted_episodes
        for line, other in zip(lines, wanted, strict=True):
            assert line == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert [num_begun for _, _, num_begun in results] == [8, 4], "two of three prompts, and one"
