"""Shared memory of clients on this machine: regions by name, in which tensors are.

Nothing is mapped: a client that shrinks a mapped file ends whoever touches the mapping (SIGBUS), at
any moment. A region's file is opened for each tensor, compared with the one that was registered,
and read or written by system calls, which tell of a file that became too short. So a registered
region holds neither memory nor a descriptor, and what it names cannot be exchanged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from catenary_gateway.admission.request_pipeline import Caller
from catenary_gateway.inference import RegionSlice
from catenary_gateway.tensors.validation import clip
from catenary_services.errors import (
    InvalidInput,
    NotSupported,
    Overloaded,
    PermissionDenied,
)

FOLDER = Path("/dev/shm")
"""The folder in which Linux has the objects that `shm_open` makes."""
MOST_REGIONS = 1024
MOST_OF_ONE_KEY = 128
"""Most regions of one API key."""
LONGEST_NAME = 256
_LONGEST_FILE_NAME_BYTES = 255
_MOST_BYTES = 2**63 - 1
_RETRY_NS = 1_000_000_000
# A name may be a link or a pipe, which must be neither followed nor waited for.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class SharedRegion(msgspec.Struct, frozen=True):
    """A part of a shared memory object, as a client registered it."""

    name: str
    key: str
    """The object's name, as the client gave it."""
    offset: int
    size_bytes: int
    file_name: str
    identity: tuple[int, int]
    """Device and inode of the object that had the name then."""


