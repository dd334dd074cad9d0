"""The command `catenaryd authority`: it certifies the processes of a cluster in containers."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click

from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.log import configure_logging, get_logger
from catenary_services.security.authority import DAYS, CertificateAuthority, CertificateRequest
from catenary_services.security.identity import Identity, Role
from catenary_services.security.rotation import watched_files
from catenaryd.enrolment.enrolment_server import EnrolmentServer
from catenaryd.enrolment.join_line import JOIN_PORT
from catenaryd.enrolment.process_enrolment import ProcessEnrolment
from catenaryd.enrolment.role_tokens import ROLES, RoleTokens, read_secret

AUTHORITY_DAYS = 3_650
"""Days for which a new authority is good: nobody is there to change it in a cluster for trying."""
RENEW_EVERY_S = 3_600.0

log = get_logger(__name__)


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the authority; made if missing. Nobody else may read it.",
)
@click.option("--cluster", default="main", show_default=True, help="Cluster it is the one of.")
@click.option(
    "--token-file",
    "token_files",
    multiple=True,
    required=True,
    metavar="ROLE=FILE",
    help="Secret by which processes of a role enrol: 32 small letters and digits. May be repeated.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="ROLE=NAME[,NAME...]",
    help="DNS names and addresses in every certificate of a role. May be repeated.",
)
@click.option("--days", default=DAYS, show_default=True, help="How long certificates are good.")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--port", default=JOIN_PORT, show_default=True, help="Port to listen on.")
@click.option("--log-json", is_flag=True, envvar="CATENARY_LOG_JSON", help="Log as JSON.")
def authority(  # noqa: PLR0913, PLR0917
    data_dir: Path,
    cluster: str,
    token_files: tuple[str, ...],
    names: tuple[str, ...],
    days: int,
    host: str,
    port: int,
    log_json: bool,
) -> None:
    """Certifies the processes of a cluster in containers, which enrol by the token of their role.

    Makes an authority unless there is one. `catenaryd enrol` asks it; its key never leaves it.

    Example: catenaryd authority --data-dir authority --token-file gateway=gateway-token
    --name gateway=localhost,127.0.0.1 --token-file agent=agent-token
    """
    configure_logging("authority", cluster, "info", log_json)
    signer = CertificateAuthority(data_dir, cluster, days)
    signer.ensure(AUTHORITY_DAYS)
    files = _by_role("token_file", token_files)
    tokens = RoleTokens({role: read_secret(Path(file)) for role, file in files.items()})
    listed = {role: tuple(text.split(",")) for role, text in _by_role("name", names).items()}
    asyncio.run(_serve(signer, ProcessEnrolment(signer, tokens, listed), host, port))


async def _serve(
    signer: CertificateAuthority, enrolment: ProcessEnrolment, host: str, port: int
) -> None:
    own = CertificateRequest(Identity.of(signer.cluster, Role.AUTHORITY, "enrolment"))
    issued = signer.issue(own, renew=True)
    files = watched_files(issued.cert_file, issued.key_file, signer.file)
    server = EnrolmentServer(enrolment, files)
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    log.info("authority_listens", port=await server.start(host, port))
    watching = asyncio.create_task(files.watch())
    while not stop.is_set():
        try:
            async with asyncio.timeout(RENEW_EVERY_S):
                await stop.wait()
        except TimeoutError:
            try:
                signer.issue(own, renew=True)
            except (CatenaryError, OSError) as error:
                log.error("certificates_not_renewed", error=str(error))
    watching.cancel()
    await server.close()


def _by_role(field: str, texts: tuple[str, ...]) -> dict[Role, str]:
    """Returns what is behind "ROLE=" in each text.

    Raises:
        InvalidInput: One has another form, or a role comes twice.
    """
    found: dict[Role, str] = {}
    for text in texts:
        role, equals, value = text.partition("=")
        if role not in tuple(ROLES) or not equals or not value or Role(role) in found:
            known = ", ".join(ROLES)
            raise InvalidInput(
                field, f"{text!r} is not ROLE=..., each role once; there are {known}"
            )
        found[Role(role)] = value
    return found
