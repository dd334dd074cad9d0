"""Files of a hub, by huggingface_hub: listing, access and transfer with its own library.

HF_ENDPOINT names a mirror, HF_TOKEN is who asks, HF_HUB_OFFLINE forbids to ask at all, as for
everything that uses the library. What its cache has already is taken from there. Transfers go
through its session to files of our own: its own downloads throw away what came of a file when they
end early.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from catenary_services.errors import (
    CatenaryError,
    ContentMismatch,
    InvalidInput,
    NotSupported,
    PermissionDenied,
    Unavailable,
)
from catenaryd.sources.listing import MOST_FILES, ListedFile, SourceListing, Told
from catenaryd.sources.source_names import ModelSource

_ANSWER_S = 30.0
"""Longest silence of a hub in seconds."""
_TRIES = 4
"""Attempts that bring nothing before a transfer is given up."""
_PAUSE_S = 1.0
_PARTIAL = 206
_SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True)
class HubAccess:
    """The hub to ask, and by whose right."""

    endpoint: str = ""
    """Address of a mirror; empty for HF_ENDPOINT, or the hub itself."""
    token: str = ""
    """Empty for HF_TOKEN, or the token the library keeps on this machine."""

    def checked(self) -> HubAccess:
        """Returns the access with an endpoint that is an address.

        Raises:
            InvalidInput: It is none.
        """
        if not self.endpoint:
            return self
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise InvalidInput("hub_endpoint", "is no http:// or https:// address of a mirror")
        return replace(self, endpoint=self.endpoint.rstrip("/"))

    def implied_token(self) -> str | bool | None:
        """Returns what the library takes as a token: this one, its own, or none.

        A token of this machine is for the endpoint of this machine: whoever names another endpoint
        must not get it sent there.
        """
        if self.token:
            return self.token
        own = os.environ.get("HF_ENDPOINT", "").rstrip("/")
        return None if self.endpoint in ("", own) else False


def list_hub(source: ModelSource, access: HubAccess) -> SourceListing:
    """Returns the files of a repository of a hub, or of its copy in the library's cache if offline.

    Raises:
        CatenaryError: It cannot be listed; the message says why in one sentence.
    """
    access = access.checked()
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        return _list_cache(source)
    api = HfApi(endpoint=access.endpoint or None, token=access.implied_token())
    with _told(source):
        info = api.model_info(
            source.place,
            revision=source.revision or None,
            files_metadata=True,
            timeout=_ANSWER_S,
        )
    siblings = info.siblings or []
    if not info.sha or len(siblings) > MOST_FILES:
        raise InvalidInput("source", f"{source.text} is not listed as a hub lists a repository")
    files = tuple(
        ListedFile(
            each.rfilename,
            int(each.size or 0),
            sha256=each.lfs.sha256 if each.lfs is not None else "",
            git_sha1=each.blob_id or "" if each.lfs is None else "",
        )
        for each in siblings
    )
    return SourceListing(source, info.sha, files, HubTransport(source, info.sha, access))


@dataclass(frozen=True, slots=True)
class HubTransport:
    """Brings in files of one commit of a hub's repository."""

    source: ModelSource
    commit: str
    access: HubAccess

    def append(self, file: ListedFile, into: BinaryIO, told: Told) -> None:
        """Writes a file from the position of `into` on; a broken connection is taken up again.

        Raises:
            CatenaryError: Not all of it came; what came is in `into`.
        """
        tries = _TRIES
        while into.tell() < file.size:
            before = into.tell()
            try:
                with _told(self.source, file.path):
                    self._transfer(file, into, told)
            except Unavailable:
                tries = tries - 1 if into.tell() <= before else _TRIES
                if not tries:
                    raise
                time.sleep(_PAUSE_S)

    def _transfer(self, file: ListedFile, into: BinaryIO, told: Told) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        endpoint = self.access.endpoint or None
        url = hf_hub_url(self.source.place, file.path, revision=self.commit, endpoint=endpoint)
        headers = build_hf_headers(token=self.access.implied_token(), library_name="catenary")
        headers["Accept-Encoding"] = "identity"  # a compressed answer would have no ranges
        here = into.tell()
        if here:
            headers["Range"] = f"bytes={here}-"
        with get_session().stream("GET", url, headers=headers, timeout=_ANSWER_S) as answer:
            hf_raise_for_status(answer)
            if here and answer.status_code != _PARTIAL:
                into.seek(0)
                into.truncate()
            for piece in answer.iter_bytes():
                if into.tell() + len(piece) > file.size:
                    raise ContentMismatch(
                        f"{self.source.text}/{file.path} has more bytes than its source says"
                    )
                into.write(piece)
                told(len(piece))
        if into.tell() < file.size:
            raise Unavailable(f"{self.source.text}/{file.path} came in part")

    def local(self, file: ListedFile) -> Path | None:
        """Returns the file in the library's cache on this machine, if it is there."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.source.place, file.path, revision=self.commit)
        return Path(found).resolve() if isinstance(found, str) else None


def _list_cache(source: ModelSource) -> SourceListing:
    """Returns what the library's cache has of a repository.

    Raises:
        Unavailable: It has nothing of the revision.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(source.place, revision=source.revision or None, local_files_only=True)
        )
    except IncompleteSnapshotError as partly:
        folder = Path(partly.snapshot_path)
    except (LocalEntryNotFoundError, ValueError) as error:
        asked = f"@{source.revision}" if source.revision else ""
        raise Unavailable(
            f"{source.text}{asked} is neither in the repository nor in the cache of this machine,"
            " and HF_HUB_OFFLINE forbids to ask the hub"
        ) from error
    files: list[ListedFile] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and len(files) <= MOST_FILES:
            # A blob kept for a large file is named by its digest.
            blob = path.resolve().name
            digest = blob if len(blob) == _SHA256_DIGITS else ""
            name = path.relative_to(folder).as_posix()
            files.append(ListedFile(name, path.stat().st_size, sha256=digest))
    transport = HubTransport(source, folder.name, HubAccess())
    return SourceListing(source, folder.name, tuple(files), transport)


