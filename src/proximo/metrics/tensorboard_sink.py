"""The TensorBoard sink: event files with the contents of metrics.jsonl."""

import itertools
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from proximo.errors import naming
from proximo.metrics.sinks import history

_event: Any = event_pb2  # protobuf creates its classes at run time, where a type checker cannot see them
_summary: Any = summary_pb2
_tensor: Any = tensor_pb2
_shape: Any = tensor_shape_pb2
_types: Any = types_pb2

SCALAR = _summary.SummaryMetadata(
    plugin_data=_summary.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=_summary.DATA_CLASS_SCALAR
)
"""Tells TensorBoard that a value is a scalar."""


_NUMBERS = itertools.count()
"""Of the event files of this process."""


class TensorBoardSink:
    """TensorBoard event files with the contents of metrics.jsonl.

    On opening, `folder` is deleted and rewritten from `metrics_file`, which a resume has truncated to its checkpoint
    before. So no step occurs twice, and a crash loses nothing that metrics.jsonl has.
    """

    def __init__(self, folder: Path, metrics_file: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        # The name that TensorBoard looks for. Its own writer has a thread, whose errors name no file.
        written = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._path = folder / written
        self._file = self._path.open("wb")
        self._writer = RecordWriter(self._file)
        self._append(_event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        for step, metrics in history(metrics_file):
            self._add(step, metrics)
        self._flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)
        self._flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()

    def _append(self, event: Any) -> None:
        with naming(self._path):
            self._writer.write(event.SerializeToString())

    def _flush(self) -> None:
        with naming(self._path):
            self._file.flush()

    def _add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add one event with all metrics of a step, which is much faster than one event per metric."""
        event = _event.Event(wall_time=time.time(), step=step)
        for name, number in metrics.items():
            if number is not None:  # None stands for a non-finite number
                tensor = _tensor.TensorProto(
                    dtype=_types.DT_FLOAT, tensor_shape=_shape.TensorShapeProto(), float_val=[number]
                )
                event.summary.value.add(tag=name, tensor=tensor, metadata=SCALAR)
        self._append(event)
