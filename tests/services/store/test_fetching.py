"""Fetching between real hubs over TCP: verified, resumed, from several peers, within limits."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from catenary_services.content.record import FETCHED_FOLDER, RECORD_FILE
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import ContentMismatch, InvalidInput, PlanInfeasible, Unavailable
from catenary_services.store.chunk_map import ChunkMap
from catenary_services.store.kept import is_kept
from catenary_services.store.messages import FilePart
from catenary_services.store.peers import SourcePeer
from catenary_services.store.settings import StoreSettings
from catenary_services.store.transfers import MissingError
from shared_helpers.waiting import until
from small_models.store_world import (
    CHUNK,
    KEY,
    WEIGHTS,
    StorePeer,
    StoreWorld,
    chunks_of_64_kib,
    store_world,
    write_model,
)

CHUNKS = 24


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of_64_kib(monkeypatch)


def served(peer: StorePeer) -> int:
    assert peer.store._server is not None
    return peer.store._server.served_bytes


def here(peer: StorePeer) -> list[int]:
    return peer.kept().map_of(WEIGHTS).here()


@asynccontextmanager
async def source_and_fetcher(
    tmp_path: Path, settings: StoreSettings | None = None
) -> AsyncIterator[tuple[StoreWorld, StorePeer, StorePeer, str]]:
    """A peer that has the model, one that fetches it, and the digest of the model."""
    async with store_world(tmp_path, settings) as world:
        source, fetcher = await world.add("source"), await world.add("fetcher")
        yield world, source, fetcher, source.repository.content_digest(KEY)


async def begun(fetcher: StorePeer, chunks: int) -> None:
    """Waits until so many chunks have come."""
    record = fetcher.root / "net" / "1" / RECORD_FILE
    await until(lambda: record.exists() and len(here(fetcher)) >= chunks)


async def test_what_is_fetched_is_what_the_source_has(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, source, fetcher, digest):
        assert await fetcher.load(digest, ["source"]) == content
        assert fetcher.repository.content_digest(KEY) == digest
        assert is_kept(fetcher.repository.folder(KEY))
        assert not is_kept(source.repository.folder(KEY))
        once = served(source)
        assert await fetcher.load(digest, ["source"]) == content
        assert served(source) == once, "what is here was fetched again"


async def test_only_the_chunks_that_are_read_are_fetched(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        ranges = [(3 * CHUNK + 5, 10), (7 * CHUNK - 1, 2)]
        found = await fetcher.load(digest, ["source"], ranges)
        assert here(fetcher) == [3, 6, 7]
        assert len(found) == len(content)
        for chunk in (3, 6, 7):
            span = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            assert found[span] == content[span]
        assert fetcher.kept().bytes_here()[0] < 5 * CHUNK
        assert os.stat(fetcher.repository.folder(KEY) / WEIGHTS).st_blocks * 512 < 5 * CHUNK


async def test_who_has_fetched_a_part_serves_it_and_says_so_of_the_rest(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    async with store_world(tmp_path) as world:
        source, first = await world.add("source"), await world.add("first")
        digest = source.repository.content_digest(KEY)
        await first.load(digest, ["source"], [(0, 10 * CHUNK)])
        before = served(source)
        second = await world.add("second")
        found = await second.load(digest, ["first", "source"])
        assert found == content
        assert served(first) > 0
        assert served(source) - before < len(content)


async def test_several_peers_share_the_work(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    async with store_world(tmp_path) as world:
        source = await world.add("source")
        digest = source.repository.content_digest(KEY)
        for name in ("one", "two"):
            peer = await world.add(name)
            await peer.load(digest, ["source"])
        before = served(source)
        fetcher = await world.add("fetcher")
        assert await fetcher.load(digest, ["source", "one", "two"]) == content
        given = [served(source) - before, *(served(world.peers[name]) for name in ("one", "two"))]
        assert all(each > CHUNK for each in given), given


async def test_a_source_that_lies_is_left_alone_and_the_rest_comes_from_another(
    tmp_path: Path,
) -> None:
    content = write_model(tmp_path / "honest", CHUNKS)
    write_model(tmp_path / "liar", CHUNKS)
    async with store_world(tmp_path) as world:
        honest, liar = await world.add("honest"), await world.add("liar")
        digest = honest.repository.content_digest(KEY)
        for name in ("model.yaml", RECORD_FILE):  # what it says is right, what it has is not
            place = liar.repository.folder(KEY) / name
            place.write_bytes((honest.repository.folder(KEY) / name).read_bytes())
        fetcher = await world.add("fetcher")
        assert await fetcher.load(digest, ["liar", "honest"]) == content
        assert fetcher.store._fetcher is not None
        assert fetcher.store._fetcher.lies >= 1
        known: SourcePeer = fetcher.store._fetcher._peers["liar"]
        assert known.lies >= 1
        assert not known.is_usable(time.monotonic_ns())


async def test_a_record_with_another_digest_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    async with store_world(tmp_path, StoreSettings(stall_s=1.0, free_bytes=0)) as world:
        await world.add("source")
        fetcher = await world.add("fetcher")
        with pytest.raises(Unavailable, match="source does not have it"):
            await fetcher.load("0" * 64, ["source"])


async def test_derived_files_of_others_are_not_believed(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    folder = tmp_path / "source" / "net" / "1" / "onnx-int8"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"made here")
    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        await fetcher.load(digest, ["source"])
        record = fetcher.repository.content(KEY)
        assert record is not None
        assert "onnx-int8/model.onnx" not in record.files
        assert not (fetcher.repository.folder(KEY) / "onnx-int8").exists()


async def test_a_fetch_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    slow = StoreSettings(serve_bytes_per_second=16 * CHUNK, stall_s=2.0, answer_s=1.0, free_bytes=0)
    async with source_and_fetcher(tmp_path, slow) as (world, _, fetcher, digest):
        loading = asyncio.create_task(fetcher.load(digest, ["source"]))
        await begun(fetcher, 3)
        await world.remove("source")
        with pytest.raises(Unavailable, match="come from nobody"):
            await loading
        got = here(fetcher)
        assert 3 <= len(got) < CHUNKS
        await world.remove("fetcher")
        again = await world.add("again", "fetcher")  # a new process with the same folder
        anew = await world.add("source", settings=StoreSettings(free_bytes=0))
        assert await again.load(digest, ["source"]) == content
        assert served(anew) <= (CHUNKS - len(got)) * CHUNK


async def test_a_cut_shorter_than_the_patience_is_not_noticed(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    slow = StoreSettings(serve_bytes_per_second=16 * CHUNK, answer_s=1.0, free_bytes=0)
    async with source_and_fetcher(tmp_path, slow) as (world, _, fetcher, digest):
        loading = asyncio.create_task(fetcher.load(digest, ["source"]))
        await begun(fetcher, 3)
        await world.remove("source")
        await asyncio.sleep(0.3)
        await world.add("source")
        assert await loading == content


async def test_processes_that_share_a_folder_fetch_each_chunk_once(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    async with store_world(tmp_path) as world:
        source = await world.add("source")
        digest = source.repository.content_digest(KEY)
        both = [await world.add(name, "shared") for name in ("one", "two")]
        found = await asyncio.gather(*(peer.load(digest, ["source"]) for peer in both))
        assert found == [content, content]
        small = 2 * 64 * 1024  # the record and model.yaml
        assert served(source) <= len(content) + small


async def test_each_byte_on_the_disk_is_counted_once_by_whoever_fetched_it(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    async with store_world(tmp_path) as world:
        source = await world.add("source")
        digest = source.repository.content_digest(KEY)
        both = [await world.add(name, "shared") for name in ("one", "two")]
        await asyncio.gather(*(peer.load(digest, ["source"]) for peer in both))
        await both[0].load(digest, ["source"])
        assert sum(both[0].counted + both[1].counted) == both[0].kept().bytes_here()[0]


async def test_a_full_disk_is_a_sentence_and_the_fetch_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    write = ChunkMap.write
    left = [5]

    def full(self: ChunkMap, chunk: int, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, chunk, data)

    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        with monkeypatch.context() as patched:
            patched.setattr(ChunkMap, "write", full)
            with pytest.raises(PlanInfeasible, match="No space left on device"):
                await fetcher.load(digest, ["source"])
        assert await fetcher.load(digest, ["source"]) == content


async def test_versions_used_least_recently_make_way_at_the_limit(tmp_path: Path) -> None:
    keys = [ModelKey("net", str(number)) for number in (1, 2, 3)]
    contents = [write_model(tmp_path / "source", CHUNKS, key) for key in keys]
    limit = StoreSettings(limit_bytes=int(2.6 * CHUNKS * CHUNK), stall_s=20.0, free_bytes=0)
    async with store_world(tmp_path, limit) as world:
        source, fetcher = await world.add("source"), await world.add("fetcher")
        digests = [source.repository.content_digest(key) for key in keys]
        for key, digest, content in zip(keys, digests, contents, strict=True):
            fetcher.store.release_unused(())
            await asyncio.sleep(0.02)
            assert await fetcher.load(digest, ["source"], None, key) == content
        there = [fetcher.repository.folder(key).exists() for key in keys]
        assert there == [False, True, True]


async def test_a_version_in_use_is_not_dropped(tmp_path: Path) -> None:
    keys = [ModelKey("net", str(number)) for number in (1, 2)]
    contents = [write_model(tmp_path / "source", CHUNKS, key) for key in keys]
    limit = StoreSettings(limit_bytes=int(1.5 * CHUNKS * CHUNK), stall_s=20.0, free_bytes=0)
    async with store_world(tmp_path, limit) as world:
        source, fetcher = await world.add("source"), await world.add("fetcher")
        digests = [source.repository.content_digest(key) for key in keys]
        assert await fetcher.load(digests[0], ["source"], None, keys[0]) == contents[0]
        other = await world.add("other", "fetcher")  # of another process of the same machine
        with pytest.raises(PlanInfeasible, match="raise store_bytes"):
            await other.load(digests[1], ["source"], None, keys[1])
        fetcher.store.release_unused(())
        assert await other.load(digests[1], ["source"], None, keys[1]) == contents[1]


async def test_files_of_somebody_else_are_never_touched(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    mine = write_model(tmp_path / "fetcher", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, source, fetcher, digest):
        assert await fetcher.load(digest, ["source"]) == mine
        assert not (fetcher.repository.folder(KEY) / FETCHED_FOLDER).exists()
        assert served(source) == 0


async def test_a_new_content_replaces_what_was_fetched_of_the_old(tmp_path: Path) -> None:
    write_model(tmp_path / "old", CHUNKS)
    content = write_model(tmp_path / "new", CHUNKS)
    async with store_world(tmp_path) as world:
        old, new = await world.add("old"), await world.add("new")
        fetcher = await world.add("fetcher")
        await fetcher.load(old.repository.content_digest(KEY), ["old"])
        digest = new.repository.content_digest(KEY)
        with pytest.raises(Unavailable, match="when nothing uses it any more"):
            await fetcher.load(digest, ["new"])
        fetcher.store.release_unused(())
        assert await fetcher.load(digest, ["new"]) == content


async def test_a_chunk_that_went_bad_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        await fetcher.load(digest, ["source"])
        with (fetcher.repository.folder(KEY) / WEIGHTS).open("r+b") as file:
            file.seek(5 * CHUNK)
            file.write(b"rotten")
        fetcher.read(digest, ["source"], [(0, CHUNK)])  # another chunk: nothing is noticed
        await fetcher.load(digest, ["source"])
        assert (fetcher.repository.folder(KEY) / WEIGHTS).read_bytes() == content


async def test_a_file_that_grows_while_another_partition_reads_it_has_not_changed(
    tmp_path: Path,
) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        path = fetcher.repository.folder(KEY) / WEIGHTS

        def overlapping() -> None:
            fetcher.store.prepare(KEY, digest, ["source"])
            with fetcher.repository.reading(KEY) as first:
                first.begin(path, [(0, CHUNK)])
                fetcher.read(digest, ["source"])
                assert path.read_bytes() == content

        await asyncio.to_thread(overlapping)


async def test_a_file_that_somebody_writes_to_while_it_is_read_has_changed(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        path = fetcher.repository.folder(KEY) / WEIGHTS

        def disturbed() -> None:
            fetcher.store.prepare(KEY, digest, ["source"])
            with fetcher.repository.reading(KEY) as first:
                first.begin(path, [(0, CHUNK)])
                with path.open("r+b") as file:
                    file.seek(9 * CHUNK)
                    file.write(b"from elsewhere")
                # A fetch behind it must not hide it.
                fetcher.read(digest, ["source"], [(2 * CHUNK, CHUNK)])

        with pytest.raises(ContentMismatch, match="was changed while it was read"):
            await asyncio.to_thread(disturbed)


async def test_a_version_that_is_partly_here_is_not_recorded_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        await fetcher.load(digest, ["source"], [(0, 1)])
        with pytest.raises(InvalidInput, match="was fetched from the cluster"):
            fetcher.repository.record_content(KEY)
        (fetcher.repository.folder(KEY) / RECORD_FILE).unlink()
        assert fetcher.repository.content(KEY) is None


@pytest.mark.parametrize(
    "path", ["../../outside", "secret", "/etc/hostname", ".fetched/lock", "weights.bin/../secret"]
)
async def test_nothing_but_what_the_record_lists_is_served(tmp_path: Path, path: str) -> None:
    write_model(tmp_path / "source", CHUNKS)
    async with source_and_fetcher(tmp_path) as (_, source, fetcher, digest):
        (source.repository.folder(KEY) / "secret").write_text("not in the record")
        (tmp_path / "source" / "outside").write_text("neither")
        into = memoryview(bytearray(64))
        part = FilePart(KEY, digest, path, "0" * 64, 0, 64)
        with pytest.raises(MissingError):
            await fetcher.store._transfers.fill("source", part, into)
        assert bytes(into) == bytes(64)


async def test_fetching_keeps_to_its_rate(tmp_path: Path) -> None:
    write_model(tmp_path / "source", 8)
    limited = StoreSettings(fetch_bytes_per_second=8 * CHUNK, free_bytes=0)
    async with source_and_fetcher(tmp_path, limited) as (_, _, fetcher, digest):
        began = asyncio.get_running_loop().time()
        await fetcher.load(digest, ["source"])
        assert asyncio.get_running_loop().time() - began >= 0.8


async def test_who_waits_is_told_that_bytes_come_and_progress_adds_up(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    slow = StoreSettings(serve_bytes_per_second=8 * CHUNK, free_bytes=0)
    async with store_world(tmp_path, slow) as world:
        source, fetcher = await world.add("source"), await world.add("fetcher")
        alive: list[int] = []
        fetcher.store.waiting = lambda: alive.append(1)
        digest = source.repository.content_digest(KEY)
        loading = asyncio.create_task(fetcher.load(digest, ["source"], [(0, 12 * CHUNK)]))
        seen = []
        while not loading.done():
            seen += [each.fetched_bytes for each in fetcher.store.progress()]
            await asyncio.sleep(0.05)
        await loading
        (progress,) = fetcher.store.progress()
        assert alive
        assert seen == sorted(seen)
        assert progress.fetched_bytes == progress.wanted_bytes >= 12 * CHUNK


async def test_a_load_that_is_not_wanted_any_more_stops_fetching(tmp_path: Path) -> None:
    write_model(tmp_path / "source", CHUNKS)
    slow = StoreSettings(serve_bytes_per_second=8 * CHUNK, free_bytes=0)
    async with source_and_fetcher(tmp_path, slow) as (_, _, fetcher, digest):
        loading = asyncio.create_task(fetcher.load(digest, ["source"]))
        await begun(fetcher, 1)
        fetcher.store.abandon(KEY)
        with pytest.raises(Unavailable, match="is not wanted here any more"):
            await loading


async def test_what_came_of_another_content_that_was_never_complete_is_forgotten(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "old", CHUNKS)
    content = write_model(tmp_path / "new", CHUNKS)
    async with store_world(tmp_path) as world:
        old, new = await world.add("old"), await world.add("new")
        fetcher = await world.add("fetcher")
        await fetcher.load(old.repository.content_digest(KEY), ["old"])
        fetcher.store.release_unused(())
        (fetcher.repository.folder(KEY) / RECORD_FILE).unlink()  # as after a crash before the end
        assert await fetcher.load(new.repository.content_digest(KEY), ["new"]) == content


async def test_who_waits_for_a_record_is_let_go_when_the_process_ends(tmp_path: Path) -> None:
    async with store_world(tmp_path) as world:
        fetcher = await world.add("fetcher")
        waiting = asyncio.create_task(fetcher.load("0" * 64, ["nobody"]))
        await asyncio.sleep(0.2)
        await world.remove("fetcher")
        with pytest.raises(Unavailable, match="the process ends"):
            await waiting


async def test_caches_of_agents_are_nobodys_files(tmp_path: Path) -> None:
    content = write_model(tmp_path / "source", CHUNKS)
    (tmp_path / "fetcher" / "net" / "1" / ".parts").mkdir(parents=True)
    async with source_and_fetcher(tmp_path) as (_, _, fetcher, digest):
        assert await fetcher.load(digest, ["source"]) == content


async def test_a_version_that_is_not_here_is_not_read_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_world(tmp_path) as world:
        giver, asker = await world.add("giver"), await world.add("asker")
        read: list[ModelKey] = []
        monkeypatch.setattr(giver.repository, "content", read.append)
        with pytest.raises(Unavailable, match="giver does not have it"):
            await asker.load("0" * 64, ["giver"], key=ModelKey("unknown", "1"))
        assert read == []
