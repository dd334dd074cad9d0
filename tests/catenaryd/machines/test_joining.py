"""A machine joins, renews, starts again without a token, and leaves: against the real service."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from catenary_agent.settings import AgentSettings
from catenary_services.errors import CatenaryError, InvalidInput, PermissionDenied, Unauthenticated
from catenary_services.security.x509 import read_certificates
from catenary_services.settings import load_settings
from catenaryd.enrolment.join_line import JoinLine
from catenaryd.machines import joining
from catenaryd.machines.joined_agents import agent_settings
from catenaryd.machines.joined_machine import JoinedMachine, MachineStore
from catenaryd.machines.joining import check_same, enrol, leave, refresh
from joining_machines.join_harness import HOST, SCHEDULER, JoinHost, join_host, join_options


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[JoinHost]:
    async with join_host(tmp_path / "host") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> MachineStore:
    return MachineStore(tmp_path / "machine")


async def join(
    host: JoinHost, folder: MachineStore, told: list[str] | None = None
) -> JoinedMachine:
    return await enrol(folder, host.line(), join_options(), (told or []).append)


async def test_what_a_machine_keeps_is_its_own_alone(host: JoinHost, folder: MachineStore) -> None:
    machine = await join(host, folder)
    assert folder.read() == machine
    cert_file, key_file, authorities = folder.files_of(machine, "pi4")
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert read_certificates(authorities)[0].public_key() is not None
    kept = [file for file in folder.data_dir.rglob("*") if file.is_file()]
    token = host.line().token
    assert not any(token.encode() in file.read_bytes() for file in kept)
    assert cert_file in kept


async def test_an_agents_settings_follow_from_what_is_kept(
    host: JoinHost, folder: MachineStore
) -> None:
    machine = await join(host, folder)
    flags = agent_settings(folder, machine, 0)
    settings = load_settings(AgentSettings, file=None, section="agent", flags=flags)
    assert (settings.agent_id, settings.server_id, settings.insecure) == ("pi4", "pi4", False)
    assert settings.advertise_host == "10.0.0.7"
    assert settings.scheduler_addresses == [SCHEDULER]


async def test_the_user_hears_of_clock_and_round_trip(host: JoinHost, folder: MachineStore) -> None:
    told: list[str] = []
    await enrol(folder, host.line(), join_options(), told.append)
    assert "round trip" in told[0]
    assert "MB/s" in told[1]


async def test_a_measured_rate_is_told_to_the_planner_unless_it_is_too_fast_to_measure(
    host: JoinHost, folder: MachineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "RATE_TOLD_BYTES_PER_S", 1e15)
    slow = await join(host, folder)
    assert slow.link_bytes_per_second > 0
    assert folder.read() == slow
    monkeypatch.setattr(joining, "RATE_TOLD_BYTES_PER_S", 1.0)
    other = MachineStore(folder.data_dir.with_name("other"))
    fast = await enrol(other, host.line(), join_options("pi5"), lambda _: None)
    assert fast.link_bytes_per_second == 0


async def test_a_wrong_pin_ends_it_before_the_token_is_sent(
    host: JoinHost, folder: MachineStore
) -> None:
    line = JoinLine(HOST, host.port, bytes(32), host.tokens.create())
    with pytest.raises(Unauthenticated):
        await enrol(folder, line, join_options(), lambda _: None)
    assert host.tokens.list()[0][1] == "good"
    assert folder.read() is None


async def test_a_loopback_address_is_not_advertised(host: JoinHost, folder: MachineStore) -> None:
    options = join_options(advertise=None)
    with pytest.raises(InvalidInput, match="leads no other machine"):
        await enrol(folder, host.line(), options, lambda _: None)
    assert host.tokens.list()[0][1] == "good"


async def test_without_a_token_nobody_joins(host: JoinHost, folder: MachineStore) -> None:
    with pytest.raises(InvalidInput, match="has no token"):
        await enrol(folder, host.line(token=""), join_options(), lambda _: None)


async def test_certificates_are_renewed_without_a_token(
    host: JoinHost, folder: MachineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await join(host, folder)
    before = folder.certificate_of(machine, "pi4")
    assert await refresh(folder, machine) == machine
    assert folder.certificate_of(machine, "pi4") == before
    monkeypatch.setattr(joining, "RENEWED_SHARE", 1.1)
    for _ in range(3):
        await refresh(folder, machine)
        after = folder.certificate_of(machine, "pi4")
        assert after.public_key() != before.public_key()
        before = after


async def test_a_machine_follows_the_authority_that_is_replaced(
    host: JoinHost, folder: MachineStore
) -> None:
    machine = await join(host, folder)
    authorities = folder.files_of(machine, "pi4")[2]
    before = folder.certificate_of(machine, "pi4")
    host.authority.add_next()
    await refresh(folder, machine)
    assert len(read_certificates(authorities)) == 2
    host.authority.use_next()
    await refresh(folder, machine)
    assert folder.certificate_of(machine, "pi4") != before
    host.authority.drop_others()
    await refresh(folder, machine)
    assert len(read_certificates(authorities)) == 1


async def test_after_leaving_a_machine_has_nothing_of_the_cluster(
    host: JoinHost, folder: MachineStore
) -> None:
    machine = await join(host, folder)
    assert await leave(folder, machine) == ""
    assert folder.read() is None
    assert list(folder.certificates.glob("*.pem")) == []
    assert host.machines.machines == ()
    again = await join(host, folder)
    assert again.name == "pi4"


async def test_a_machine_leaves_although_its_host_is_away(
    host: JoinHost, folder: MachineStore
) -> None:
    machine = await join(host, folder)
    await host.server.close()
    assert "nothing answers" in await leave(folder, machine)
    assert folder.read() is None


async def test_a_forgotten_machine_is_told_to_join_again(
    host: JoinHost, folder: MachineStore
) -> None:
    machine = await join(host, folder)
    host.machines.remove(host.machines.machines[0])
    with pytest.raises(PermissionDenied, match="join again with a token"):
        await refresh(folder, machine)


async def test_joining_again_takes_no_other_cluster_name_or_device(
    host: JoinHost, folder: MachineStore
) -> None:
    machine = await join(host, folder)
    check_same(machine, host.line(), {"name": "pi4", "devices": None, "advertise": None})
    with pytest.raises(InvalidInput, match="another cluster"):
        check_same(machine, JoinLine(HOST, 1, bytes(32)), {})
    for change in ({"name": "pi5"}, {"devices": ("cuda:0",)}, {"advertise": "10.0.0.8"}):
        with pytest.raises(InvalidInput, match="catenaryd leave"):
            check_same(machine, None, dict(change))


async def test_one_process_at_a_time_holds_a_folder(folder: MachineStore) -> None:
    import os

    assert folder.holder() is None
    held = folder.lock()
    assert held is not None
    assert folder.lock() is None
    assert folder.holder() == os.getpid()
    os.close(held)
    assert folder.holder() is None


async def test_damaged_facts_are_said_to_be_damaged(host: JoinHost, folder: MachineStore) -> None:
    await join(host, folder)
    file = folder.data_dir / "machine.json"
    for text in ("{}", "", "[1]", file.read_text()[:40]):
        file.write_text(text)
        with pytest.raises(CatenaryError, match="cannot be read"):
            folder.read()
