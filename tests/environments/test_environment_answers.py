"""What environments may answer, and what is said of all else."""

import math
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from proximo.environments.players.player import MAX_ANSWER_CHARACTERS, InvalidAnswerError, checked_reset, checked_step

GOOD = ("seen", 1.0, False, False, {})
DEEP: Any = reduce(lambda deep, _: [deep], range(3000), [])
STEP = r"step\(text\) must return \(observation, reward, terminated, truncated, info\), it returned "


class Unshown:
    def __repr__(self) -> str:
        raise ZeroDivisionError("no text")


def stepped(**parts: Any) -> dict[str, Any]:
    names = ("observation", "reward", "terminated", "truncated", "info")
    return checked_step([parts.get(name, good) for name, good in zip(names, GOOD, strict=True)])


@pytest.mark.parametrize("reward", [1, 1.0, np.float32(1), np.int64(1), torch.tensor(1.0)])
def test_rewards_are_numbers_of_any_library(reward: Any) -> None:
    found = stepped(reward=reward, terminated=np.bool_(True))
    assert found["reward"] == 1.0
    assert type(found["reward"]) is float
    assert found["terminated"] is True


def test_messages_and_infos_arrive_as_plain_values() -> None:
    message = {"role": "user", "content": "hi", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    info = {"score": np.float32(0.5), "board": np.zeros(2), "loss": math.nan, "engine": object(), 3: "three"}
    found = checked_reset(((message,), info))
    assert found["observation"] == [message]
    assert found["info"].pop("loss") != found["info"].get("loss")
    assert found["info"] == {"score": 0.5, "board": [0.0, 0.0], "3": "three"}, "objects are left out"
    assert stepped(observation="half a \ud83d")["observation"] == "half a ?"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"observation": None}, r"step\(\) must return observation as a text, or a list .* NoneType None"),
        ({"observation": b"bytes"}, "it returned bytes b'bytes'"),
        ({"observation": ["text"]}, "it returned list "),
        ({"observation": [{"content": "no role"}]}, "it returned list "),
        ({"observation": [{"role": "user", "content": object()}]}, "content that is a text or parts of type text"),
        *(
            ({"observation": [{"role": "user", "content": content}]}, "it returned list ")
            for content in ([3], [{"type": "image"}], {}, b"", iter([]), DEEP)
        ),
        ({"observation": Unshown()}, "it returned Unshown <Unshown instance"),
        ({"info": {"tools": DEEP}}, "it returned list "),
        ({"observation": [{"role": "user", "content": 3}]}, "it returned list .*'content': 3"),
        ({"observation": [{"role": "user", "x": object()}]}, "it returned list "),
        ({"observation": "x" * (MAX_ANSWER_CHARACTERS + 1)}, "has 4,194,305 characters, more than 4,194,304"),
        ({"reward": True}, r"step\(\) must return reward as a finite number, it returned bool True"),
        ({"reward": "1"}, "it returned str '1'"),
        ({"reward": math.nan}, "it returned float nan"),
        ({"reward": -math.inf}, "it returned float -inf"),
        ({"reward": np.zeros(2)}, "it returned ndarray"),
        ({"terminated": 1}, r"step\(\) must return terminated as True or False, it returned int 1"),
        ({"truncated": None}, r"step\(\) must return truncated as True or False, it returned NoneType None"),
        ({"info": None}, r"step\(\) must return info as a mapping, it returned NoneType None"),
        ({"info": {"tools": [print]}}, r"step\(\) must return info\['tools'\] as a list of JSON schemas"),
        ({"info": {"page": "x" * (MAX_ANSWER_CHARACTERS + 1)}}, r"the info of step\(\) has 4,194,317 characters"),
    ],
)
def test_a_wrong_part_is_named_with_what_was_wanted(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidAnswerError, match=said):
        stepped(**parts)


@pytest.mark.parametrize("tools", [3, "abc", {}, [1], [{"a": 1}], [{"function": 3}], [{"function": {"name": None}}]])
def test_tools_without_names_and_a_beginning_without_messages_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidAnswerError, match=r"reset\(\) must return info\['tools'\] as a list of JSON schemas"):
        checked_reset(("go", {"tools": tools}))
    with pytest.raises(InvalidAnswerError, match="at least one message"):
        checked_reset(([], {}))


def test_contents_in_parts_are_joined_and_named_functions_are_tools() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": content} for content in (parts, None, parts[1])]
    found = checked_reset((messages, {"tools": [{"name": "f"}]}))
    assert [message["content"] for message in found["observation"]] == ["ab", "", "b"]
    assert found["info"] == {"tools": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("answer", "got"),
    [(("seen", 1.0, True, {}), "4 values"), ("seen", "str 'seen'"), (None, "NoneType None"), ({}, "dict {}")],
)
def test_an_answer_of_another_form_is_named(answer: Any, got: str) -> None:
    with pytest.raises(InvalidAnswerError, match=STEP + got):
        checked_step(answer)
    with pytest.raises(InvalidAnswerError, match=r"reset\(seed, row\) must return \(observation, info\), it returned"):
        checked_reset(answer)
