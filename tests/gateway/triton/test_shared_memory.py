"""Tensors in shared memory, and what a client cannot do with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from catenary_gateway.admission.quotas import Quotas
from catenary_gateway.admission.request_pipeline import Caller
from catenary_gateway.inference import RegionSlice
from catenary_gateway.oip.shared_regions import MOST_OF_ONE_KEY, SharedRegions
from catenary_services.errors import InvalidInput, Overloaded, PermissionDenied
from catenary_services.security.key_file import add_key, revoke_keys
from gateway_harness import Stage, stage
from shared_helpers.triton_clients import FORMS, TritonClient, shared_object, triton_client
from shared_helpers.waiting import until

X = np.arange(8, dtype=np.float32).reshape(2, 4)


async def registered(client: TritonClient, prefix: str, nbytes: int = 256, offset: int = 0) -> str:
    await client.call("register_system_shared_memory", "all", f"/{prefix}all", nbytes, offset)
    return "all"


async def test_inputs_and_outputs_are_in_shared_memory(
    client: TritonClient, sharing: Stage, prefix: str
) -> None:
    with shared_object(f"/{prefix}all", 512) as handle:
        region = await registered(client, prefix, offset=64)
        handle.put(X, offset=64 + 32)
        answer = await client.call(
            "infer",
            "toy",
            [client.input_in("in_0", X, region, offset=32)],
            outputs=[client.output_in("out_0", region, X.nbytes + 8, offset=128)],
        )
        written = handle.array(np.float32, (2, 4), offset=64 + 128)
        np.testing.assert_array_equal(written, X)
        told = answer.get_output("out_0")
        if client.is_grpc:
            assert told.parameters["shared_memory_byte_size"].int64_param == X.nbytes
            assert list(answer.get_response().raw_output_contents) == [b""]
        else:
            assert told["parameters"]["shared_memory_byte_size"] == X.nbytes
            assert "data" not in told
    assert sharing.gateway._capacity.bytes == 0


async def test_some_inputs_are_in_shared_memory_and_some_are_sent(
    client: TritonClient, prefix: str
) -> None:
    first, second = X[:, :2].copy(), np.array([5, -6], np.int64)
    with shared_object(f"/{prefix}all", 256) as handle:
        region = await registered(client, prefix)
        handle.put(second)
        answer = await client.call(
            "infer",
            "pair",
            [client.input("in_0", first), client.input_in("in_1", second, region)],
            outputs=[client.output("out_1"), client.output_in("out_0", region, 64, offset=64)],
        )
        np.testing.assert_array_equal(answer.as_numpy("out_1"), second)
        np.testing.assert_array_equal(handle.array(np.float32, (2, 2), offset=64), first)


async def test_texts_are_in_shared_memory(client: TritonClient, prefix: str) -> None:
    encoded = b"".join(len(word).to_bytes(4, "little") + word for word in (b"a", b"\xc3\xbc", b""))
    encoded += (3).to_bytes(4, "little") + b"end"
    words = np.array([[b"a", "ü".encode()], [b"", b"end"]], np.object_)
    with shared_object(f"/{prefix}all", 256) as handle:
        region = await registered(client, prefix)
        handle.put(np.frombuffer(encoded, np.uint8))
        given = client.input_in("in_0", words, region, byte_size=len(encoded))
        answer = await client.call("infer", "text", [given])
        np.testing.assert_array_equal(answer.as_numpy("out_0"), words)


Where = dict[str, int]


@pytest.mark.parametrize(
    ("given", "wanted", "says"),
    [
        ({"byte_size": 31}, {}, "has 31 bytes"),
        ({"offset": 240}, {}, "reach behind the region"),
        ({"byte_size": 2**62, "offset": 2**62}, {}, "reach behind the region"),
        ({"byte_size": 2**40}, {}, "reach behind the region"),
        ({"offset": -1}, {}, "must be a number of bytes"),
        ({"byte_size": -32}, {}, "must be a number of bytes"),
        ({}, {"byte_size": 31}, "more than the 31"),
        ({}, {"byte_size": 32, "offset": 225}, "reach behind the region"),
        ({}, {"byte_size": -1}, "must be a number of bytes"),
    ],
)
async def test_sizes_that_lie_are_refused(
    client: TritonClient, prefix: str, given: Where, wanted: Where, says: str
) -> None:
    with shared_object(f"/{prefix}all", 256):
        region = await registered(client, prefix)
        outputs = [client.output_in("out_0", region, **wanted)] if wanted else None
        with pytest.raises(InferenceServerException, match=says):
            await client.call(
                "infer", "toy", [client.input_in("in_0", X, region, **given)], outputs=outputs
            )
        answer = await client.call("infer", "toy", [client.input_in("in_0", X, region)])
        assert answer.as_numpy("out_0").shape == (2, 4)


async def test_an_object_that_shrinks_under_use_is_refused_and_the_gateway_lives(
    client: TritonClient, sharing: Stage, prefix: str
) -> None:
    with shared_object(f"/{prefix}all", 4096):
        region = await registered(client, prefix, 4096)
        given = client.input_in("in_0", X, region, offset=2048)
        wanted = client.output_in("out_0", region, 64, offset=3000)
        await client.call("infer", "toy", [given], outputs=[wanted])
        sharing.agent.hold = True
        sharing.agent.arrived.clear()

        async def shrink_while_it_computes() -> None:
            await sharing.agent.arrived.wait()
            os.truncate(f"/dev/shm/{prefix}all", 2500)
            for held in sharing.agent.held:
                sharing.agent.answer(*held)

        shrinking = asyncio.create_task(shrink_while_it_computes())
        with pytest.raises(InferenceServerException, match="became shorter"):
            await client.call("infer", "toy", [given], outputs=[wanted])
        await shrinking
        sharing.agent.hold = False
        os.truncate(f"/dev/shm/{prefix}all", 100)
        with pytest.raises(InferenceServerException, match="became shorter"):
            await client.call("infer", "toy", [given])
        answer = await client.call("infer", "toy", [client.input("in_0", X)])
        np.testing.assert_array_equal(answer.as_numpy("out_0"), X)


async def test_an_object_that_was_exchanged_is_not_what_was_registered(
    client: TritonClient, prefix: str
) -> None:
    with shared_object(f"/{prefix}all", 256):
        region = await registered(client, prefix)
        other = Path(f"/dev/shm/{prefix}other")
        other.write_bytes(bytes(256))
        other.rename(f"/dev/shm/{prefix}all")
        with pytest.raises(InferenceServerException, match="is not what was registered"):
            await client.call("infer", "toy", [client.input_in("in_0", X, region)])


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("/psm_somebody", "names of objects begin with"),
        ("/../etc/passwd", "must be the name"),
        ("/{prefix}a/b", "must be the name"),
        ("{prefix}", "No such file"),
        ("/{prefix}\n", "must be the name"),
        ("", "must be the name"),
        ("/{prefix}nobody", "No such file"),
        ("/{prefix}link", "symbolic links"),
        ("/{prefix}pipe", "not a shared memory object"),
        ("/{prefix}" + "x" * 300, "more than 255 bytes"),
    ],
)
async def test_only_objects_below_the_prefix_are_registered(
    client: TritonClient, prefix: str, key: str, says: str
) -> None:
    link, pipe = Path(f"/dev/shm/{prefix}link"), Path(f"/dev/shm/{prefix}pipe")
    link.symlink_to("/etc/passwd")
    os.mkfifo(pipe)
    try:
        key = key.replace("{prefix}", prefix)
        with pytest.raises(InferenceServerException, match=says):
            await client.call("register_system_shared_memory", "all", key, 8)
    finally:
        link.unlink()
        pipe.unlink()


async def test_a_region_is_not_larger_than_its_object(client: TritonClient, prefix: str) -> None:
    with shared_object(f"/{prefix}all", 100):
        for size, offset in ((101, 0), (100, 1), (2**63 - 1, 2**63 - 1), (0, 0)):
            with pytest.raises(InferenceServerException, match="byte_size"):
                await registered(client, prefix, size, offset)
        await registered(client, prefix, 99, 1)
        with pytest.raises(InferenceServerException, match="registered already"):
            await registered(client, prefix, 8)


async def test_it_is_off_unless_it_is_set(running: Stage, prefix: str) -> None:
    for form in FORMS:
        async with triton_client(form, running.grpc, running.http) as client:
            told = await client.call("get_server_metadata")
            assert "system_shared_memory" not in told["extensions"]
            with pytest.raises(InferenceServerException, match="shared_memory_prefix"):
                await registered(client, prefix)
            with pytest.raises(InferenceServerException, match="shared_memory_prefix"):
                await client.call("infer", "toy", [client.input_in("in_0", X, "all")])


# Whose regions


@pytest.fixture
async def shared_by_keys(tmp_path: Path, prefix: str) -> AsyncIterator[tuple[Stage, str, str]]:
    file = tmp_path / "keys.json"
    keys = [add_key(file, name, ["infer"]) for name in ("alice", "bob")]
    async with stage(tmp_path, api_keys_file=file, shared_memory_prefix=prefix) as place:
        yield place, *keys


@pytest.mark.parametrize("form", FORMS)
async def test_a_region_is_its_keys_alone(
    shared_by_keys: tuple[Stage, str, str], tmp_path: Path, prefix: str, form: str
) -> None:
    place, alices, bobs = shared_by_keys
    async with (
        triton_client(form, place.grpc, place.http, alices) as alice,
        triton_client(form, place.grpc, place.http, bobs) as bob,
    ):
        with shared_object(f"/{prefix}all", 256), shared_object(f"/{prefix}bobs", 256):
            region = await registered(alice, prefix)
            with pytest.raises(InferenceServerException, match="no shared memory region"):
                await bob.call("infer", "toy", [bob.input_in("in_0", X, region)])
            outputs = [bob.output_in("out_0", region, 64)]
            with pytest.raises(InferenceServerException, match="no shared memory region"):
                await bob.call("infer", "toy", [bob.input("in_0", X)], outputs=outputs)
            with pytest.raises(InferenceServerException, match="no shared memory region"):
                await bob.call("get_system_shared_memory_status", region)
            with pytest.raises(InferenceServerException, match="by another API key"):
                await bob.call("register_system_shared_memory", "b", f"/{prefix}all", 64)
            # A name is a key's own, too.
            await bob.call("register_system_shared_memory", region, f"/{prefix}bobs", 64)
            await bob.call("unregister_system_shared_memory")
            await alice.call("infer", "toy", [alice.input_in("in_0", X, region)])
            regions = place.gateway._regions
            assert len(regions.registered("alice", "")) == 1
            revoke_keys(tmp_path / "keys.json", "alice")
            await until(lambda: not regions.registered("alice", ""), "they went with the key")


@pytest.mark.parametrize(
    ("address", "headers", "is_local"),
    [
        ("127.0.0.1", {}, True),
        ("127.8.9.1", {}, True),
        ("::1", {}, True),
        ("ipv4:127.0.0.1", {}, True),
        ("ipv6:%5B::1%5D", {}, True),
        ("ipv6:[::1]", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("::ffff:10.0.0.7", {}, False),
        ("10.0.0.7", {}, False),
        ("ipv4:10.0.0.7", {}, False),
        ("ipv6:%5Bfe80::1%25eth0%5D", {}, False),
        ("unix", {}, False),
        ("unknown", {}, False),
        ("", {}, False),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.7"}, False),
        ("127.0.0.1", {"forwarded": "for=10.0.0.7"}, False),
        ("127.0.0.1", {"via": "1.1 proxy"}, False),
        ("127.0.0.1", {"x-real-ip": "10.0.0.7"}, False),
    ],
)
def test_only_loopback_without_a_proxy_is_this_machine(
    address: str, headers: dict[str, str], is_local: bool
) -> None:
    assert Caller(Quotas(), address, address, headers).is_local is is_local


@pytest.mark.parametrize("form", FORMS)
async def test_who_comes_through_a_proxy_is_refused(sharing: Stage, prefix: str, form: str) -> None:
    async with triton_client(form, sharing.grpc, sharing.http) as client:
        with shared_object(f"/{prefix}all", 256):
            region = await registered(client, prefix)
            client.headers = {"x-forwarded-for": "10.0.0.7"}
            given = [client.input_in("in_0", X, region)]
            for call in (
                ("infer", "toy", given),
                ("get_system_shared_memory_status",),
                ("unregister_system_shared_memory",),
                ("register_system_shared_memory", "b", f"/{prefix}all", 64),
            ):
                with pytest.raises(InferenceServerException, match="over loopback"):
                    await client.call(*call)


# Bounds


def test_regions_are_bounded(tmp_path: Path) -> None:
    regions = SharedRegions("p-", 1000, tmp_path)
    for name in ("p-a", "p-b"):
        (tmp_path / name).write_bytes(bytes(900))
    regions.register("alice", "a", "/p-a", 0, 600)
    with pytest.raises(Overloaded):
        regions.register("bob", "b", "/p-b", 0, 401)
    regions.register("bob", "b", "/p-b", 0, 400)
    regions.unregister("alice", "a")
    for number in range(MOST_OF_ONE_KEY):
        regions.register("alice", str(number), "/p-a", number, 1)
    with pytest.raises(InvalidInput, match="at most"):
        regions.register("alice", "more", "/p-a", 0, 1)
    with pytest.raises(PermissionDenied):
        regions.register("carol", "b", "/p-b", 0, 1)
    regions.keep_owners(frozenset({"bob"}))
    assert not regions.registered("alice", "")
    assert [region.name for region in regions.registered("bob", "")] == ["b"]


def test_what_is_read_and_written_is_of_the_slice_alone(tmp_path: Path) -> None:
    regions = SharedRegions("p-", 1000, tmp_path)
    (tmp_path / "p-a").write_bytes(bytes(range(100)))
    regions.register("alice", "a", "p-a", 10, 20)
    assert regions.read("alice", RegionSlice("a", 5, 3), "f") == bytes((15, 16, 17))
    regions.write("alice", RegionSlice("a", 19, 1), b"\xff", "f")
    assert (tmp_path / "p-a").read_bytes() == bytes(range(29)) + b"\xff" + bytes(range(30, 100))
    for place in (RegionSlice("a", 20, 1), RegionSlice("a", 0, 21)):
        with pytest.raises(InvalidInput):
            regions.read("alice", place, "f")
        with pytest.raises(InvalidInput):
            regions.write("alice", place, b"", "f")
    with pytest.raises(InvalidInput, match="more than the 1"):
        regions.write("alice", RegionSlice("a", 0, 1), b"xy", "f")


async def test_what_is_read_counts_as_held_and_is_bounded(tmp_path: Path, prefix: str) -> None:
    big = np.zeros((5000, 4), np.float32)
    async with stage(tmp_path, shared_memory_prefix=prefix, max_request_bytes=100_000) as place:
        for form in FORMS:
            async with triton_client(form, place.grpc, place.http) as client:
                with shared_object(f"/{prefix}all", 200_000):
                    region = await registered(client, prefix, 200_000)
                    place.agent.hold = True
                    place.agent.arrived.clear()
                    place.agent.held.clear()

                    sent = asyncio.create_task(
                        client.call("infer", "toy", [client.input_in("in_0", big, region)])
                    )
                    await place.agent.arrived.wait()
                    assert big.nbytes < place.gateway._capacity.bytes < 2 * big.nbytes
                    place.agent.hold = False
                    for held in place.agent.held:
                        place.agent.answer(*held)
                    await sent
                    larger = np.zeros((8000, 4), np.float32)
                    with pytest.raises(InferenceServerException, match="bytes"):
                        await client.call("infer", "toy", [client.input_in("in_0", larger, region)])
                    await client.call("unregister_system_shared_memory")
        assert place.gateway._capacity.bytes == 0
