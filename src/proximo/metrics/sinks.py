"""Where a step's line goes besides metrics.jsonl: what a sink is, and that of TensorBoard. Trackers: trackers.py."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

_event: Any = event_pb2  # protobuf makes its classes while it runs, so a checker finds none in its modules
_summary: Any = summary_pb2
_tensor: Any = tensor_pb2
_shape: Any = tensor_shape_pb2
_types: Any = types_pb2

SCALAR = _summary.SummaryMetadata(
    plugin_data=_summary.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=_summary.DATA_CLASS_SCALAR
)
"""Says to TensorBoard that a value is a point of a curve."""


class Sink(Protocol):
    """Something that wants the numbers of every step, once each and in order."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step."""
        ...

    def close(self) -> None:
        """Write out what is held back; nothing is written afterwards."""
        ...


@runtime_checkable
class SampleSink(Protocol):
    """A sink that wants the samples of a step too, after its numbers."""

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of samples.jsonl that belong to one step, one or more."""
        ...


class TensorBoardSink:
    """Event files that always say what metrics.jsonl says.

    On opening, `folder` is removed and written anew from `metrics_file`, which a resume has cut back to its checkpoint
    by then: so no step is there twice, and a crash can lose nothing that metrics.jsonl has.
    """

    def __init__(self, folder: Path, metrics_file: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        self._writer = EventFileWriter(str(folder))
        for step, metrics in history(metrics_file):
            self._add(step, metrics)
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """One event for all numbers of a step, which takes a fraction of the time of one event each."""
        event = _event.Event(wall_time=time.time(), step=step)
        for name, number in metrics.items():
            if number is not None:  # how JSON says "not finite"
                tensor = _tensor.TensorProto(
                    dtype=_types.DT_FLOAT, tensor_shape=_shape.TensorShapeProto(), float_val=[number]
                )
                event.summary.value.add(tag=name, tensor=tensor, metadata=SCALAR)
        self._writer.add_event(event)


def history(metrics_file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The steps of a metrics.jsonl with their numbers; nothing where there is no such file."""
    if not metrics_file.exists():
        return
    with metrics_file.open(encoding="utf-8") as lines:
        for line in lines:
            metrics = json.loads(line)
            yield metrics.pop("step"), metrics
