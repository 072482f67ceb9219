"""Settings as people write them: what no machine has is refused, with a hint, before anything is written down."""

from typing import Any

import msgspec
import pytest

from holdfast.config import parse_limits, parse_seconds, written_settings
from holdfast.errors import InvalidSetting
from holdfast.jupyter import settings

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
