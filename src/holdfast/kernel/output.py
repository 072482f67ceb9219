"""What a run prints, bounded twice: a result carries the head and the tail, a file on disk the whole up to a limit."""

import codecs
import os
from pathlib import Path
from typing import BinaryIO

from holdfast.model import StreamName

_Decoder = codecs.getincrementaldecoder("utf-8")


class HeadAndTail:
    """The first and the last bytes of a stream that may be endless."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = max(1, limit_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped_bytes = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        if len(self._tail) > 2 * self._half:
            self._trim()

    def text(self) -> str:
        self._trim()
        if not self.dropped_bytes:
            return (self._head + self._tail).decode(errors="replace")
        head, tail = (part.decode(errors="replace") for part in (self._head, self._tail))
        return f"{head}\n… {self.dropped_bytes:,} bytes left out here; Session.output has them …\n{tail}"

    def _trim(self) -> None:
        if (excess := len(self._tail) - self._half) > 0:
            self.dropped_bytes += excess
            del self._tail[:excess]


class RunOutput:
    """stdout and stderr of one run."""

    def __init__(self, logs: Path, run: str, *, output_bytes: int, log_bytes: int) -> None:
        streams: tuple[StreamName, ...] = ("stdout", "stderr")
        self._kept = {name: HeadAndTail(output_bytes) for name in streams}
        self._decoders = {name: _Decoder("replace") for name in self._kept}
        self._logs, self._run = logs, run
        self._log_bytes = log_bytes
        self._files: dict[str, BinaryIO] = {}
        self.logged_bytes = 0
        self._cut_short = False
        self.over_limit = False

    def add(self, stream: StreamName, data: bytes, *, charged: bool = True) -> str:
        """Keep it; returns the text to stream (a character cut in two comes with its second half)."""
        self._log_bytes += 0 if charged else len(data)
        self._kept[stream].add(data)
        self._log(stream, data)
        return self._decoders[stream].decode(data)

    def finish(self) -> list[tuple[StreamName, str]]:
        """What is left to stream: characters whose second half never came."""
        rest = [(name, decoder.decode(b"", final=True)) for name, decoder in self._decoders.items()]
        return [(name, text) for name, text in rest if text]

    def text(self, stream: StreamName) -> str:
        return self._kept[stream].text()

    @property
    def dropped_bytes(self) -> int:
        return sum(kept.dropped_bytes for kept in self._kept.values())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _log(self, stream: str, data: bytes) -> None:
        room = self._log_bytes - self.logged_bytes
        self.over_limit = self.over_limit or len(data) > room
        self.logged_bytes += min(room, len(data))
        if room <= 0 or self._cut_short:
            return
        try:
            if stream not in self._files:
                self._files[stream] = open(log_file(self._logs / self._run, stream), "ab", buffering=0)  # noqa: SIM115
            self._files[stream].write(data[:room])
        except OSError:
            # The host's disk is full: the result still has head and tail, the log ends here.
            self._cut_short = True


def log_file(log: Path, stream: str) -> Path:
    return log.with_name(f"{log.name}.{stream}")


def forget_oldest_logs(directory: Path, *, keep_bytes: int) -> None:
    """A session's logs are bounded as a whole, so that nothing a guest prints can fill the host's disk."""
    files = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in os.scandir(directory))
    excess = sum(size for _, size, _ in files) - keep_bytes
    for _, size, path in files:
        if excess <= 0:
            return
        os.unlink(path)
        excess -= size
