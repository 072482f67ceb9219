"""Settings as people write them: what no machine has is refused, with a hint, before anything is written down."""

import inspect
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.datastructures import QueryParams
from typer.testing import CliRunner

from holdfast import AsyncSession
from holdfast.cli.main import app
from holdfast.config import home_path, parse_limits, parse_seconds, written_settings
from holdfast.errors import InvalidSetting
from holdfast.jupyter import settings
from holdfast.server.mcp.http import _limits

HUGE: list[dict[str, Any]] = [
    {"disk": "99999999999T"}, {"disk": 1 << 62}, {"disk": 10**5000}, {"disk": "9" * 400}, {"memory": "4194304T"},
    {"cpus": float("inf")}, {"cpus": float("nan")}, {"cpus": 10_001}, {"cpus": 0}, {"cpus": -1.0},
    {"processes": (1 << 22) + 1}, {"processes": 7}, {"processes": 10**5000},
    {"timeout": "9" * 400 + "d"}, {"timeout": 10**400}, {"timeout": float("inf")}, {"timeout": 1e9},
]  # fmt: skip


@pytest.mark.parametrize("limits", HUGE)
def test_a_limit_that_no_machine_has_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting) as refused:
        parse_limits(**limits)

    assert refused.value.hint
    assert len(refused.value.message) < 200


NAN, INF = float("nan"), float("inf")
NO_NUMBERS: list[Any] = [
    None,
    True,
    False,
    b"2",
    [2],
    {},
    object(),
    2j,
    Decimal(2),
    Path("2"),
    "",
    "two",
    "-1",
    "\ud800",
]
NEVER: list[Any] = [*NO_NUMBERS, NAN, INF, -INF, -1, -1.0, -(10**5000), 10**5000, 1 << 64, 1e300, "nan", "inf", "1e400"]
WHOLE: list[Any] = [*NEVER, 1000.0, 8.5, "1000.0", 1e-300]
SIZES: list[Any] = [*NEVER, 0, 0.0, 1000.0, 1.5, "0", "0M", "0.1", "1e9", "1 X", "M"]
REFUSED: dict[str, list[Any]] = {
    "memory": SIZES,
    "disk": SIZES,
    "timeout": [*NEVER[1:], 0, 0.0, 1e-300, 1e-4, "0s", "0.1ms", "1e3", "s"],  # None: the usual one
    "cpus": [*NEVER, 0, 0.0, 1e-300, 0.009, "2", 10_001],
    "processes": [*WHOLE, 0, 7, (1 << 22) + 1, "256"],
    "undo": [*WHOLE, 1.0, 1.5, "2", "0", 17],
    "versions": [*WHOLE, 0, 1.0, 1.5, "0", "101", "2.0", "\u0665", 101],
}
TABLE = [
    pytest.param(name, value, id=f"{name}-{number}")  # a name of its own: some values cannot be written out
    for name, values in REFUSED.items()
    for number, value in enumerate(values)
]
TEXTS = [each for each in TABLE if isinstance(each.values[1], str) and each.values[1].isprintable()]


def test_every_limit_that_callers_write_is_in_the_table() -> None:
    assert REFUSED.keys() == inspect.signature(parse_limits).parameters.keys()


@pytest.mark.parametrize(("name", "value"), TABLE)
def test_what_is_no_limit_is_refused_by_the_python_api(name: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}=") as refused:
        AsyncSession(**{name: value})

    assert refused.value.hint
    assert len(refused.value.message) < 200


PATHS: list[Any] = [5, True, b"home", [], "", "a\0b", "~nobody-of-that-name/home", object(), 10**5000]


@pytest.mark.parametrize("value", [*PATHS, None], ids=range(len(PATHS) + 1))
@pytest.mark.parametrize("name", ["home", "env", "memory_cap"])
def test_what_is_no_setting_of_a_home_is_refused(name: str, value: Any) -> None:
    if value is None and name != "memory_cap":
        return
    with pytest.raises(InvalidSetting, match=f"{name}="):
        AsyncSession(**{name: value})


@pytest.mark.parametrize(("name", "value"), TEXTS)
def test_what_is_no_limit_is_refused_in_an_address_and_on_the_command_line(name: str, value: str) -> None:
    if name in ("memory", "disk", "timeout", "versions"):
        with pytest.raises(InvalidSetting, match=f"{name}="):
            _limits(QueryParams({name: value}))
    if name in ("memory", "disk", "timeout"):
        done = CliRunner().invoke(app, ["exec", f"--{name}", value, "1"], env={"COLUMNS": "200"})
        assert done.exit_code == 2


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e-300", "0", "-1", "10001", "1e400", "two", "True"])
def test_what_is_no_number_of_cores_is_refused_on_the_command_line(value: str) -> None:
    done = CliRunner().invoke(app, ["exec", "--cpus", value, "1"], env={"COLUMNS": "200"})

    assert done.exit_code == 2 or (done.exit_code == 3 and "[invalid_setting]" in done.output), done.output


def test_a_home_may_be_a_text_or_a_path() -> None:
    assert home_path("a") == home_path(Path("a")) == Path.cwd() / "a"


def test_the_largest_limits_can_be_written_down() -> None:
    limits = parse_limits(disk=(1 << 62) - 1, memory="4194303T", cpus=10_000, processes=1 << 22)

    assert msgspec.msgpack.encode(written_settings(limits, "strict", None))
    assert parse_seconds("366d", name="timeout") == 366 * 86400


def test_the_number_of_versions_may_come_from_an_address() -> None:
    assert parse_limits(versions="50").versions == 50
    assert parse_limits().versions == 20


def test_what_a_notebooks_variable_says_wrongly_is_refused_where_somebody_reads_it() -> None:
    ours, _ = settings.chosen([], {"HOLDFAST_JUPYTER_CPUS": "two"})

    with pytest.raises(InvalidSetting, match="cpus='two' is not a number of cores"):
        parse_limits(cpus=ours.options["cpus"])
