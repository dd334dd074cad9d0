"""What the host gives to whom: the real service, over real TLS connections, in this process."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509

from catenary_protos.catenary.v1 import enrolment_pb2 as pb
from catenary_services.errors import (
    CatenaryError,
    InvalidMessage,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from catenary_services.security.authority import CertificateAuthority, CertificateRequest
from catenary_services.security.certificate_requests import make_request
from catenary_services.security.identity import Identity, Role
from catenary_services.security.x509 import identity_of, is_signed_by, new_key, read_certificates
from catenaryd.enrolment import enrolment_server
from catenaryd.enrolment.enrolment_server import RefusalLimits, source_of
from catenaryd.enrolment.enrolment_streams import LARGEST_REQUEST_BYTES
from catenaryd.enrolment.machine_registry import ARRIVAL_S, MachineRegistry
from catenaryd.machines.enrolment_client import (
    EnrolmentConnection,
    HostTrust,
    connected,
    discover,
)
from joining_machines.join_harness import HOST, SCHEDULER, JoinHost, join_host


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[JoinHost]:
    async with join_host(tmp_path) as made:
        yield made


def enrolling(token: str, machine: str = "pi4", agents: int = 1) -> pb.EnrolmentRequest:
    names = [machine] if agents == 1 else [f"{machine}-{n}" for n in range(agents)]
    requests = [pb.AgentRequest(agent_id=name, csr=make_request(name, new_key())) for name in names]
    return pb.EnrolmentRequest(enrol=pb.EnrolMachine(token=token, machine=machine, agents=requests))


async def enrol(host: JoinHost, request: pb.EnrolmentRequest) -> pb.MachineEnrolled:
    async with host.stranger() as connection:
        return (await connection.ask(request)).enrolled


async def test_a_machine_gets_certificates_of_its_agents_and_the_facts(host: JoinHost) -> None:
    enrolled = await enrol(host, enrolling(host.tokens.create(), agents=2))
    [authority] = x509.load_pem_x509_certificates(host.authority.trusted())
    names = []
    for each in enrolled.certificates:
        certificate = x509.load_pem_x509_certificate(each.certificate.encode())
        assert is_signed_by(certificate, authority)
        names.append(identity_of(certificate))
    assert names == [Identity.of("main", Role.AGENT, f"pi4-{number}") for number in range(2)]
    assert list(enrolled.facts.scheduler_addresses) == [SCHEDULER]
    assert enrolled.facts.cluster == "main"


@pytest.mark.parametrize("how", ["unknown", "wrong", "expired", "revoked", "used"])
async def test_a_token_that_is_not_good_gets_nothing(host: JoinHost, how: str) -> None:
    token = host.tokens.create()
    match how:
        case "unknown":
            token = "a" * 8 + "." + "b" * 32
        case "wrong":
            token = token[:-1] + ("a" if token[-1] != "a" else "b")
        case "expired":
            host.tokens._clock = lambda: 4e9
        case "revoked":
            host.tokens.revoke(token)
        case "used":
            await enrol(host, enrolling(token))
    before = host.machines.machines
    with pytest.raises(PermissionDenied) as refused:
        await enrol(host, enrolling(token, "pi5"))
    said = {
        "unknown": "no such token",
        "wrong": "no such token",
        "expired": "has expired",
        "revoked": "was revoked",
        "used": "as often as it may be",
    }
    assert said[how] in refused.value.message
    assert host.machines.machines == before


async def test_two_machines_with_one_token_at_once_are_not_both_let_in(host: JoinHost) -> None:
    token = host.tokens.create()
    asked = [enrol(host, enrolling(token, f"m{number}")) for number in range(4)]
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(each, pb.MachineEnrolled) for each in done) == 1
    assert len(host.machines.machines) == 1


async def test_a_request_whose_answer_was_lost_is_answered_again(host: JoinHost) -> None:
    request = enrolling(host.tokens.create())
    first, again = await enrol(host, request), await enrol(host, request)
    assert [each.agent_id for each in first.certificates] == [
        each.agent_id for each in again.certificates
    ]
    assert len(host.tokens.list()[0][0].used) == 1


async def test_the_wrong_cluster_is_noticed_before_a_token_is_sent(host: JoinHost) -> None:
    with pytest.raises(Unauthenticated, match="not the one the join line names"):
        await discover(HOST, host.port, bytes(32))


async def test_an_agent_of_the_cluster_cannot_pose_as_its_host(
    host: JoinHost, tmp_path: Path
) -> None:
    agent = host.authority.issue(
        CertificateRequest(Identity.of("main", Role.AGENT, "liar"), ("127.0.0.1",))
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(agent.cert_file, agent.key_file)
    trust = await discover(HOST, host.port, host.authority.signer_digest)
    liar = await asyncio.start_server(lambda *_: None, HOST, 0, ssl=context)
    async with liar:
        port = liar.sockets[0].getsockname()[1]
        with pytest.raises(Unauthenticated, match="is not the cluster of the join line"):
            async with connected(HOST, port, trust):
                pass


@pytest.mark.parametrize("state", ["ready", "joining", "draining"])
async def test_the_name_of_a_live_machine_is_taken(host: JoinHost, state: str) -> None:
    await enrol(host, enrolling(host.tokens.create()))
    host.states["pi4"] = state
    token = host.tokens.create()
    with pytest.raises(PermissionDenied, match="name 'pi4' is taken"):
        await enrol(host, enrolling(token))
    await enrol(host, enrolling(token, "pi5"))  # a refusal counts no use


async def test_the_name_of_a_machine_that_is_gone_is_free(
    host: JoinHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enrol(host, enrolling(host.tokens.create()))
    host.states["pi4"] = "lost"
    token = host.tokens.create()
    with pytest.raises(Unavailable, match="joins as 'pi4' just now"):
        await enrol(host, enrolling(token))
    began = host.machines._clock()
    monkeypatch.setattr(host.machines, "_clock", lambda: began + ARRIVAL_S + 1)
    await enrol(host, enrolling(token))
    assert len(host.machines.machines) == 1
    assert len(MachineRegistry(tmp_path / "machines.json").machines) == 1


@pytest.mark.parametrize("name", ["host", "gateway-0", "agent-0"])
async def test_names_of_the_host_and_its_processes_are_taken(host: JoinHost, name: str) -> None:
    with pytest.raises(PermissionDenied, match="is taken"):
        await enrol(host, enrolling(host.tokens.create(), name))


async def test_agents_are_named_after_their_machine(host: JoinHost) -> None:
    request = enrolling(host.tokens.create())
    request.enrol.agents[0].agent_id = "gateway-7"
    with pytest.raises(PermissionDenied, match="not named after the machine"):
        await enrol(host, request)


async def test_a_request_for_somebody_elses_key_is_refused(host: JoinHost) -> None:
    token = host.tokens.create()
    request = enrolling(token)
    request.enrol.agents[0].csr = make_request("pi5", new_key())
    with pytest.raises(PermissionDenied, match="is not for 'pi4'"):
        await enrol(host, request)
    one_key = new_key()
    request = enrolling(token, agents=2)
    for each in request.enrol.agents:
        each.csr = make_request(each.agent_id, one_key)
    with pytest.raises(PermissionDenied, match="same key"):
        await enrol(host, request)


async def test_a_cluster_that_does_not_answer_costs_no_token(host: JoinHost) -> None:
    async def silent() -> dict[str, str]:
        raise Unavailable("no scheduler leads the cluster")

    host.enrolment._states, usual = silent, host.enrolment._states
    token = host.tokens.create()
    with pytest.raises(Unavailable, match="no scheduler leads"):
        await enrol(host, enrolling(token))
    host.enrolment._states = usual
    await enrol(host, enrolling(token))


# ---- with a certificate ----


async def joined(host: JoinHost, folder: Path, name: str = "pi4") -> HostTrust:
    """Enrols a machine and returns what its connections show."""
    key = new_key()
    request = enrolling(host.tokens.create(), name)
    request.enrol.agents[0].csr = make_request(name, key)
    enrolled = await enrol(host, request)
    return _trust(host, folder / name, enrolled.certificates[0].certificate, key)


def _trust(host: JoinHost, stem: Path, pem: str, key: object) -> HostTrust:
    from catenary_services.security.x509 import write_key

    cert_file, key_file = stem.with_suffix(".pem"), stem.with_suffix(".key")
    cert_file.write_text(pem)
    write_key(key_file, key)  # type: ignore[arg-type]
    return HostTrust("main", host.authority.trusted(), cert_file, key_file)


def of_kind(kind: str) -> pb.EnrolmentRequest:
    requests = {
        "renew": pb.EnrolmentRequest(renew=pb.RenewCertificate(csr=make_request("pi4", new_key()))),
        "facts": pb.EnrolmentRequest(facts=pb.GetClusterFacts()),
        "measure": pb.EnrolmentRequest(measure=pb.MeasureLink(bytes=1 << 20)),
        "leave": pb.EnrolmentRequest(leave=pb.LeaveCluster()),
    }
    return requests[kind]


@pytest.mark.parametrize("kind", ["renew", "facts", "measure", "leave"])
async def test_strangers_may_only_discover_and_enrol(host: JoinHost, kind: str) -> None:
    async with host.stranger() as connection:
        with pytest.raises(PermissionDenied, match="only machines that joined"):
            await connection.ask(of_kind(kind))


@pytest.mark.parametrize("kind", ["renew", "facts", "measure", "leave"])
async def test_other_roles_of_the_cluster_are_no_machines(host: JoinHost, kind: str) -> None:
    issued = host.authority.issue(CertificateRequest(Identity.of("main", Role.GATEWAY, "g")))
    trust = HostTrust("main", host.authority.trusted(), issued.cert_file, issued.key_file)
    async with connected(HOST, host.port, trust) as connection:
        with pytest.raises(PermissionDenied, match="only machines that joined"):
            await connection.ask(of_kind(kind))


async def test_a_certificate_of_another_authority_gets_no_connection(
    host: JoinHost, tmp_path: Path
) -> None:
    theirs = CertificateAuthority(tmp_path / "theirs", "main")
    theirs.ensure()
    issued = theirs.issue(CertificateRequest(Identity.of("main", Role.AGENT, "pi4")))
    trust = HostTrust("main", host.authority.trusted(), issued.cert_file, issued.key_file)
    with pytest.raises(CatenaryError):
        async with connected(HOST, host.port, trust) as connection:
            await connection.ask(of_kind("facts"))


async def test_a_certificate_is_renewed_by_the_present_one(host: JoinHost, tmp_path: Path) -> None:
    trust = await joined(host, tmp_path)
    key = new_key()
    async with connected(HOST, host.port, trust) as connection:
        renew = pb.RenewCertificate(csr=make_request("pi4", key))
        issued = (await connection.ask(pb.EnrolmentRequest(renew=renew))).issued
    newer = _trust(host, tmp_path / "newer", issued.certificate, key)
    for each in (newer, trust):  # the answer might have been lost: the one before is good, too
        async with connected(HOST, host.port, each) as connection:
            facts = (await connection.ask(of_kind("facts"))).facts
        assert list(facts.scheduler_addresses) == [SCHEDULER]


async def test_a_certificate_is_renewed_for_its_own_name_only(
    host: JoinHost, tmp_path: Path
) -> None:
    async with connected(HOST, host.port, await joined(host, tmp_path)) as connection:
        renew = pb.RenewCertificate(csr=make_request("pi5", new_key()))
        with pytest.raises(PermissionDenied, match="is not for 'pi4'"):
            await connection.ask(pb.EnrolmentRequest(renew=renew))


async def test_after_leaving_nothing_is_renewed_and_the_name_is_free(
    host: JoinHost, tmp_path: Path
) -> None:
    trust = await joined(host, tmp_path)
    async with connected(HOST, host.port, trust) as connection:
        await connection.ask(of_kind("leave"))
        for kind in ("renew", "facts", "leave"):
            with pytest.raises(PermissionDenied, match="has left this cluster"):
                await connection.ask(of_kind(kind))
    await enrol(host, enrolling(host.tokens.create()))


async def test_a_machine_whose_name_was_given_away_cannot_renew(
    host: JoinHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = await joined(host, tmp_path)
    began = host.machines._clock()
    monkeypatch.setattr(host.machines, "_clock", lambda: began + ARRIVAL_S + 1)
    await enrol(host, enrolling(host.tokens.create()))
    async with connected(HOST, host.port, trust) as connection:
        with pytest.raises(PermissionDenied, match="given to another machine"):
            await connection.ask(of_kind("renew"))


async def test_machines_are_dealt_out_to_scheduler_groups(tmp_path: Path) -> None:
    async with join_host(tmp_path, groups=2) as host:
        asked = [enrolling(host.tokens.create(), f"m{number}") for number in range(4)]
        groups = [(await enrol(host, each)).facts.group for each in asked]
    assert groups == [0, 1, 0, 1]


# ---- bounds ----


async def raw(host: JoinHost) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection(HOST, host.port, ssl=context, server_hostname="")


async def one_byte(host: JoinHost) -> bytes:
    reader, _ = await raw(host)
    return await reader.readexactly(1)


async def test_an_oversized_message_is_refused_by_its_length(host: JoinHost) -> None:
    reader, writer = await raw(host)
    writer.write(struct.pack(">I", LARGEST_REQUEST_BYTES + 1))
    connection = EnrolmentConnection(reader, writer, "host")
    with pytest.raises((PermissionDenied, Unavailable), match=r"at most|ended the connection"):
        await connection.ask(pb.EnrolmentRequest(discover=pb.DiscoverCluster()))
    await connection.close()


@pytest.mark.parametrize(
    "request_",
    [
        pb.EnrolmentRequest(),
        pb.EnrolmentRequest(measure=pb.MeasureLink(bytes=1 << 30)),
        pb.EnrolmentRequest(enrol=pb.EnrolMachine(token="../../etc", machine="pi4")),
        pb.EnrolmentRequest(enrol=pb.EnrolMachine(token="a.b", machine="pi4/../x")),
        pb.EnrolmentRequest(
            enrol=pb.EnrolMachine(
                token="a.b", machine="m", agents=[pb.AgentRequest(agent_id="m", csr=bytes(5_000))]
            )
        ),
    ],
    ids=["no kind", "too many bytes", "token", "name", "request"],
)
async def test_what_breaks_a_rule_reaches_no_handler(
    host: JoinHost, request_: pb.EnrolmentRequest
) -> None:
    async with host.stranger() as connection:
        with pytest.raises((PermissionDenied, InvalidMessage)):
            await connection.ask(request_)


async def test_bytes_that_are_no_message_end_the_connection(host: JoinHost) -> None:
    reader, writer = await raw(host)
    writer.write(struct.pack(">I", 3) + b"\xff\xff\xff")
    answer = await asyncio.wait_for(reader.read(), 10)
    assert b"cannot be read" in answer
    writer.close()


async def test_who_is_silent_is_dropped(host: JoinHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment_server, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(enrolment_server, "REQUEST_S", 0.2)
    with socket.create_connection((HOST, host.port)) as silent:
        silent.settimeout(10)
        assert await asyncio.to_thread(silent.recv, 1) == b""
    reader, writer = await raw(host)
    writer.write(b"\x00")
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_one_address_has_so_many_connections_and_no_more(
    host: JoinHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment_server, "MOST_CONNECTIONS_OF_ONE", 2)
    first, second = await raw(host), await raw(host)
    with pytest.raises((OSError, ssl.SSLError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(one_byte(host), 10)
    for _, writer in (first, second):
        writer.close()
        await writer.wait_closed()
    for _ in range(100):
        if not host.server._serving:
            break
        await asyncio.sleep(0.05)
    async with host.stranger() as connection:
        await connection.ask(pb.EnrolmentRequest(discover=pb.DiscoverCluster()))


async def test_guessing_is_slowed_down_and_counts_no_use(host: JoinHost) -> None:
    good = host.tokens.create()
    wrong = enrolling(good.partition(".")[0] + "." + "a" * 32)
    async with host.stranger() as connection:
        for _ in range(5):
            with pytest.raises(PermissionDenied, match="no such token"):
                await connection.ask(wrong)
        with pytest.raises(Unavailable, match="too many refusals"):
            await connection.ask(enrolling(good))
    assert host.tokens.list()[0][0].used == ()


def test_sources_are_forgotten_in_the_order_they_were_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enrolment_server, "_MOST_SOURCES", 3)
    limits = RefusalLimits()
    for source in ("a", "b", "c", "a", "d"):
        for _ in range(6):
            limits.count(source)
    assert [limits.wait_s(source) > 0 for source in "abcd"] == [True, False, True, True]


def test_addresses_of_one_ipv6_network_are_one_source() -> None:
    assert source_of("fd00::1") == source_of("fd00::2:3") != source_of("fd00:0:0:1::1")
    assert source_of("10.0.0.1") != source_of("10.0.0.2")


async def test_a_port_in_use_is_said_with_the_flag_that_changes_it(
    host: JoinHost, tmp_path: Path
) -> None:
    other = JoinHost(tmp_path / "other")
    with pytest.raises(Unavailable, match="--join-port"):
        await other.server.start(HOST, host.port)


async def test_the_users_own_authority_gives_the_cluster_its_name(tmp_path: Path) -> None:
    own = CertificateAuthority(tmp_path / "certs", "lab-7")
    own.ensure()
    async with join_host(tmp_path) as host:
        enrolled = await enrol(host, enrolling(host.tokens.create()))
        shown = await discover(HOST, host.port, own.signer_digest)
    assert enrolled.facts.cluster == shown.cluster == "lab-7"
    assert read_certificates(tmp_path / "certs" / "ca.pem")
