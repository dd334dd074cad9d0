"""The commands `catenaryd create-key`, `list-keys` and `revoke-key` for the file of API keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from catenaryd.shared_options import AS_JSON

_FILE = click.option(
    "--keys-file", type=click.Path(path_type=Path), required=True, help="The file of hashed keys."
)


@click.command("create-key")
@click.argument("name")
@_FILE
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    default=("infer",),
    show_default=True,
    help='"infer", "infer:<model>", "view" (status, plan, sessions, traces), "admin" or "*"; may '
    "be repeated.",
)
@click.option(
    "--max-priority", type=int, help="Most urgent priority it may ask for; higher is more urgent."
)
@click.option("--requests-per-s", type=float, help="Requests per second, over the whole cluster.")
@click.option("--burst", type=int, help="Requests at once; the usual number is one second's worth.")
@click.option(
    "--tokens-per-s", type=float, help="Tokens of generations per second, prompts and answers."
)
@click.option(
    "--token-burst", type=int, help="Tokens at once; the usual number is ten seconds' worth."
)
@click.option("--share", type=float, help="Under overload: with twice the share, twice as much.")
@click.option("--expires", help='Refused from this moment on, e.g. "2030-01-31T12:00:00Z".')
@AS_JSON
def create_key(
    name: str, keys_file: Path, scopes: tuple[str, ...], as_json: bool, **limits: Any
) -> None:
    """Creates an API key called NAME, prints it once and stores only its hash.

    A gateway that runs takes it up within two seconds. A key of a name that has one already must
    have the same limits: the old one is revoked when nobody uses it any more.

    Example: catenaryd create-key alice --keys-file keys.json --scope infer:net --requests-per-s 20
    """
    from catenary_services.security.key_file import add_key

    key = add_key(keys_file, name, scopes, limits)
    click.echo(json.dumps({"name": name, "key": key}) if as_json else key)


@click.command("list-keys")
@_FILE
@AS_JSON
def list_keys(keys_file: Path, as_json: bool) -> None:
    """Lists the keys of a file: names, scopes, limits and the beginnings of their hashes.

    Example: catenaryd list-keys --keys-file keys.json
    """
    from catenary_services.security.key_file import describe_keys

    keys = describe_keys(keys_file)
    if as_json:
        click.echo(json.dumps({"keys": keys}))
        return
    for key in keys:
        limits = [
            f"{field}={value}"
            for field, value in key.items()
            if field not in ("name", "sha256", "scopes", "expired")
        ]
        state = ["EXPIRED"] if key["expired"] else []
        scopes = ",".join(map(str, key["scopes"])) if isinstance(key["scopes"], list) else ""
        click.echo("  ".join([f"{key['name']:<24}", str(key["sha256"]), scopes, *limits, *state]))


@click.command("revoke-key")
@click.argument("name")
@_FILE
@click.option(
    "--hash", "digest_prefix", default="", help="Only the key whose hash begins so (see list-keys)."
)
@AS_JSON
def revoke_key(name: str, keys_file: Path, digest_prefix: str, as_json: bool) -> None:
    """Removes the key called NAME, or all of that name; gateways refuse it within two seconds.

    Answers that are being generated go on to their end; every new request is refused, also on
    streams that were opened before.

    Example: catenaryd revoke-key alice --keys-file keys.json --hash 3fa9c1
    """
    from catenary_services.security.key_file import revoke_keys

    gone = revoke_keys(keys_file, name, digest_prefix)
    click.echo(json.dumps({"name": name, "revoked": gone}) if as_json else f"{gone} revoked")
