"""The page of a gateway's HTTP routes."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from catenary_gateway import openai_http
from catenary_gateway.dashboard.api import Dashboard
from catenary_gateway.oip import oip_http
from catenary_gateway.openai_http.paths import ROUTES
from catenary_services.errors import InternalError
from docs_build.reference.markdown import code, page, table

_INTRO = """\
A gateway serves every protocol on one port (`http_port`). With `api_keys_file` set, requests
carry `Authorization: Bearer KEY` (or `X-Api-Key: KEY`), except the page of the dashboard, `/docs`
and `/openapi.json`, and those for `/healthz`, `/health`, `/readyz` and `/v2/health/...`, which
probes ask. `x-request-id` is echoed, `traceparent` is followed. Errors have the status of [the
table of errors](errors.md). [The OpenAI paths](../openai.md) and [the Open Inference
Protocol](../open-inference-protocol.md) have pages of their own."""

_MODEL, _VERSION = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
_MEMORY, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"

DESCRIPTIONS: dict[tuple[str, str], str] = {
    ("GET", "/healthz"): "The process lives. Never depends on load or on other processes.",
    ("GET", "/health"): "The same, under the name that vLLM's users know.",
    ("GET", "/readyz"): "200 if every deployed model can be served, else 503 with the reason.",
    ("GET", "/v2"): "Name, version and extensions of the server.",
    ("GET", "/v2/"): "The same.",
    ("GET", "/v2/health/live"): "As `/healthz`.",
    ("GET", "/v2/health/ready"): "As `/readyz`.",
    ("GET", _MODEL): "Inputs and outputs of the newest version, and all versions.",
    ("GET", _VERSION): "Inputs and outputs of a version.",
    ("GET", f"{_MODEL}/ready"): "200 if the newest version can be served now, else 503.",
    ("GET", f"{_VERSION}/ready"): "The same of a version.",
    ("POST", f"{_MODEL}/infer"): "Infers; JSON, or Triton's binary tensors behind the JSON. "
    "`parameters` may hold `slo_ms`, `deadline_unix_ms`, `timeout` and `priority`.",
    ("POST", f"{_VERSION}/infer"): "The same with a version.",
    ("GET", f"{_MODEL}/config"): "Its configuration, as Triton describes models.",
    ("GET", f"{_VERSION}/config"): "The same of a version.",
    ("GET", "/v2/models/stats"): "Sums over the requests to each model (scope `view`).",
    ("GET", f"{_MODEL}/stats"): "The same of one model.",
    ("GET", f"{_VERSION}/stats"): "The same of a version.",
    ("POST", "/v2/repository/index"): "Models of the repository, and which are ready.",
    ("POST", "/v2/repository/models/{model}/load"): "Deploys a model (scope `admin`).",
    ("POST", "/v2/repository/models/{model}/unload"): "Undeploys it (scope `admin`).",
    ("GET", "/v2/trace/setting"): "Which requests are traced (scope `view`).",
    ("POST", "/v2/trace/setting"): "Changes it (scope `admin`).",
    ("GET", f"{_MODEL}/trace/setting"): "The same: the settings are the gateway's.",
    ("POST", f"{_MODEL}/trace/setting"): "Refused if it would change anything.",
    ("GET", "/v2/logging"): "The level of the gateway's log (scope `view`).",
    ("POST", "/v2/logging"): "Changes it (scope `admin`).",
    ("GET", f"{_MEMORY}/status"): "Regions of shared memory that the caller registered.",
    ("GET", f"{_MEMORY}/region/{{region}}/status"): "One of them.",
    ("POST", f"{_MEMORY}/region/{{region}}/register"): "Registers one: `key`, `offset` and "
    "`byte_size`.",
    ("POST", f"{_MEMORY}/unregister"): "Forgets all that the caller registered.",
    ("POST", f"{_MEMORY}/region/{{region}}/unregister"): "Forgets one.",
    ("GET", f"{_CUDA}/status"): "None: memory of GPUs is not shared.",
    ("GET", f"{_CUDA}/region/{{region}}/status"): "Refused, as there is none.",
    ("POST", f"{_CUDA}/region/{{region}}/register"): "Refused.",
    ("POST", f"{_CUDA}/unregister"): "Does nothing.",
    ("POST", f"{_CUDA}/region/{{region}}/unregister"): "Does nothing.",
    **{(route.method, route.path): route.summary for route in ROUTES},
    ("GET", "/openapi.json"): "These routes but the dashboard's as an OpenAPI document.",
    ("GET", "/docs"): "The same as a page.",
    ("GET", "/"): "The dashboard. The page holds no data; it asks for a key with the scope `view`.",
    ("GET", "/dashboard/assets/{name}"): "Its styles, scripts and pictures.",
    ("GET", "/dashboard/v1/status"): "Cluster, agents, models and this gateway, as JSON.",
    ("GET", "/dashboard/v1/plan"): "The active plan, its promises and what binds.",
    ("GET", "/dashboard/v1/timelines"): "Reservations of devices and links, booked and real; "
    "`?seconds=` says how far back.",
    ("GET", "/dashboard/v1/requests"): "Recent requests of this gateway.",
    ("GET", "/dashboard/v1/sessions"): "Sessions that generate, and where.",
    ("GET", "/dashboard/v1/trace"): "Where the time of a recent request went; `?request_id=`, "
    "or the last one.",
    ("GET", "/dashboard/v1/story"): "What happened to a session or a recent request, and why; "
    "`?session_id=` or `?request_id=`.",
    ("GET", "/dashboard/v1/history"): "The last hour of this gateway: rate, p99, refusals and "
    "tokens of each model.",
    ("GET", "/dashboard/v1/models"): "What each model can be asked here.",
    ("GET", "/dashboard/v1/classes"): "Names of the classes of a model; `?model=`, `?version=`.",
    ("GET", "/dashboard/v1/actions"): "Orders that an operator can give (scope `admin`).",
    ("POST", "/dashboard/v1/actions/{action}"): "Gives an order (scope `admin`): `drain`, `deploy` "
    "or `replan`.",
}


def served_routes() -> Iterator[tuple[str, str]]:
    """Yields method and path of every route."""
    app = web.Application()
    app.add_routes([*oip_http.routes(), *openai_http.routes()])
    Dashboard.__new__(Dashboard).add_to(app)  # its routes need no handlers' state here
    for route in app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            yield route.method, route.resource.canonical


def http_page() -> str:
    """Returns the page of HTTP routes.

    Raises:
        InternalError: This module does not describe a route.
    """
    rows = []
    for method, path in served_routes():
        said = DESCRIPTIONS.get((method, path))
        if said is None:
            raise InternalError(f"docs_build/reference/http.py does not describe {method} {path}")
        rows.append((method, code(path), said))
    return page("HTTP", _INTRO, table(("", "path", ""), rows))
