"""Descriptions of routes, of which that of the HTTP endpoints is made."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from catenary_gateway.endpoints.json_schemas import Schema


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """The description of a route: the body that it reads if any, and its answer with status 200."""

    definition: web.RouteDef
    answer: Schema
    body: Schema | None = None
    other_types: tuple[str, ...] = ()
    """The content types of answers that are no JSON."""


def summary_of(handler: object) -> str:
    """Returns the first sentence of a handler's documentation, else the words of its name."""
    said = (getattr(handler, "__doc__", None) or "").strip()
    if said:
        return " ".join(said.partition("\n\n")[0].split())
    name = str(getattr(handler, "__name__", "")).strip("_").replace("_", " ")
    return f"{name.capitalize()}."
