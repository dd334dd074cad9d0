"""A route of the HTTP endpoints, with what is said about it in their description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from catenary_gateway.endpoints.route_descriptions import summary_of
from catenary_gateway.openai_http.completion_request import CompletionRequest
from catenary_gateway.openai_http.fields import Fields

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_DEFINED: Mapping[str, Callable[[str, Handler], web.RouteDef]] = {
    "GET": web.get,
    "POST": web.post,
    "DELETE": web.delete,
}


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body that a function reads field by field: what it looks at are its fields."""

    read: Callable[[Fields], CompletionRequest]
    sample: Mapping[str, Any]
    """The shortest body that it takes."""

    def names(self) -> list[str]:
        """Returns the names of all fields that a body may have, in the order of reading."""
        noted = _NotedFields(self.sample)
        self.read(noted)
        return list(noted.names)


class _NotedFields(Mapping[str, Any]):
    """The fields of a body, with a note of which were looked at."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.names[name] = None
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A route: its method, its path, what answers it, and the form of its body."""

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | ReadBody | None = None
    parameters: str = ""
    """The name of the path in the table of parameters; "" if it refuses and ignores none there."""
    streams: bool = False
    """True if an answer may be a stream of events."""

    @property
    def names(self) -> list[str]:
        """The names of all fields that are taken of a body."""
        if isinstance(self.body, ReadBody):
            return self.body.names()
        return [] if self.body is None else list(self.body.__struct_fields__)

    @property
    def definition(self) -> web.RouteDef:
        """The route as the HTTP server takes it."""
        return _DEFINED[self.method](self.path, self.handler)

    @property
    def summary(self) -> str:
        """A sentence on what the route does: the first one of its handler's documentation."""
        return summary_of(self.handler)
