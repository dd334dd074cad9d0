"""The commands for running sessions: `sessions` and `move`."""

from __future__ import annotations

from typing import Annotated

import typer

from catenary.command_line.kit import CommandOptions, command, console, fail, print_json, table
from catenary.moving import MODES, SessionInfo


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(epilog="Example: catenary sessions --story 1099511627777")(sessions)
    app.command(epilog="Example: catenary move 1099511627777 --to smollm2-135m/1 --by kv")(move)


@command
def sessions(
    options: CommandOptions,
    model: Annotated[str, typer.Option(help="Only those of this model.")] = "",
    story: Annotated[
        str, typer.Option(help="Tell what happened to this session or request, and why.")
    ] = "",
) -> None:
    """List the sessions that generate text now, and on which chain."""
    if story:
        _tell(options, story)
        return
    with options.client() as client:
        found = client.sessions(model)
    if options.as_json:
        print_json(found)
        return
    columns = ("SESSION", "REQUEST", "MODEL", "CHAIN", "AGENTS", "TOKENS", "GENERATES", "MOVES TO")
    rows = (
        (
            str(s.session_id),
            s.request_id or "-",
            s.model,
            s.chain_id or "-",
            _agents(s),
            s.tokens,
            s.generates,
            f"{s.moving_to} by {s.moving_by}" if s.moving_to else "-",
        )
        for s in found
    )
    console().print(table(columns, rows))


def _tell(options: CommandOptions, named: str) -> None:
    """Prints the story of a session or request."""
    with options.client() as client:
        changes = client.story(_id_of(named))
    if options.as_json:
        print_json(changes)
        return
    columns = ("AGO", "WHO", "STATE", "WHAT", "WHY", "EVENT")
    rows = (
        (
            f"{each.ago_ns / 1e9:.3f} s",
            str(each.session_id) if each.session_id else "request",
            each.after,
            each.name,
            each.why or "-",
            f"{each.event_kind} {each.event}" + (f" on {each.answers}" if each.answers else ""),
        )
        for each in changes
    )
    console().print(table(columns, rows))


@command
def move(
    options: CommandOptions,
    session: Annotated[str, typer.Argument(help="A session, or the id of its request.")],
    to: Annotated[str, typer.Option("--to", help="The chain; the best one if left out.")] = "",
    by: Annotated[
        str, typer.Option("--by", help="What travels: kv (caches), tokens, or auto.")
    ] = "auto",
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the end of the move.")
    ] = 10.0,
) -> None:
    """Move a running session to another chain; its stream goes on without a restart."""
    if by not in MODES:
        fail(f"--by must be one of {', '.join(MODES)}", 2)
    with options.client() as client:
        found = client.move_session(_id_of(session), chain_id=to, mode=by, wait_s=wait)
    if options.as_json:
        print_json(found)
    elif found.outcome == "moved":
        typer.echo(
            f"{session} is session {found.session_id} on {found.chain_id} now, by {found.mode}: "
            f"{found.tokens} tokens in {found.duration_ns / 1e6:.0f} ms, of which it was held for "
            f"{found.held_ns / 1e6:.1f} ms"
        )
    elif found.outcome == "begun":
        typer.echo(f"{session} moves to {found.chain_id}, by {found.mode}")
    if found.outcome == "failed":
        fail(f"{session} did not move: {found.problem}")


def _id_of(named: str) -> int | str:
    return int(named) if named.isdecimal() else named


def _agents(session: SessionInfo) -> str:
    return ", ".join(f"{agent} [{first},{last})" for agent, first, last in session.hops)
