"""The commands `catenaryd token create`, `list` and `revoke`: by what machines join."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import click

from catenary_services.errors import InvalidInput
from catenaryd.shared_options import AS_JSON

_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path(".catenary"),
    show_default=True,
    help="Data directory of `catenaryd up --host`.",
)
_DURATION = re.compile(r"(\d{1,7})(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@click.group("token")
def token_group() -> None:
    """Makes, lists and revokes tokens, by which machines join a cluster.

    Example: catenaryd token create --uses 3 --ttl 2h
    """


def seconds_of(text: str) -> float:
    """Returns the seconds in a duration, as "90s", "45m", "2h" or "7d".

    Raises:
        InvalidInput: The text has another form.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidInput("ttl", f"{text[:32]!r}: give a number and s, m, h or d, as in 2h")
    return float(int(match[1]) * _SECONDS[match[2]])


@token_group.command("create")
@_DATA_DIR
@click.option("--uses", default=1, show_default=True, help="How many machines may join by it.")
@click.option("--ttl", default="1h", show_default=True, help="How long it is good: 90s, 45m, 2h.")
@AS_JSON
def create_token(data_dir: Path, uses: int, ttl: str, as_json: bool) -> None:
    """Makes a token and prints the join line with it, once; only its hash is stored.

    Example: catenaryd token create --uses 3 --ttl 2h
    """
    from catenaryd.enrolment.join_service import new_line

    line = new_line(data_dir, uses, seconds_of(ttl))
    if as_json:
        facts = {"id": line.token.partition(".")[0], "token": line.token, "join": str(line)}
        click.echo(json.dumps(facts))
    else:
        click.echo(f"catenaryd join '{line}'")


@token_group.command("list")
@_DATA_DIR
@AS_JSON
def list_tokens(data_dir: Path, as_json: bool) -> None:
    """Lists tokens by their ids: until when they are good, and which machines joined by them.

    Example: catenaryd token list
    """
    from catenaryd.enrolment.join_service import tokens_of

    found = [
        {
            "id": token.id,
            "state": state,
            "uses": token.uses,
            "machines": [use.machine for use in token.used],
            "expires": datetime.fromtimestamp(token.expires, UTC).isoformat(timespec="seconds"),
        }
        for token, state in tokens_of(data_dir).list()
    ]
    if as_json:
        click.echo(json.dumps({"tokens": found}))
        return
    for each in found:
        machines = each["machines"]
        assert isinstance(machines, list)
        used = f"{len(machines)} of {each['uses']} used"
        click.echo(
            f"{each['id']}  {each['state']:<8}  until {each['expires']}  {used}"
            f"  {', '.join(machines)}".rstrip()
        )


@token_group.command("revoke")
@click.argument("identifier", metavar="ID")
@_DATA_DIR
@AS_JSON
def revoke_token(identifier: str, data_dir: Path, as_json: bool) -> None:
    """Ends the token with this ID now; machines that joined by it stay.

    Example: catenaryd token revoke k3x9w2ab
    """
    from catenaryd.enrolment.join_service import tokens_of

    tokens_of(data_dir).revoke(identifier)
    identifier = identifier.partition(".")[0]
    click.echo(json.dumps({"revoked": identifier}) if as_json else f"{identifier} revoked")
