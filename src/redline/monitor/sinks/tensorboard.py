"""TensorBoard: RUN/tensorboard, read by `tensorboard --logdir runs`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, BinaryIO

from redline.monitor.events import Event, number
from redline.monitor.sinks.names import scalars, step_of, texts

_PREFIX = "events.out.tfevents."
_FILE_VERSION = "brain.Event:2"


class TensorBoard:
    """Writes one event file for each start of the run, with TensorBoard's own record writer and no TensorFlow.

    A resumed run says at which step it goes on: readers then drop what an earlier file holds from there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def event(self, event: Event) -> None:
        if event["type"] == "start":
            self._open(event)
        if self._writer is None:
            return
        values = [_scalar(tag, value) for tag, value in scalars(event).items()]
        values += [_text(tag, text) for tag, text in texts(event).items()]
        if values:
            self._write(event, summary=_summary(values))
            self._writer.flush()

    def close(self) -> None:
        self._writer = None
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.folder / self._name(number(event, "time") or 0.0), "xb")  # noqa: SIM115 — for the run
        self._writer = RecordWriter(self._file)
        self._write(event, file_version=_FILE_VERSION)
        resumed_from = number(event, "resumed_from")
        if resumed_from is not None:
            self._write({**event, "step": resumed_from + 1}, session_log=SessionLog(status=SessionLog.START))
        self._writer.flush()

    def _name(self, now: float) -> str:
        """Files are read in the order of their names: later than every other, even within one second."""
        seconds = int(now)
        for path in self.folder.glob(f"{_PREFIX}*"):
            stamp = path.name.removeprefix(_PREFIX).split(".")[0]
            if stamp.isdigit():
                seconds = max(seconds, int(stamp) + 1)
        return f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"

    def _write(self, event: Event, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        record = Record(wall_time=number(event, "time") or 0.0, step=step_of(event), **content)
        self._writer.write(record.SerializeToString())


def _summary(values: list[Any]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=values)


def _scalar(tag: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=tag, simple_value=value)


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    block = "\n".join(f"    {line}" for line in text.split("\n"))  # Markdown: shown as it is
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype=DT_STRING, string_val=[block.encode()]),
    )
