"""What a server counts, in Prometheus' text format.

Written here rather than taken from `prometheus_client`, whose import alone takes 50 to 140 ms here (it brings an HTTP
server, WSGI and files for many processes: `python -X importtime -c "import prometheus_client"`). Its parser is in our
tests.

1. Every label has few values: routes by template, methods that exist, statuses by class. No client can make a new one.
2. All calls come from the server's event loop; there is no lock.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """How things are now."""

    sessions: int = 0
    """Sessions that are live."""
    kernels: int = 0
    """Kernels that run."""
    memory_bytes: int = 0
    """What all sessions are charged for together."""


class Metrics:
    """
    >>> metrics = Metrics(lambda: Gauges(sessions=2))
    >>> metrics.run_ended(status="committed", seconds=0.2)
    >>> 'holdfast_runs_total{status="committed",code=""} 1' in metrics.text()
    True
    """

    def __init__(self, measure: Callable[[], Gauges] = Gauges) -> None:
        self._measure = measure
        self._began = time.monotonic()
        self._requests = Counter("holdfast_requests_total", "HTTP requests.", "route", "method", "status")
        self._request_s = Histogram("holdfast_request_seconds", "Time to the end of the answer.", "route")
        self._bytes_in = Counter("holdfast_received_bytes_total", "Bodies of requests.")
        self._bytes_out = Counter("holdfast_sent_bytes_total", "Bodies of answers.")
        self._runs = Counter("holdfast_runs_total", "Runs that ended.", "status", "code")
        self._run_s = Histogram("holdfast_run_seconds", "Duration of runs.")

    def request_ended(
        self, *, route: str | None, method: str, status: int, seconds: float, bytes_in: int = 0, bytes_out: int = 0
    ) -> None:
        """`route` is the template; None: there is no such route. Status 0: the client left without an answer."""
        route = route or "none"
        self._requests.add(1, route, method if method in _METHODS else "other", f"{status // 100}xx" if status else "")
        self._request_s.add(seconds, route)
        self._bytes_in.add(bytes_in)
        self._bytes_out.add(bytes_out)

    def run_ended(self, *, status: str, seconds: float, code: str = "") -> None:
        """`code` is the code of the run's error."""
        self._runs.add(1, status, code)
        self._run_s.add(seconds)

    def text(self) -> str:
        """What GET /metrics answers, as `CONTENT_TYPE`."""
        now = self._measure()
        families = (self._requests, self._request_s, self._bytes_in, self._bytes_out, self._runs, self._run_s)
        lines = [line for family in families for line in family.lines()]
        lines += _gauge("holdfast_sessions", "Sessions that are live.", now.sessions)
        lines += _gauge("holdfast_kernels", "Kernels that run.", now.kernels)
        lines += _gauge("holdfast_memory_bytes", "Memory of all sessions.", now.memory_bytes)
        lines += _gauge("holdfast_uptime_seconds", "Since the server began.", time.monotonic() - self._began)
        return "\n".join(lines) + "\n"


class Counter:
    """A number for each combination of labels, which only grows."""

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, self._about, "counter")
        for values, number in self._values.items():
            yield f"{self._name}{_labels(self._labels, values)} {number:.17g}"


class Histogram:
    """How often something took how long."""

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._counts: dict[tuple[str, ...], list[int]] = {} if labels else {(): [0] * (len(SECONDS) + 1)}
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, seconds: float, *labels: str) -> None:
        counts = self._counts.setdefault(labels, [0] * (len(SECONDS) + 1))
        for place, most in enumerate((*SECONDS, float("inf"))):
            counts[place] += seconds <= most
        self._sums[labels] = self._sums.get(labels, 0.0) + seconds

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, self._about, "histogram")
        for values, counts in self._counts.items():
            for most, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
                yield f"{self._name}_bucket{_labels((*self._labels, 'le'), (*values, most))} {count}"
            named = _labels(self._labels, values)
            yield f"{self._name}_sum{named} {self._sums.get(values, 0.0):.17g}"
            yield f"{self._name}_count{named} {counts[-1]}"


def _gauge(name: str, about: str, value: float) -> Iterator[str]:
    yield from _head(name, about, "gauge")
    yield f"{name} {value:.17g}"


def _head(name: str, about: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {about}", f"# TYPE {name} {kind}"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
