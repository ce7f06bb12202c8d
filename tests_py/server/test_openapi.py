"""Requests made from the OpenAPI schema: no 500, no hang, and answers that are what the schema says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from deltaic import AsyncLLM
from harness import SMALL, Maker, running_server, until
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def check_all(schema: Any, max_examples: int, idle: Callable[[], bool]) -> None:
    """Send what the schema allows and what it does not to every operation."""
    _forget_sizes(schema.raw_schema)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models/{name}"} <= {
        operation.path for operation in operations
    }
    for operation in operations:
        for mode in MODES if operation.method.upper() == "POST" else MODES[:1]:  # without a body nothing can be wrong
            send = given(operation.as_strategy(generation_mode=mode))(_send)
            settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))(send)()
            until(idle)


def _forget_sizes(schema: Any) -> None:
    """Drop the limits of arrays, which would be tried with bodies of many megabytes."""
    if isinstance(schema, dict):
        schema.pop("maxItems", None)
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _forget_sizes(inner)


def _send(case: Any) -> None:
    answer = case.call(timeout=20)
    case.validate_response(answer, excluded_checks=[positive_data_acceptance])  # a schema does not know every rule
    assert answer.status_code < 500, answer.text


def test_schema_in_process(make: Maker) -> None:
    server = make("A ďog.<|im_end|>")
    check_all(schemathesis.openapi.from_asgi("/openapi.json", server.app), 6, lambda: server.llm.num_unfinished == 0)


@pytest.fixture
def live_llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(**SMALL, max_model_len=64) as llm:
        yield llm


@pytest.mark.slow
def test_schema_on_a_socket(live_llm: AsyncLLM) -> None:
    with running_server(live_llm) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        check_all(schema, 150, lambda: live_llm.num_unfinished == 0)
        until(lambda: live_llm.stats().num_free_blocks == live_llm.stats().num_total_blocks)
