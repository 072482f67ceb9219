"""`holdfast logs`: what a run printed.

It is read from the session's log files, beside whoever owns the home. Following one that is under way therefore holds
nothing up: a reader that is slow, or stops, is nothing to the run.
"""

import codecs
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli import homes
from holdfast.cli.show import resolve_run
from holdfast.cli.terminal import Writer
from holdfast.config import home_path
from holdfast.kernel.output import log_file
from holdfast.model import StreamName
from holdfast.records import Settled
from holdfast.resources.workspace import Workspace

_STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
_LOOK_AGAIN_S = 0.1
_PIECE_BYTES = 1 << 20


def logs(session: str, run: str | None, *, home: Path | None, follow: bool, as_json: bool) -> int:
    """The latest run, unless one is named."""
    where, session = homes.locate(home_path(home), session)
    with homes.reading(where) as store:
        assert store is not None  # it knows the session
        run = resolve_run(store, session, run)
    log = _Log(where, session, run)
    pieces = log.follow() if follow else log.read()
    if as_json:
        _print_json(log, pieces, follow=follow)
    else:
        writers = {"stdout": Writer(sys.stdout), "stderr": Writer(sys.stderr)}
        for stream, text in pieces:
            writers[stream].write(text)
    return 0


def _print_json(log: "_Log", pieces: Iterator[tuple[StreamName, str]], *, follow: bool) -> None:
    """One object; while it is followed, one a line, as it comes."""
    kept: dict[str, str] = {stream: "" for stream in _STREAMS}
    for stream, text in pieces:
        if follow:
            print(json.dumps({"run": log.run, "stream": stream, "text": text}), flush=True)
        kept[stream] += "" if follow else text
    if not follow:
        print(json.dumps({"run": log.run, **kept, "settled": log.is_settled()}))


class _Log:
    """What one run printed so far."""

    def __init__(self, home: Path, session: str, run: str) -> None:
        self.run = run
        self._home = home
        base = Workspace(home / "sessions" / session).logs / run
        self._paths = {stream: log_file(base, stream) for stream in _STREAMS}
        self._read_bytes = dict.fromkeys(_STREAMS, 0)
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in _STREAMS}

    def is_settled(self) -> bool:
        """Nothing more comes. A session that was ended meanwhile has no records any more."""
        with homes.reading(self._home) as store:
            records = store.records(self.run) if store else []
        return not records or isinstance(records[-1], Settled)

    def read(self) -> Iterator[tuple[StreamName, str]]:
        """What was not read yet."""
        for stream in _STREAMS:
            try:
                with self._paths[stream].open("rb") as file:
                    file.seek(self._read_bytes[stream])
                    while data := file.read(_PIECE_BYTES):
                        self._read_bytes[stream] += len(data)
                        yield stream, self._decoders[stream].decode(data)
            except FileNotFoundError:  # it printed nothing there, or it is so long ago that the log is gone
                continue

    def follow(self) -> Iterator[tuple[StreamName, str]]:
        """Until the run is settled."""
        while True:
            over = self.is_settled()  # asked before the last reading, so that nothing is missed
            yield from self.read()
            if over:
                return
            time.sleep(_LOOK_AGAIN_S)
