"""TensorBoard says what metrics.jsonl says."""

import json
import resource
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from proximo.metrics.tensorboard_sink import TensorBoardSink


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(name)]


def write_metrics(path: Path, steps: range, factor: float = 1.0) -> None:
    lines = [json.dumps({"step": step, "score/mean": step * factor}) for step in steps]
    path.write_text("".join(line + "\n" for line in lines))


def test_steps_are_written_as_they_come(tmp_path: Path):
    sink = TensorBoardSink(tmp_path / "tensorboard", tmp_path / "metrics.jsonl")
    sink.write(1, {"score/mean": 0.5, "progress/step": 1})
    sink.write(2, {"score/mean": 0.25})
    sink.close()
    assert points(tmp_path / "tensorboard", "score/mean") == [(1, 0.5), (2, 0.25)]
    assert points(tmp_path / "tensorboard", "progress/step") == [(1, 1.0)]


def test_tensorboard_takes_the_numbers_for_scalars(tmp_path: Path):
    sink = TensorBoardSink(tmp_path / "tensorboard", tmp_path / "metrics.jsonl")
    sink.write(1, {"score/mean": 0.5, "progress/step": 1})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.PluginTagToContent("scalars")) == {"score/mean", "progress/step"}


def test_steps_are_there_before_the_sink_is_closed(tmp_path: Path):
    sink = TensorBoardSink(tmp_path / "tensorboard", tmp_path / "metrics.jsonl")
    sink.write(1, {"score/mean": 0.5})
    sink.write(2, {"score/mean": 1.0})
    assert points(tmp_path / "tensorboard", "score/mean")[0] == (1, 0.5)
    sink.close()


def test_a_resume_rewrites_the_folder_so_that_no_step_is_there_twice(tmp_path: Path):
    folder, metrics = tmp_path / "tensorboard", tmp_path / "metrics.jsonl"
    first = TensorBoardSink(folder, metrics)
    for step in range(1, 6):
        first.write(step, {"score/mean": 100.0 + step})
    first.close()
    write_metrics(metrics, range(1, 4))
    second = TensorBoardSink(folder, metrics)
    second.write(4, {"score/mean": 4.0})
    second.close()
    assert points(folder, "score/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_null_in_the_file_is_a_gap_in_the_curve(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "policy/loss": null, "score/mean": 2.0}\n')
    TensorBoardSink(tmp_path / "tensorboard", tmp_path / "metrics.jsonl").close()
    assert points(tmp_path / "tensorboard", "score/mean") == [(1, 2.0)]
    with pytest.raises(KeyError):
        points(tmp_path / "tensorboard", "policy/loss")


def test_a_disk_that_refuses_is_an_error_that_names_the_file_and_no_other_thread_says_it(tmp_path: Path):
    threads = threading.enumerate()
    sink = TensorBoardSink(tmp_path / "tensorboard", tmp_path / "metrics.jsonl")
    assert threading.enumerate() == threads
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large.*events.out.tfevents") as caught:
            sink.write(1, {"score/mean": 0.5, "a/name/that/fills/the/file": 1.0, "another/one": 2.0})
        with pytest.raises(OSError, match="File too large"):
            sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Path(caught.value.filename).parent == tmp_path / "tensorboard"
