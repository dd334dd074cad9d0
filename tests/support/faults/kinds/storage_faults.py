"""What is stored is damaged, gone, or cannot be written: Redis, models, the cache of parts."""

from __future__ import annotations

import random
import shutil
from abc import abstractmethod
from pathlib import Path

from catenary_agent.partitioning.parts import CACHE_FOLDER
from catenary_scheduler.storage.keys import RedisTable, book_table
from catenary_services.domain.ids import ResourceId
from faults.base import LEADER, MOUNTS, REDIS, Fault, Promise, fault
from faults.kinds.agent_faults import OfAnAgent
from faults.world import World, mount, unmount

_KILOBYTE = 1024
_ROOM_KB = 65_536
"""Redis stays on the small disk when there is room again, for the rest of the run."""


@fault
class RedisDiskFull(Fault):
    name = "redis-disk-full"
    about = "the disk of Redis is full"
    promise = Promise(5.0, served_s=1.0)
    needs = frozenset({MOUNTS})

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (REDIS,)

    async def apply(self, world: World) -> None:
        # A small file system over its folder; it is started over it, as on a disk that fills up.
        world.redis.end()
        kept = {f.name: f.read_bytes() for f in world.redis.folder.glob("*.*") if f.is_file()}
        logs = {
            d.name: [(f.name, f.read_bytes()) for f in d.iterdir()]
            for d in world.redis.folder.iterdir()
            if d.is_dir()
        }
        needed = sum(map(len, kept.values())) + sum(len(b) for fs in logs.values() for _, b in fs)
        mount(world.redis.folder, f"{needed // _KILOBYTE + _ROOM_KB}k")
        _write(world.redis.folder, kept, logs)
        await world.redis.start()
        with (world.redis.folder / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(b"\0" * 4096):
                    pass
            except OSError:
                world.note("the disk is full", REDIS)

    async def undo(self, world: World) -> None:
        (world.redis.folder / "ballast").unlink(missing_ok=True)


def _write(
    folder: Path, files: dict[str, bytes], folders: dict[str, list[tuple[str, bytes]]]
) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, inside in folders.items():
        (folder / name).mkdir(exist_ok=True)
        for file, content in inside:
            (folder / name / file).write_bytes(content)


@fault
class FlushAll(Fault):
    name = "flushall"
    about = "everything in Redis is deleted"
    promise = Promise(5.0, served_s=1.0)
    hold_s = (0.5, 1.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        return (REDIS,)

    async def apply(self, world: World) -> None:
        async with world.database() as database:
            await database.flushall()


@fault
class DamagedRedis(Fault):
    name = "damaged-redis"
    about = "random bytes in every table of Redis, then the leader is killed"
    promise = Promise(15.0)
    hold_s = (4.0, 7.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self._draw = draw
        return (REDIS, LEADER)

    async def apply(self, world: World) -> None:
        async with world.database() as database:
            tables = [*RedisTable, *(book_table(ResourceId(f"gpu/agent-{n}")) for n in range(4))]
            for table in tables:
                key = world.keys.table(table)
                fields = await database.hkeys(key)
                chosen = [self._draw.choice(fields)] if fields else []
                for name in [*chosen, self._bytes(12)]:
                    await database.hset(key, name, self._bytes(60))
            await database.hset(world.keys.clock, "scheduler_ns", self._bytes(8))
        self.killed = await world.resolve(LEADER)
        await world.kill(self.killed)

    def _bytes(self, most: int) -> bytes:
        return self._draw.randbytes(self._draw.randint(1, most))

    async def undo(self, world: World) -> None:
        world.start(self.killed)


@fault
class PoisonedEpoch(Fault):
    name = "poisoned-epoch"
    about = "the epoch in Redis is no number, or the largest there is; the leader is killed"
    promise = Promise(15.0)
    hold_s = (4.0, 7.0)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self.value = draw.choice(["nonsense", str(2**64 - 1), str(2**53 + 1), "-5", ""])
        return (REDIS, LEADER)

    def figures(self) -> list[str]:
        return [repr(self.value)]

    async def apply(self, world: World) -> None:
        async with world.database() as database:
            await database.set(world.keys.epoch, self.value)
        self.killed = await world.resolve(LEADER)
        await world.kill(self.killed)

    async def undo(self, world: World) -> None:
        world.start(self.killed)


class DamagedFiles(OfAnAgent):
    """An agent is down while files of its own copy are damaged; it starts over what is left."""

    promise = Promise(25.0, served_s=3.0)
    hold_s = (8.0, 12.0)

    async def apply(self, world: World) -> None:
        await world.kill(self.agent)
        self.damage(world.repository(self.agent))
        world.start(self.agent)

    async def undo(self, world: World) -> None:
        await world.kill(self.agent)
        world.restore_models(self.agent)
        world.start(self.agent)

    def choose(self, draw: random.Random) -> tuple[str, ...]:
        self._draw = draw
        return super().choose(draw)

    @abstractmethod
    def damage(self, repository: Path) -> None: ...

    def _tear(self, file: Path) -> None:
        """Leaves the first part of a file, as a crash does that loses what was not synced."""
        size = file.stat().st_size
        with file.open("r+b") as torn:
            torn.truncate(self._draw.randrange(size // 4, size))

    def _alter(self, file: Path, flips: int = 64) -> None:
        """Alters bytes in the middle of a file, as a failing disk does."""
        content = bytearray(file.read_bytes())
        middle = len(content) // 2
        for _ in range(flips):
            at = self._draw.randrange(middle, len(content))
            content[at] ^= 1 << self._draw.randrange(8)
        file.write_bytes(content)


@fault
class TornPart(DamagedFiles):
    name = "torn-part"
    about = "files in an agent's cache of parts are cut short, or altered"

    def damage(self, repository: Path) -> None:
        for file in sorted(repository.rglob(f"{CACHE_FOLDER}/*/*")):
            if file.is_file():
                (self._tear if self._draw.random() < 0.5 else self._alter)(file)


@fault
class TornModel(DamagedFiles):
    name = "torn-model"
    about = "the weights of an agent's own copy are cut short"
    excuses = ("partition_failed",)

    def damage(self, repository: Path) -> None:
        for file in _weights(repository):
            self._tear(file)


@fault
class AlteredModel(DamagedFiles):
    name = "altered-model"
    about = "weights of an agent's own copy are others, in files that are whole"
    excuses = ("partition_failed",)

    def damage(self, repository: Path) -> None:
        for file in _weights(repository):
            if file.suffix == ".onnx":
                _zero_weights(file)
            else:
                content = bytearray(file.read_bytes())
                half = len(content) // 2  # the header of safetensors comes first
                content[half:] = b"\0" * (len(content) - half)
                file.write_bytes(content)


def _zero_weights(file: Path) -> None:
    """Sets half of the weights in an ONNX file to zero; its graph stays good."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    weights = [each for each in model.graph.initializer if len(each.raw_data) > _KILOBYTE]
    for each in weights[::2]:
        each.raw_data = b"\0" * len(each.raw_data)
    if weights:
        onnx.save(model, file)


@fault
class NoRoomForParts(DamagedFiles):
    name = "parts-disk-full"
    about = "the disk of an agent's cache of parts is full"
    needs = frozenset({MOUNTS})

    def damage(self, repository: Path) -> None:
        for folder in repository.glob("*/1"):
            cache = folder / CACHE_FOLDER
            mount(cache, "64k")
            (cache / "ballast").write_bytes(b"\0" * 50 * _KILOBYTE)

    async def undo(self, world: World) -> None:
        for folder in world.repository(self.agent).glob("*/1"):
            unmount(folder / CACHE_FOLDER)
        await world.kill(self.agent)
        world.start(self.agent)


def _weights(repository: Path) -> list[Path]:
    """Returns the files with weights; parts made of them are removed, so that they are read."""
    for cache in repository.glob(f"*/*/{CACHE_FOLDER}"):
        shutil.rmtree(cache)
    endings = (".onnx", ".data", ".safetensors")
    return sorted(file for file in repository.rglob("*") if file.suffix in endings)
