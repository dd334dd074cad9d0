"""The command `catenaryd certs`: an authority and certificates for a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from catenary_services.errors import InvalidInput
from catenary_services.security.authority import (
    AUTHORITY_DAYS,
    AUTHORITY_FILE,
    DAYS,
    CertificateAuthority,
    CertificateRequest,
    IssuedCertificate,
)
from catenary_services.security.identity import Identity
from catenaryd.shared_options import AS_JSON

_STEPS = ("add", "use", "drop")


def parse_process(text: str, cluster: str, names: tuple[str, ...] = ()) -> CertificateRequest:
    """Returns the request in "ROLE:NAME[,name...]"; `names` are added to it.

    Raises:
        InvalidInput: The text has another form.
    """
    who, *own = [part.strip() for part in text.split(",")]
    role, separator, name = who.partition(":")
    if not separator:
        raise InvalidInput("process", f"{text!r} is not ROLE:NAME[,dns...]")
    return CertificateRequest(
        Identity.of(cluster, role, name), tuple(part for part in (*own, *names) if part)
    )


@click.command()
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the authority and the certificates; made if missing.",
)
@click.option("--cluster", default="main", show_default=True, help="Cluster they are good for.")
@click.option(
    "--process",
    "processes",
    multiple=True,
    metavar="ROLE:NAME[,DNS...]",
    help="A certificate to make: gateway, scheduler, agent, operator or redis, its name (the id in "
    "its settings), DNS names and IP addresses it is reached by. May be repeated.",
)
@click.option("--dns", multiple=True, help="DNS name for every --process. May be repeated.")
@click.option("--ip", multiple=True, help="IP address for every --process. May be repeated.")
@click.option("--days", default=DAYS, show_default=True, help="How long certificates are good.")
@click.option(
    "--authority-days",
    default=AUTHORITY_DAYS,
    show_default=True,
    help="How long a new authority is good.",
)
@click.option(
    "--renew",
    is_flag=True,
    help="Also make anew what has less than a third of its life left; "
    "without --process, of everything in the folder.",
)
@click.option(
    "--authority",
    "step",
    type=click.Choice(_STEPS),
    help="Change the authority without a gap: add a new one to what is trusted; once every process "
    "has read that, use it to sign everything anew; then drop the old one.",
)
@click.option(
    "--revoke",
    "revoked",
    multiple=True,
    metavar="ROLE:NAME",
    help="Revoke every certificate of a process, as far as this authority knows it, in ca.pem: "
    "processes that have read it end connections with it. May be repeated.",
)
@AS_JSON
def certs(folder: Path, cluster: str, processes: tuple[str, ...], **options: Any) -> None:
    """Makes an authority (ca.pem, ca-key.pem) and certificates with an identity per role.

    Writes FOLDER/<role>-<name>.pem and FOLDER/<role>-<name>-key.pem. What is there and good is
    kept, so that the command can be repeated; processes take changed files up without a restart.

    Example: catenaryd certs --out certs --process scheduler:scheduler-0,scheduler
    --process gateway:gateway-0,localhost,127.0.0.1 --process agent:agent-0
    """
    names = (*options["dns"], *options["ip"])
    wanted = [parse_process(each, cluster, names) for each in processes]
    authority = CertificateAuthority(folder, cluster, options["days"])
    made = authority.ensure(options["authority_days"])
    issued = _change(authority, options["step"], options["authority_days"])
    revoked = {
        str(who): authority.revoke(who)
        for who in (parse_process(each, cluster).identity for each in options["revoked"])
    }
    if options["renew"] and not wanted:
        wanted = authority.requests()
    issued += [authority.issue(each, renew=options["renew"]) for each in wanted]
    if options["as_json"]:
        click.echo(json.dumps(_document(folder, cluster, authority, made, issued, revoked)))
    else:
        _print(folder, authority, made, issued)
        for who, count in revoked.items():
            click.echo(f"revoked  {count} of {who}")


def _change(
    authority: CertificateAuthority, step: str | None, days: int
) -> list[IssuedCertificate]:
    """Makes a step of replacing the authority; returns the certificates issued by it."""
    if step == "add":
        authority.add_next(days)
    elif step == "use":
        return authority.use_next()
    elif step == "drop":
        authority.drop_others()
    return []


def _document(
    folder: Path,
    cluster: str,
    authority: CertificateAuthority,
    made: bool,
    issued: list[IssuedCertificate],
    revoked: dict[str, int],
) -> dict[str, object]:
    return {
        "cluster": cluster,
        "authority": {
            "cert_file": str(folder / AUTHORITY_FILE),
            "ends": authority.ends.isoformat(),
            "made": made,
        },
        "certificates": [
            {
                "identity": each.identity.uri,
                "cert_file": str(each.cert_file),
                "key_file": str(each.key_file),
                "ends": each.ends.isoformat(),
                "made": each.made,
            }
            for each in issued
        ],
        "revoked": revoked,
    }


def _print(
    folder: Path, authority: CertificateAuthority, made: bool, issued: list[IssuedCertificate]
) -> None:
    click.echo(
        f"{'made' if made else 'kept'}  {folder / AUTHORITY_FILE}  until {authority.ends:%Y-%m-%d}"
    )
    for each in issued:
        click.echo(
            f"{'made' if each.made else 'kept'}  {each.cert_file}  until {each.ends:%Y-%m-%d}"
            f"  {each.identity.uri}"
        )
