"""The TensorBoard sink: event files with the contents of metrics.jsonl."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

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


class TensorBoardSink:
    """TensorBoard event files with the contents of metrics.jsonl.

    On opening, `folder` is deleted and rewritten from `metrics_file`, which a resume has truncated to its checkpoint
    before. So no step occurs twice, and a crash loses nothing that metrics.jsonl has.
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
        """Add one event with all metrics of a step, which is much faster than one event per metric."""
        event = _event.Event(wall_time=time.time(), step=step)
        for name, number in metrics.items():
            if number is not None:  # None stands for a non-finite number
                tensor = _tensor.TensorProto(
                    dtype=_types.DT_FLOAT, tensor_shape=_shape.TensorShapeProto(), float_val=[number]
                )
                event.summary.value.add(tag=name, tensor=tensor, metadata=SCALAR)
        self._writer.add_event(event)
