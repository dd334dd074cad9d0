"""Files of buckets and web servers, by fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    NotSupported,
    PermissionDenied,
    Unavailable,
)
from catenaryd.sources.listing import MOST_FILES, ListedFile, SourceListing, Told
from catenaryd.sources.source_names import ModelSource, SourceKind

_PIECE_BYTES = 16 << 20
_EXTRAS = {SourceKind.S3: ("s3fs", "s3"), SourceKind.GCS: ("gcsfs", "gcs")}
_WEB = (SourceKind.HTTP, SourceKind.HTTPS)
_STAMPS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "md5Hash")
"""Names by which file systems tell what changes with a file."""


def list_file_system(source: ModelSource) -> SourceListing:
    """Returns the files below a URL.

    Raises:
        CatenaryError: They cannot be listed; the message says why in one sentence.
    """
    with _told(source, source.text):
        system, root = _opened(source)
        found, folder = (
            _one_of_web(system, source) if source.kind in _WEB else _below(system, root, source)
        )
    if len(found) > MOST_FILES:
        raise InvalidInput("source", f"{source.text} has more than {MOST_FILES} files")
    files = tuple(
        ListedFile(path, int(facts["size"]), stamp=_stamp(facts)) for path, facts in found.items()
    )
    paths = {path: str(facts["name"]) for path, facts in found.items()}
    return SourceListing(folder, "", files, FileSystemTransport(source, system, paths))


@dataclass(frozen=True, slots=True)
class FileSystemTransport:
    """Brings in files by ranges."""

    source: ModelSource
    system: Any
    paths: dict[str, str]
    """The names by which the file system knows the files, by their paths in the listing."""

    def append(self, file: ListedFile, into: BinaryIO, told: Told) -> None:
        """Writes a file from the position of `into` on, piece by piece.

        Raises:
            CatenaryError: Not all of it came; what came is in `into`.
        """
        where = self.paths[file.path]
        while (offset := into.tell()) < file.size:
            end = min(file.size, offset + _PIECE_BYTES)
            with _told(self.source, file.path):
                piece = self.system.cat_file(where, start=offset, end=end)
            if len(piece) != end - offset:
                raise Unavailable(
                    f"{self.source.text}: {file.path} did not come as asked:"
                    f" {len(piece)} bytes instead of {end - offset}"
                )
            into.write(piece)
            told(len(piece))

    def local(self, file: ListedFile) -> Path | None:
        """Returns None: these files are elsewhere."""
        return None


def _opened(source: ModelSource) -> tuple[Any, str]:
    import fsspec.core

    try:
        system, root = fsspec.core.url_to_fs(source.place)
    except ImportError as error:
        library, extra = _EXTRAS.get(source.kind, ("aiohttp", "platform"))
        raise NotSupported(
            f"{source.text} needs the library {library}, which is not installed:"
            f" pip install 'catenary[{extra}]'"
        ) from error
    return system, str(root)


def _one_of_web(system: Any, source: ModelSource) -> tuple[dict[str, Any], ModelSource]:
    """Returns the one file that a web address names: web servers list no folders."""
    facts = dict(system.info(source.place))
    name = unquote(urlsplit(source.place).path).rpartition("/")[2]
    if not name or facts.get("size") is None:
        raise InvalidInput(
            "source", f"{source.text} is no file whose size its server tells; name one file"
        )
    facts["name"] = source.place
    return {name: facts}, _with_file(source, name)


def _below(system: Any, root: str, source: ModelSource) -> tuple[dict[str, Any], ModelSource]:
    if system.isfile(root):
        folder, _, name = root.rpartition("/")
        found = system.ls(folder, detail=True)
        source = _with_file(source, name)
    else:
        folder, found = root, list(system.find(root, detail=True, maxdepth=2).values())
    plain = [each for each in found if each.get("type") == "file"]
    if not plain:
        raise InvalidInput("source", f"{source.text} has no files")
    prefix = f"{folder.rstrip('/')}/"
    return {str(each["name"]).removeprefix(prefix): each for each in plain}, source


def _with_file(source: ModelSource, name: str) -> ModelSource:
    if source.file and source.file != name:
        raise InvalidInput("file", f"{source.text} is a file already")
    return ModelSource(source.kind, source.place, source.revision, name)


def _stamp(facts: dict[str, Any]) -> str:
    return "|".join(str(facts[name]) for name in _STAMPS if facts.get(name))


@contextmanager
def _told(source: ModelSource, what: str) -> Iterator[None]:
    """Turns failures of a file system into errors of one sentence."""
    try:
        yield
    except CatenaryError:
        raise
    except FileNotFoundError as error:
        if isinstance(error.__cause__, OSError):  # of a web server that does not answer, too
            said = " ".join(str(error.__cause__).split())[:200]
            raise Unavailable(f"{source.text}: {what} did not come: {said}") from error
        raise InvalidInput("source", f"{what} does not exist") from error
    except PermissionError as error:
        raise PermissionDenied(
            f"{what} is not given to the credentials of this machine's environment"
        ) from error
    except Exception as error:
        # Every file system brings errors of its own library, and connections break in all of them.
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unavailable(f"{source.text}: {what} did not come: {said}") from error
