"""Processes in containers and their authority: the real service, over real TLS connections."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.errors import (
    InvalidInput,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from catenary_services.security.authority import CertificateAuthority, CertificateRequest
from catenary_services.security.certificate_requests import make_request
from catenary_services.security.identity import Identity, Role
from catenary_services.security.rotation import watched_files
from catenary_services.security.x509 import identity_of, names_of, new_key, read_certificates
from catenaryd.enrolment.enrolment_server import EnrolmentServer
from catenaryd.enrolment.process_enrolment import ProcessEnrolment
from catenaryd.enrolment.role_tokens import RoleTokens, read_secret
from catenaryd.machines.enrolment_client import HostTrust, connected
from catenaryd.machines.process_certificates import ProcessCertificate

HOST = "127.0.0.1"
SECRETS = {Role.GATEWAY: "g" * 32, Role.AGENT: "a1" * 20}
SOON_S = 60.0


class AuthorityHost:
    """An authority that listens, in this process."""

    def __init__(self, folder: Path, secrets: dict[Role, str]) -> None:
        self.authority = CertificateAuthority(folder, "main")
        self.authority.ensure()
        own = CertificateRequest(Identity.of("main", Role.AUTHORITY, "enrolment"))
        issued = self.authority.issue(own)
        files = watched_files(issued.cert_file, issued.key_file, self.authority.file)
        names = {Role.GATEWAY: ("gateway.example.org", "127.0.0.1")}
        enrolment = ProcessEnrolment(self.authority, RoleTokens(secrets), names)
        self.server = EnrolmentServer(enrolment, files)
        self.port = 0

    def process(
        self, folder: Path, role: Role = Role.AGENT, name: str = "a-0"
    ) -> ProcessCertificate:
        return ProcessCertificate(role, name, HOST, self.port, SECRETS[role], folder / name)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[AuthorityHost]:
    made = AuthorityHost(tmp_path / "authority", SECRETS)
    made.port = await made.server.start(HOST, 0)
    yield made
    await made.server.close()


async def test_every_process_has_a_key_of_its_own_and_the_names_of_its_role(
    host: AuthorityHost, tmp_path: Path
) -> None:
    gateway = host.process(tmp_path, Role.GATEWAY, "g-0")
    agents = [host.process(tmp_path, name=f"a-{number}") for number in range(2)]
    for each in (gateway, *agents):
        await each.enrol(0)
        held = read_certificates(each.cert_file)[0]
        assert identity_of(held) == Identity.of("main", each.role, each.name)
        assert stat.S_IMODE(each.key_file.stat().st_mode) == 0o600
    keys = {each.key_file.read_bytes() for each in (gateway, *agents)}
    assert len(keys) == 3
    chosen = {x509.DNSName("gateway.example.org"), x509.DNSName("gateway.main.catenary.internal")}
    assert chosen <= names_of(read_certificates(gateway.cert_file)[0])
    assert not chosen & names_of(read_certificates(agents[0].cert_file)[0])
    assert not list((tmp_path / "authority").glob("**/agent-*-key.pem"))


async def test_who_does_not_know_the_secret_gets_nothing(
    host: AuthorityHost, tmp_path: Path
) -> None:
    liar = replace(host.process(tmp_path), secret="b" * 32)
    with pytest.raises(Unauthenticated, match="does not know the secret"):
        await liar.enrol(0)  # it takes the authority for a false one, and sends nothing
    trust = HostTrust("main", host.authority.trusted())
    for token in (f"agent.{'b' * 32}", f"gateway.{SECRETS[Role.AGENT]}", "operator.x", "redis."):
        request = pb.EnrolProcess(token=token, name="x", csr=make_request("x", new_key()))
        async with connected(HOST, host.port, trust) as connection:
            with pytest.raises(PermissionDenied):
                await connection.ask(pb.EnrolmentRequest(process=request))


async def test_somebody_in_between_is_not_taken_for_the_authority(
    host: AuthorityHost, tmp_path: Path
) -> None:
    """An authority of another cluster, under the right address."""
    false = AuthorityHost(tmp_path / "false", {Role.AGENT: "f" * 32})
    false.port = await false.server.start(HOST, 0)
    process = replace(host.process(tmp_path), port=false.port)
    with pytest.raises(Unauthenticated, match="somebody in between"):
        await process.enrol(0)
    assert not process.folder.exists()
    await false.server.close()


async def test_a_process_cannot_enrol_for_another_role_or_cluster(
    host: AuthorityHost, tmp_path: Path
) -> None:
    agent = host.process(tmp_path)
    await agent.enrol(0)
    trust = HostTrust("main", agent.ca_file.read_bytes(), agent.cert_file, agent.key_file)
    async with connected(HOST, host.port, trust) as connection:
        csr = make_request("g-0", new_key())
        with pytest.raises(PermissionDenied, match="csr"):
            await connection.ask(pb.EnrolmentRequest(renew=pb.RenewCertificate(csr=csr)))
    async with connected(HOST, host.port, HostTrust("main", trust.authorities)) as stranger:
        csr = make_request("a-0", new_key())
        with pytest.raises(PermissionDenied, match="with a certificate"):
            await stranger.ask(pb.EnrolmentRequest(renew=pb.RenewCertificate(csr=csr)))


async def test_a_certificate_is_renewed_with_a_new_key_and_without_the_token(
    host: AuthorityHost, tmp_path: Path
) -> None:
    agent = host.process(tmp_path)
    await agent.enrol(0)
    first = agent.key_file.read_bytes()
    await agent.refresh()
    assert agent.key_file.read_bytes() == first  # it is good for weeks
    # Another authority signs now; whoever renews shows what he has.
    host.authority.add_next()
    await agent.refresh()
    host.authority.use_next()
    without_token = replace(agent, secret="c" * 32)
    await without_token.refresh()
    assert agent.key_file.read_bytes() != first
    host.authority.drop_others()
    await without_token.refresh()
    assert len(read_certificates(agent.ca_file)) == 1


async def test_who_was_revoked_is_not_renewed_and_others_hear_of_it(
    host: AuthorityHost, tmp_path: Path
) -> None:
    bad, good = (host.process(tmp_path, name=f"a-{number}") for number in range(2))
    await bad.enrol(0)
    await good.enrol(0)
    assert host.authority.revoke(Identity.of("main", Role.AGENT, "a-0")) == 1
    with pytest.raises(Unavailable):
        await bad.refresh()
    await good.refresh()
    files = watched_files(good.cert_file, good.key_file, good.ca_file)
    assert len(files.current().trust.revoked) == 1


async def test_a_certificate_that_has_ended_is_asked_for_anew(
    host: AuthorityHost, tmp_path: Path
) -> None:
    agent = host.process(tmp_path)
    host.authority._life = dt.timedelta(seconds=1)
    await agent.enrol(0)
    host.authority._life = dt.timedelta(days=30)
    await asyncio.sleep(1.1)
    await agent.refresh()
    held = read_certificates(agent.cert_file)[0]
    assert held.not_valid_after_utc > dt.datetime.now(dt.UTC) + dt.timedelta(days=29)


@pytest.mark.parametrize("text", ["", "short", "A" * 32, "a" * 200, "a" * 31 + " ", "é" * 32])
def test_a_file_without_a_good_secret_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(InvalidInput, match="token_file"):
        read_secret(file)


@pytest.mark.system
def test_the_commands_certify_a_process_and_run_it(tmp_path: Path) -> None:
    """`catenaryd authority`, and `catenaryd enrol` around a command that gets its signals."""
    token = tmp_path / "token"
    token.write_text("t" * 40 + "\n")
    with socket.socket() as held:
        held.bind((HOST, 0))
        port = held.getsockname()[1]
    catenaryd = [sys.executable, "-m", "catenaryd"]
    authority = subprocess.Popen(
        [
            *[*catenaryd, "authority", "--data-dir", str(tmp_path / "authority")],
            *["--token-file", f"agent={token}", "--host", HOST, "--port", str(port)],
        ]
    )
    out = tmp_path / "out"
    ready = tmp_path / "ready"
    waits = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
        " open(sys.argv[2], 'w').write(str(os.path.exists(sys.argv[1]))); signal.pause()"
    )
    enrolling = subprocess.Popen(
        [
            *[*catenaryd, "enrol", "agent", "a-0", "--authority", f"{HOST}:{port}"],
            *["--token-file", str(token), "--out", str(out)],
            *["--", sys.executable, "-c", waits, str(out / "tls.crt"), str(ready)],
        ]
    )
    try:
        deadline = time.monotonic() + SOON_S
        while not (ready.exists() and ready.read_text()):
            assert enrolling.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        enrolling.send_signal(signal.SIGTERM)
        assert enrolling.wait(SOON_S) == 7  # the command's own
        assert ready.read_text() == "True"
        assert identity_of(read_certificates(out / "tls.crt")[0]) == Identity.of(
            "main", Role.AGENT, "a-0"
        )
    finally:
        for each in (enrolling, authority):
            if each.poll() is None:
                os.kill(each.pid, signal.SIGTERM)
                each.wait(SOON_S)
    assert authority.returncode == 0
