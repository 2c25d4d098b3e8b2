"""Traces of OpenEnv in and out: trajectories that come back as they were, rows for fine-tuning, refusals."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.environments.environment import EnvironmentStep
from proximo.environments.training_traces import read_traces, trace_of, trace_rows, write_traces
from proximo.environments.trajectory import Trajectory
from proximo.errors import DataError
from proximo.ppo.trainer import PPOTrainer
from proximo.records import Finish, Prompt, Response
from proximo.rollout.session import CallRequest, ModelCall

DEEP = json.loads("[" * 300 + "]" * 300)


def call(read: tuple[int, ...], written: tuple[int, ...]) -> ModelCall:
    request = CallRequest(id=0, lane=0, token_ids=read, stream=0, first_position=0, max_new_tokens=9)
    logprobs = tuple(-0.25 * token for token in written)
    return ModelCall(request=request, token_ids=written, logprobs=logprobs, finish=Finish.EOS, versions=((0, 0),))


def trajectory() -> Response:
    """Three turns, of which the second goes on and the third forks."""
    made = Trajectory(prompt=Prompt(id="row", token_ids=(6, 7)), sample_index=1)
    made.add_call(call((6, 7), (8, 2)), "a")
    made.add_answer(EnvironmentStep(observation="go on", reward=0.5))
    made.add_call(call((6, 7, 8, 2, 9), (10,)), "b")
    made.add_answer(EnvironmentStep(observation="anew"))
    made.add_call(call((6, 11), (12, 13)), "c")
    made.add_answer(EnvironmentStep(observation="", reward=2.0, terminated=True))
    return made.response(Finish.TERMINATED)


def test_a_trajectory_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_traces(tmp_path / "traces.jsonl", [trajectory(), trajectory()])
    read = read_traces(tmp_path / "traces.jsonl")
    assert len(read) == 2
    response, reward = read[0]
    expected = trajectory()
    assert reward == 2.5
    assert (response.token_ids, response.forks, response.finish) == (
        expected.token_ids,
        expected.forks,
        expected.finish,
    )
    assert response.prompt.token_ids == expected.prompt.token_ids
    assert torch.equal(response.logprobs, expected.logprobs)
    assert torch.equal(response.response_mask, expected.response_mask)
    assert [(turn.start, turn.end) for turn in response.episode.turns] == [(0, 2), (3, 4), (4, 6)]


@pytest.mark.parametrize("finish", [Finish.TRUNCATED, Finish.LENGTH])
def test_a_cut_comes_back_as_a_cut_with_what_was_read_after_it(tmp_path: Path, finish: Finish) -> None:
    made = Trajectory(prompt=Prompt(id="row", token_ids=(6, 7)), sample_index=0)
    made.add_call(call((6, 7), (8, 2)), "a")
    made.add_answer(EnvironmentStep(observation="go on", reward=-1.0))
    made.add_call(call((6, 7, 8, 2, 9), (10,)), "b")
    made.add_answer(EnvironmentStep(observation="cut", reward=2.0, truncated=True))
    made.add_prompt((6, 7, 8, 2, 9, 10, 11, 12))
    write_traces(tmp_path / "traces.jsonl", [made.response(finish)])
    ((response, reward),) = read_traces(tmp_path / "traces.jsonl")
    assert (response.finish, reward) == (finish, 1.0)
    assert response.token_ids == (8, 2, 9, 10, 11, 12)
    assert response.response_mask.tolist() == [True, True, False, True, False, False]
    assert [turn.reward for turn in response.episode.turns] == [-1.0, 2.0]


def test_a_fault_is_not_written(tmp_path: Path) -> None:
    made = trajectory()
    failed = replace(made, finish=Finish.ABORTED, episode=replace(made.episode, failure="died: its process ended"))
    with pytest.raises(DataError, match=r"has failed \(died: its process ended\): leave it out"):
        write_traces(tmp_path / "traces.jsonl", [made, failed])
    assert not (tmp_path / "traces.jsonl").exists()


def test_the_reward_of_a_turn_that_nobody_learns_is_that_of_the_one_before(tmp_path: Path) -> None:
    unlearned = captured(node_id="n1", loss_mask=[0, 0, 0, 0], metadata={"reward": 1})
    path = written(tmp_path, captured(metadata={"reward": 0.5}), unlearned, captured(node_id="n2"))
    ((response, reward),) = read_traces(path)
    assert ([turn.reward for turn in response.episode.turns], reward) == ([1.5, 0.0], 1.5)


def test_each_turn_of_a_trace_has_all_that_was_read() -> None:
    turns = trace_of(trajectory())["turns"]
    assert [turn["prompt_token_ids"] for turn in turns] == [[6, 7], [6, 7, 8, 2, 9], [6, 11]]
    assert turns[1]["loss_mask"] == [0, 0, 0, 0, 0, 1]
    assert [turn["metadata"]["reward"] for turn in turns] == [0.5, 0.0, 2.0]


def captured(**changes: Any) -> dict[str, Any]:
    turn = {
        "node_id": "n0",
        "prompt_token_ids": [6, 7],
        "completion_token_ids": [8, 2],
        "per_token_logps": [-1.0, -0.5],
        "loss_mask": [0, 0, 1, 1],
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "response": {"choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}]},
        "metadata": {},
    }
    return turn | changes


def written(folder: Path, *turns: dict[str, Any]) -> Path:
    (folder / "traces.jsonl").write_text(json.dumps({"schema_version": 1, "turns": turns}) + "\n")
    return folder / "traces.jsonl"


def test_what_nobody_learns_is_left_out(tmp_path: Path) -> None:
    unlearned = captured(node_id="n1", loss_mask=[0, 0, 0, 0])
    partly = captured(node_id="n2", loss_mask=[0, 0, 1, 0])
    ((response, reward),) = read_traces(written(tmp_path, unlearned, partly))
    assert response.response_mask.tolist() == [True, False]
    assert (reward, response.finish, response.text) == (None, Finish.LENGTH, "a")
    assert len(list(trace_rows(tmp_path / "traces.jsonl"))) == 1


def test_captured_messages_are_rows_for_fine_tuning(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    path = written(tmp_path, captured(), captured(node_id="n1", request=request))
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    assert list(trace_rows(path)) == [{"messages": said}, {"messages": said, "tools": tools}]
    (row,) = trace_rows(written(tmp_path, captured(request={"messages": ["half \ud83d"], "tools": DEEP})))
    assert row["messages"][0] == "half \ud83d"
    with pytest.raises(DataError, match="turn 'n0' has token ids and no messages"):
        list(trace_rows(written(tmp_path, captured(request={}))))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"node_id": None}, "node_id: .*valid string"),
        ({"loss_mask": None}, "loss_mask: .*valid list"),
        ({"prompt_token_ids": [-1, 7]}, "prompt_token_ids.0: .*greater than or equal to 0"),
        ({"prompt_token_ids": [2**70, 7]}, "prompt_token_ids.0: .*less than"),
        ({"prompt_token_ids": [], "loss_mask": [1, 1]}, "prompt_token_ids: .*at least 1 item"),
        ({"per_token_logps": [-1.0]}, "one number for each token written"),
        ({"per_token_logps": [0.1, 0.0]}, "per_token_logps.0: .*less than or equal to 0"),
        ({"per_token_logps": [-1.0, -(10**400)]}, "per_token_logps.1: "),
        ({"loss_mask": [1, 0, 1, 1]}, "0 for each token read"),
        ({"loss_mask": [0, 0, 1]}, "0 for each token read"),
        ({"request": []}, "request: .*valid dictionary"),
        ({"prompt_token_ids": DEEP}, "prompt_token_ids.0: .*valid integer"),
        ({"loss_mask": [0, 0, True, 1]}, "loss_mask.2: "),
        ({"loss_mask": [0, 0, 1.0, 1]}, "loss_mask.2: "),
        ({"per_token_logps": [-1.0, float("nan")]}, "per_token_logps.1: .*finite"),
        ({"metadata": []}, "metadata: "),
        ({"metadata": {"reward": 10**400}}, "metadata.reward: "),
        ({"metadata": {"reward": "much"}}, "metadata.reward: .*valid number"),
        ({"metadata": {"finish": "aborted"}}, "metadata.finish: .*'terminated' or 'truncated'"),
        ({"metadata": {"after_token_ids": [-1]}}, "metadata.after_token_ids.0: "),
    ],
)
def test_a_turn_that_breaks_the_form_is_refused_with_its_line(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"traces\.jsonl:1: turns\.0.*{problem}"):
        read_traces(written(tmp_path, captured(**changes)))


@pytest.mark.parametrize("line", ["{", "[" * 10**6, "[]", '{"turns": 1}', '{"schema_version": 2, "turns": []}'])
def test_a_line_that_is_no_trace_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "traces.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"traces\.jsonl:1: "):
        read_traces(tmp_path / "traces.jsonl")


def test_two_turns_of_one_name_and_traces_without_learning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two turns have one node_id"):
        read_traces(written(tmp_path, captured(), captured()))
    with pytest.raises(DataError, match="no turn of this trace is learned"):
        read_traces(written(tmp_path, captured(loss_mask=[0, 0, 0, 0])))
    with pytest.raises(DataError, match="has no log-probs of its tokens"):
        trace_of(replace(trajectory(), logprobs=torch.full((7,), torch.nan)))


def test_a_policy_learns_from_what_another_agent_did(tmp_path: Path) -> None:
    write_traces(tmp_path / "traces.jsonl", [trajectory()] * 4)
    read = read_traces(tmp_path / "traces.jsonl")
    config = PPOConfig(kl="none", policy_loss={"behaviour_weight": "truncated"}, minibatch_responses=4)
    trainer = PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=config)
    line = trainer.step([response.prompt for response, _ in read], [r for r, _ in read], [1.0, 0.0, None, 0.5])
    assert line["score/mean"] == 0.5


@pytest.mark.skipif(
    "PROXIMO_TEST_OPENENV" not in os.environ,
    reason="openenv has an environment of its own: PROXIMO_TEST_OPENENV names its interpreter",
)
def test_openenv_reads_what_is_written(tmp_path: Path) -> None:
    write_traces(tmp_path / "traces.jsonl", [trajectory()])
    program = (
        "import sys; from openenv.core.harness.training import TrainingTrace; "
        "trace = TrainingTrace.model_validate_json(open(sys.argv[1]).read()); print(len(trace.turns)); "
        "open(sys.argv[1], 'w').write(trace.model_dump_json())"
    )
    command = [os.environ["PROXIMO_TEST_OPENENV"], "-c", program, str(tmp_path / "traces.jsonl")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "3"
    ((response, reward),) = read_traces(tmp_path / "traces.jsonl")
    assert (response.token_ids, reward) == (trajectory().token_ids, 2.5)
