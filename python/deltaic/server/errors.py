"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from deltaic.async_llm import EngineStopped, QueueFull, RequestFailed
from deltaic.checkpoint import one_line

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    422: "model_output_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}
_FIELD = re.compile(r"([a-z_]+)(?:\[\d+\])*(?:\.[a-z_]+)*(?: key)?(?: must|:| is| has| needs| and)")
_FIRST_NAME = re.compile(r"[.\[]")  # ends it in a path
_MAX_SHOWN_CHARS = 500
_UNREADABLE = "There was an error parsing the body"  # what fastapi says


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """What every status from 400 on answers."""

    error: ErrorDetails


# For the OpenAPI schema.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request is wrong.",
        401: "The API key is missing or wrong.",
        404: "No such model or path.",
        413: "The body is too large.",
        422: "The model did not make the call that was asked for.",
        429: "The queue is full.",
        500: "The request failed.",
        503: "The engine is stuck, dead or shut down.",
    }.items()
}
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with stream, server-sent events.", "content": {"text/event-stream": {}}}
}


class ApiError(Exception):
    """What ends a request, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> str:
        """Return the body; ASCII, since a message may quote what is no text."""
        message = str(self)
        if len(message) > _MAX_SHOWN_CHARS:
            message = message[: _MAX_SHOWN_CHARS - 3] + "..."
        kind = _TYPES.get(self.status, "invalid_request_error")
        return json.dumps({"error": {"message": message, "type": kind, "param": self.param, "code": self.code}})

    def to_response(self) -> Response:
        return Response(self.to_json(), self.status, self.headers, "application/json")


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn what the block refuses of a request into status 400."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        message = one_line(error)
        found = _FIELD.match(message)
        raise ApiError(400, message, param=found and found[1]) from error


def to_api_error(error: Exception) -> ApiError:
    """Return what a client is told of an exception; a defect is logged and told without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, f"the server is busy: {error}", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, RequestFailed):
        return ApiError(500, one_line(error))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def add_error_handlers(app: FastAPI) -> None:
    async def known(_: Request, error: Exception) -> Response:
        return to_api_error(error).to_response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _explain(error.errors()).to_response()

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = error.detail
        if error.status_code == 400 and detail == _UNREADABLE:
            detail = (
                "the body is no JSON that can be read: it is not UTF-8, nested too deeply, or has a number too long"
            )
        return ApiError(error.status_code, detail, headers=error.headers).to_response()

    for kind in (ApiError, QueueFull, EngineStopped, RequestFailed):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)


def _explain(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return one line for what pydantic found wrong with a body."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if first["type"] == "lone_surrogate":
        return ApiError(400, first["msg"], param=_FIRST_NAME.split(first["ctx"]["path"])[0])
    path = first["loc"][1:]
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    field = str(path[0])
    # A field with several forms has an error for each.
    messages = dict.fromkeys(
        f"{_name(error['loc'][1:])}: {error['msg']}" for error in errors if error["loc"][1:2] == path[:1]
    )
    return ApiError(400, "; or ".join(list(messages)[:4]), param=field)


def _name(path: Sequence[int | str]) -> str:
    name = str(path[0])
    for part in path[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part != "str" and "[" not in part:  # else what pydantic calls one of a field's forms
            name += f".{part}"
    return name
