"""The recipes of games: they say what they would do, and train from nothing for two steps in every game."""

import json
from pathlib import Path

import pytest

from proximo.cli import main

GAMES = ("guess:Guess", "nim:Nim", "kuhn:Kuhn", "frozen_lake:FrozenLake", "tic_tac_toe:TicTacToe")
TOOLS = ("calculator:Calculator", "python_tool:PythonTool", "search:Search")
SMALL = [
    *(
        "sft.model.config.hidden_size=16",
        "sft.model.config.intermediate_size=16",
        "sft.model.config.num_hidden_layers=1",
    ),
    *("sft.model.config.num_attention_heads=1", "sft.model.config.num_key_value_heads=1", "run.tensorboard=false"),
    *("sft.data.sources.0.kwargs.num_rows=80", "sft.data.held_out_rows=8", "ppo.environment.workers=4"),
    *("ppo.ppo.num_steps=2", "ppo.ppo.prompts_per_step=4", "ppo.ppo.rollout.max_new_tokens=4"),
    *("ppo.environment.num_rows=40", "ppo.data.held_out_rows=4", "ppo.run.evaluate_every_steps=null"),
]


@pytest.mark.parametrize("recipe", ["games", "games-groups"])
def test_the_recipe_says_what_it_would_do(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", recipe, "--dry-run"]) == 0
    assert "proximo.recipes.games.nim:Nim" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "game"),
    [
        ("games", "kuhn:Kuhn"),
        ("games-groups", "nim:Nim"),
        *(pytest.param("games", game, marks=pytest.mark.soak) for game in (*GAMES, *TOOLS)),
    ],
)
def test_the_recipe_trains_in_a_game(recipe: str, game: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"proximo.recipes.games.{game}"
    own = [f"ppo.environment.path={path}", f"sft.data.sources.0.kwargs.game={path}", f"run.folder={tmp_path / 'run'}"]
    assert main(["pipeline", recipe, *SMALL, *own, "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["response/unscored"] == 0 for line in lines[1:])
    assert all("evaluation/score" in line for line in (lines[0], lines[-1]))


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["games", "games-groups"])
def test_the_recipe_learns_the_way_over_the_lake(recipe: str, tmp_path: Path) -> None:
    """Random play gets there in one of 92 walks. A minute on a core that has nothing else to do."""
    path = "proximo.recipes.games.frozen_lake:FrozenLake"
    own = [f"ppo.environment.path={path}", f"sft.data.sources.0.kwargs.game={path}", f"run.folder={tmp_path / 'run'}"]
    shorter = ["ppo.ppo.num_steps=20", "ppo.ppo.kl.coefficient=0.02", "run.tensorboard=false"]
    assert main(["pipeline", recipe, *own, *shorter, "--quiet"]) == 0
    *_, last = (tmp_path / "run" / "ppo" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["evaluation/score"] > 0.5
