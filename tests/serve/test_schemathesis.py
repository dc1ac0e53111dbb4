"""Requests that schemathesis derives from the OpenAPI document, valid and invalid ones: none is answered by a 500."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
pytest.importorskip("uvicorn", reason="needs headstock[serve]")

EXAMPLES = 3  # requests per operation and kind, always the same ones


def all_cases(schema):
    """Every operation of the document, with a strategy for its valid and one for its invalid requests."""
    for mode in schemathesis.GenerationMode:
        for result in schema.get_all_operations():
            operation = result.ok()
            yield f"{mode.value} {operation.label}", operation.as_strategy(generation_mode=mode)


def call_all(schema) -> set[str]:
    """Send the requests of every operation and check their answers; returns what was sent, by kind and operation."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

    checks, operations = [not_a_server_error, content_type_conformance, status_code_conformance], set()
    for label, cases in all_cases(schema):

        @given(case=cases)
        @settings(max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        def call(case):
            case.call_and_validate(checks=checks)

        with suppress(Unsatisfiable):  # what takes no input has no invalid requests
            call()
        operations.add(label)
    return operations


def test_no_request_is_answered_by_a_server_error(server):
    operations = call_all(schemathesis.openapi.from_url(f"{server.url}/openapi.json"))
    assert {"positive POST /v1/completions", "negative POST /v1/classify", "negative POST /v1/explain"} <= operations


def test_a_server_error_would_be_noticed():
    """The control: one number in the middle of the range is too much."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    app = FastAPI()

    @app.get("/half")
    async def half(number: int) -> JSONResponse:
        return JSONResponse({}, status_code=500 if number == 0 else 200)

    with pytest.raises(schemathesis.core.failures.FailureGroup):
        call_all(schemathesis.openapi.from_asgi("/openapi.json", app))