@contextmanager
def _told(source: ModelSource, path: str = "") -> Iterator[None]:
    """Turns failures of the library into errors of one sentence."""
    from huggingface_hub import errors

    what = f"{source.text}/{path}" if path else source.text
    asked = f"@{source.revision}" if source.revision else ""
    try:
        yield
    except CatenaryError:
        raise
    except errors.GatedRepoError as error:
        raise PermissionDenied(
            f"{what} is for those who accepted its terms: accept them on the hub, and give a token"
            " (HF_TOKEN, --hub-token)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidInput("source", f"{source.text} has no revision {asked[1:]!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise PermissionDenied(
            f"{what} does not exist, or needs a token that was not given or is not good for it"
            " (HF_TOKEN, --hub-token)"
        ) from error
    except errors.EntryNotFoundError as error:
        raise InvalidInput("file", f"{what} does not exist") from error
    except errors.HFValidationError as error:
        raise InvalidInput("source", f"{source.text} is no name of a repository") from error
    except errors.HfHubHTTPError as error:
        raise _refused(what, error) from error
    except ValueError as error:  # a file too large for HTTP, or an answer that is none
        raise NotSupported(f"{what} cannot be fetched: {_line(error)}") from error
    except OSError as error:  # no room, or fewer bytes than there should be
        raise Unavailable(f"{what} did not come: {error.strerror or _line(error)}") from error
    except Exception as error:
        # Failures of connections are of the HTTP library, which is the hub library's own affair.
        if not type(error).__module__.startswith(("httpx", "httpcore")):
            raise
        raise Unavailable(
            f"{what} did not come: the hub does not answer ({_line(error) or type(error).__name__})"
        ) from error


def _refused(what: str, error: Any) -> CatenaryError:
    status = error.response.status_code
    if status in (401, 403):
        return PermissionDenied(
            f"{what} is not given to this token ({status}): HF_TOKEN or --hub-token names another"
        )
    return Unavailable(f"{what} did not come: the hub answers {status}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