class SharedRegions:
    """The registered regions of all clients; each API key has its own, by its name."""

    def __init__(self, prefix: str | None, most_bytes: int, folder: Path = FOLDER) -> None:
        """Makes an empty registry.

        Args:
            prefix: What the names of all objects begin with; None if no region is accepted.
            most_bytes: Most bytes of all regions.
            folder: Where the objects are.
        """
        self._prefix = prefix
        self._most_bytes = most_bytes
        self._folder = folder
        self._of_owner: dict[str, dict[str, SharedRegion]] = {}

    @property
    def is_offered(self) -> bool:
        """True if regions are accepted at all."""
        return self._prefix is not None

    def require_offered(self, caller: Caller) -> str:
        """Returns the owner of a caller's regions.

        Raises:
            NotSupported: This gateway accepts no regions.
            PermissionDenied: The caller is on another machine.
        """
        if self._prefix is None:
            raise NotSupported(
                "system shared memory is off at this gateway: `shared_memory_prefix` is not set"
            )
        if not caller.is_local:
            raise PermissionDenied(
                "system shared memory is for clients on the gateway's machine, over loopback"
            )
        return caller.entered.name

    def register(self, owner: str, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Registers a part of a shared memory object.

        Raises:
            InvalidInput: A name is wrong or taken, or the object is not there or too short.
            PermissionDenied: The object's name has another prefix, or the object is another key's.
            Overloaded: The regions of all keys are too many, or too large.
        """
        own = self._of_owner.get(owner, {})
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise InvalidInput("name", f"must have 1 to {LONGEST_NAME} printable characters")
        if name in own:
            raise InvalidInput("name", f"a region {clip(name)!r} is registered already")
        if len(own) >= MOST_OF_ONE_KEY:
            raise InvalidInput("name", f"one key may have at most {MOST_OF_ONE_KEY} regions")
        if not 0 <= offset <= _MOST_BYTES:
            raise InvalidInput("offset", "must be a number of bytes")
        if not 0 < size_bytes <= _MOST_BYTES - offset:
            raise InvalidInput("byte_size", "must be a number of bytes, at least 1")
        file_name = self._file_name(key)
        with self._opened(file_name, os.O_RDWR, "key") as (_, found):
            if offset + size_bytes > found.st_size:
                raise InvalidInput(
                    "byte_size",
                    f"{size_bytes} bytes from {offset} on reach behind the object's end at "
                    f"{found.st_size}",
                )
            identity = (found.st_dev, found.st_ino)
        self._require_free(owner, identity)
        held = [region for regions in self._of_owner.values() for region in regions.values()]
        if len(held) >= MOST_REGIONS or (
            sum(region.size_bytes for region in held) + size_bytes > self._most_bytes
        ):
            raise Overloaded(
                f"shared memory regions may be {MOST_REGIONS} of {self._most_bytes} bytes in all",
                retry_after_ns=_RETRY_NS,
            )
        region = SharedRegion(name, key, offset, size_bytes, file_name, identity)
        self._of_owner.setdefault(owner, {})[name] = region

    def unregister(self, owner: str, name: str) -> None:
        """Forgets a region of an owner, or all of them for ""; an unknown one is gone already."""
        own = self._of_owner.get(owner, {})
        if name:
            own.pop(name, None)
        if not name or not own:
            self._of_owner.pop(owner, None)

    def keep_owners(self, owners: frozenset[str]) -> None:
        """Forgets the regions of all others than `owners`."""
        self._of_owner = {name: own for name, own in self._of_owner.items() if name in owners}

    def registered(self, owner: str, name: str) -> list[SharedRegion]:
        """Returns the regions of an owner, or the one that is called `name`.

        Raises:
            InvalidInput: There is none of this name.
        """
        if name:
            return [self._region(owner, name, "name")]
        return list(self._of_owner.get(owner, {}).values())

    def check(self, owner: str, place: RegionSlice, field: str) -> None:
        """Checks that a slice is within a region of an owner.

        Raises:
            InvalidInput: It is not.
        """
        region = self._region(owner, place.region, field)
        if place.offset + place.size_bytes > region.size_bytes:
            raise InvalidInput(
                field,
                f"{place.size_bytes} bytes from {place.offset} on reach behind the region "
                f"{clip(region.name)!r} of {region.size_bytes}",
            )

    def read(self, owner: str, place: RegionSlice, field: str) -> bytes:
        """Returns the bytes of a slice.

        Raises:
            InvalidInput: The slice is not within a region of the owner, or no longer.
        """
        self.check(owner, place, field)
        with self._slice(owner, place, os.O_RDONLY, field) as (descriptor, start):
            data = os.pread(descriptor, place.size_bytes, start)
            while 0 < len(data) < place.size_bytes:
                more = os.pread(descriptor, place.size_bytes - len(data), start + len(data))
                if not more:
                    break
                data += more
        if len(data) < place.size_bytes:
            raise InvalidInput(field, f"the region {clip(place.region)!r} became shorter")
        return data

    def write(self, owner: str, place: RegionSlice, data: bytes, field: str) -> None:
        """Writes `data` to the beginning of a slice.

        Raises:
            InvalidInput: The slice is too short, or not within a region of the owner, or no longer.
        """
        if len(data) > place.size_bytes:
            raise InvalidInput(
                field, f"the output has {len(data)} bytes, more than the {place.size_bytes} for it"
            )
        self.check(owner, place, field)
        with self._slice(owner, place, os.O_WRONLY, field) as (descriptor, start):
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, memoryview(data)[done:], start + done)

    def _region(self, owner: str, name: str, field: str) -> SharedRegion:
        region = self._of_owner.get(owner, {}).get(name)
        if region is None:
            raise InvalidInput(field, f"no shared memory region {clip(name)!r} is registered")
        return region

    def _require_free(self, owner: str, identity: tuple[int, int]) -> None:
        for other, regions in self._of_owner.items():
            if other != owner and any(each.identity == identity for each in regions.values()):
                raise PermissionDenied("key: this object is registered by another API key")

    def _file_name(self, key: str) -> str:
        """Returns the name of an object's file.

        Raises:
            InvalidInput: It is no name.
            PermissionDenied: It has another prefix.
        """
        name = key.removeprefix("/")
        # What is not printable includes surrogates, which no file name can have.
        if not name.isprintable() or "/" in name or name in ("", ".", ".."):
            raise InvalidInput("key", "must be the name of a shared memory object")
        if len(name.encode()) > _LONGEST_FILE_NAME_BYTES:
            raise InvalidInput("key", f"has more than {_LONGEST_FILE_NAME_BYTES} bytes")
        if self._prefix is None or not name.startswith(self._prefix):
            raise PermissionDenied(
                f"key: names of objects begin with {self._prefix!r} here (`shared_memory_prefix`)"
            )
        return name

    @contextmanager
    def _slice(
        self, owner: str, place: RegionSlice, how: int, field: str
    ) -> Iterator[tuple[int, int]]:
        """Opens the object of a region; yields its descriptor and where the slice begins in it."""
        region = self._region(owner, place.region, field)
        with self._opened(region.file_name, how, field) as (descriptor, found):
            if (found.st_dev, found.st_ino) != region.identity:
                raise InvalidInput(
                    field, f"the region {clip(region.name)!r} is not what was registered"
                )
            start = region.offset + place.offset
            if start + place.size_bytes > found.st_size:
                raise InvalidInput(field, f"the region {clip(region.name)!r} became shorter")
            yield descriptor, start

    @contextmanager
    def _opened(self, file_name: str, how: int, field: str) -> Iterator[tuple[int, os.stat_result]]:
        """Opens an object; what fails in the block is told like a failure to open it."""
        try:
            descriptor = os.open(self._folder / file_name, how | _FLAGS)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise InvalidInput(field, "is not a shared memory object")
                yield descriptor, found
            finally:
                os.close(descriptor)
        except OSError as error:
            raise InvalidInput(field, f"shared memory fails: {error.strerror}") from None
