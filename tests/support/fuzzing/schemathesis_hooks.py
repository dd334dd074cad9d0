"""What schemathesis is told of our gateway; its own process imports this (`SCHEMATHESIS_HOOKS`)."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st

from fuzzing.likely_values import LikelyRequests

FACTS = json.loads(os.environ["CATENARY_FUZZ"])
LIKELY = LikelyRequests(**FACTS["likely"])
CHANGING = ("/v2/trace/setting", "/v2/logging", "/v2/systemsharedmemory/unregister")
"""What the operator's key is used for: settings of this gateway, and regions that nobody has.

Models are loaded and unloaded with a key that may not, since without models nothing is left to be
asked; so are the settings of single models looked at.
"""
NOT_OFFERED = ("/load", "/unload", "/trace/setting", "/logging", "/register", "/infer")
LIMITED = ("slo_ms", "timeout", "deadline_unix_ms")
"""Parameters by which a request itself says that it is too late to try again."""


COUNTS: defaultdict[str, Counter[int]] = defaultdict(Counter)
"""Answers of each operation by their status."""
BODIES: dict[tuple[str, str], str] = {}
"""The names of the schemas of bodies, by method and path."""


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    for path, operations in raw_schema["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            BODIES[method.upper(), path] = reference.rpartition("/")[2]


@schemathesis.hook
def flatmap_case(context: Any, case: Any) -> st.SearchStrategy[Any]:
    operation = case.operation
    name = BODIES[operation.method.upper(), operation.path]
    # What is written anew is judged anew: what was left out of a request stays as it was drawn.
    is_object = isinstance(case.body, dict)
    bodies = LIKELY.bodies(name, case.body) if is_object else st.none()
    paths = LIKELY.in_path(case.path_parameters) if case.path_parameters else st.none()

    def changed(values: tuple[Any, Any]) -> Any:
        body, path_parameters = values
        if body is not None:
            case.body = body
        if path_parameters is not None:
            case.path_parameters = path_parameters
        return case

    return st.tuples(bodies, paths).map(changed)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    key = FACTS["operator" if case.operation.path in CHANGING else "caller"]
    case.headers = {**(case.headers or {}), "Authorization": f"Bearer {key}"}


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    COUNTS[f"{case.operation.method.upper()} {case.operation.path}"][response.status_code] += 1


@atexit.register
def write_counts() -> None:
    Path(FACTS["counts"]).write_text(json.dumps(COUNTS))


@schemathesis.check
def answers_as_documented(ctx: Any, response: Any, case: Any) -> None:
    """What the description promises beyond its schemas."""
    path, status = case.operation.path, response.status_code
    assert "internal error, id" not in response.text, "an internal error is in the answer"
    assert status != 501 or path.endswith(NOT_OFFERED), "501 is not documented here"
    assert status not in (503, 504) or "retry-after" in response.headers or _is_limited(case), (
        f"{status} without Retry-After"
    )
    assert status != 200 or not path.endswith(("/load", "/unload")), "a caller changed the cluster"


def _is_limited(case: Any) -> bool:
    parameters = case.body.get("parameters") if isinstance(case.body, dict) else None
    return isinstance(parameters, dict) and any(name in parameters for name in LIMITED)
