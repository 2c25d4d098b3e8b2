"""JSON lines are whole after a kill, and cut back to a step."""

import json
from contextlib import closing

import pytest

from proximo.checkpoint.logs import JsonLines, cut_back


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_there_as_soon_as_it_is_appended(tmp_path):
    with closing(JsonLines(tmp_path / "new" / "metrics.jsonl")) as log:
        log.append({"step": 1, "loss": 0.5})
        log.append({"step": 2, "text": "Grüße\nzweite Zeile\u2028", "nested": {"list": [1, (2.5, None)]}})
        assert lines_by_newline(tmp_path / "new" / "metrics.jsonl") == [
            {"step": 1, "loss": 0.5},
            {"step": 2, "text": "Grüße\nzweite Zeile\u2028", "nested": {"list": [1, [2.5, None]]}},
        ]
        log.sync()
    with closing(JsonLines(tmp_path / "new" / "metrics.jsonl")) as log:
        log.append({"step": 3})
    assert len(lines_by_newline(tmp_path / "new" / "metrics.jsonl")) == 3


def lines_by_newline(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    with closing(JsonLines(tmp_path / "log")) as log:
        log.append({"step": 1, "a": float("nan"), "b": [float("inf")], "c": {"d": -float("inf")}})
    assert lines(tmp_path / "log") == [{"step": 1, "a": None, "b": [None], "c": {"d": None}}]


def test_text_that_utf8_cannot_hold_does_not_stop_the_run(tmp_path):
    with closing(JsonLines(tmp_path / "log")) as log:
        log.append({"step": 1, "text": "a\ud800b"})
    assert lines(tmp_path / "log") == [{"step": 1, "text": "a?b"}]


WHOLE = b'{"step": 1}\n{"step": 2, "a": "\xc3\xa9"}\n{"step": 2}\n{"step": 4}\n'


@pytest.mark.parametrize(
    ("content", "step", "kept"),
    [
        (WHOLE, 4, WHOLE),
        (WHOLE, 3, WHOLE[:-12]),
        (WHOLE, 1, WHOLE[:12]),
        (WHOLE, -1, b""),
        (WHOLE + b'{"step": 4, "los', 4, WHOLE),
        (WHOLE + b'{"step": 5, "los', 3, WHOLE[:-12]),
        (WHOLE + b"\xc3", 4, WHOLE),
        (WHOLE + b"\0\0\0\0", 4, WHOLE),
        (WHOLE[:-1], 4, WHOLE),
    ],
)
def test_cutting_back_drops_later_steps_and_a_torn_last_line(content, step, kept, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(content)
    assert cut_back(path, step) == kept.count(b"\n")
    assert path.read_bytes() == kept
    assert cut_back(path, step) == kept.count(b"\n")


def test_every_place_where_a_line_can_be_torn(tmp_path):
    path = tmp_path / "log"
    line = '{"step": 5, "text": "Grüße", "x": {"y": [1]}}\n'.encode()
    for num_bytes in range(len(line) - 1):
        path.write_bytes(WHOLE + line[:num_bytes])
        cut_back(path, 5)
        assert path.read_bytes() == WHOLE
    for num_bytes in (len(line) - 1, len(line)):
        path.write_bytes(WHOLE + line[:num_bytes])
        cut_back(path, 5)
        assert path.read_bytes() == WHOLE + line


def test_a_log_that_is_not_there_is_already_cut_back(tmp_path):
    assert cut_back(tmp_path / "log", 3) == 0
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("bad", [b"not json", b'{"loss": 1}', b"[1]", b"", b'{"step": "2"}'])
def test_a_line_that_is_no_record_is_dropped_wherever_it_stands(bad, tmp_path):
    """A resume says that lines are missing: the checkpoint knows how many there were."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    assert cut_back(path, 3) == 2
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_lines_are_counted_from_the_start_of_the_file(tmp_path):
    path = tmp_path / "log"
    for count in (2, 4):
        with closing(JsonLines(path)) as log:
            log.append({"step": 1, "text": "a\nb"})
            log.append({"step": 1})
            assert log.num_lines == count
