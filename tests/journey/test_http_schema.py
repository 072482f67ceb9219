"""The server against its own description: schemathesis makes requests up, sound and broken, and none makes it fail."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.control import SkipTest
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 4
ENDLESS = ("/v1/sessions/{id}/hold", "/v1/sessions/{id}/events")
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {server.token}"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def target(http: httpx2.Client) -> Iterator[dict[str, str]]:
    """What real requests name: a session, a run, a file."""
    at = http.post("/v1/sessions", json={"memory": "256M", "timeout": 2}).headers["location"]
    code = {"code": "open('a.txt', 'w').write('a')"}
    run = http.post(f"{at}/runs", json=code, headers={"accept": "application/json"}).json()["id"]
    yield {"id": at.rpartition("/")[2], "run": run, "path": "a.txt"}
    http.delete(at)


def operations(http: httpx2.Client, mode: GenerationMode) -> list[Any]:
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    schema.config.generation.update(modes=[mode])
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_requests_that_nobody_thought_of(
    http: httpx2.Client, server: Any, target: dict[str, str], mode: GenerationMode
) -> None:
    before = {each["id"] for each in http.get("/v1/sessions").json()}
    for operation in operations(http, mode):
        try_all(operation, mode, server, target)
    for made in {each["id"] for each in http.get("/v1/sessions").json()} - before - {target["id"]}:
        http.delete(f"/v1/sessions/{made}")
    assert http.get("/v1/health").json()["status"] == "ok"


def try_all(operation: Any, mode: GenerationMode, server: Any, target: dict[str, str]) -> None:
    headers = {"authorization": f"Bearer {server.token}"}
    endless, deletes = operation.path in ENDLESS, operation.method == "delete" and operation.path.endswith("{id}")
    creates = operation.method == "post" and operation.path == "/v1/sessions"

    @settings(
        max_examples=2 if creates else EXAMPLES, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def attempt(case: Any) -> None:
        if not (endless or deletes):  # else only what is not there is asked for
            case.path_parameters = {name: target[name] for name in case.path_parameters or {}}
        case.call_and_validate(base_url=server.url, headers=headers, timeout=30, checks=CHECKS)

    with suppress(SkipTest):  # where nothing is asked for, nothing can be wrong
        attempt()
