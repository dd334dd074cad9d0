"""A mirror of a hub in this process: plain HTTP with the hub's layout, which can misbehave."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".onnx", ".data")
"""Files with these endings are kept as a hub keeps large ones: known by their SHA-256."""
_PIECE = 64 << 10
_LONGEST_STALL_S = 120.0


@dataclass(frozen=True, slots=True)
class MirrorRequest:
    """A request that the mirror saw."""

    path: str
    range: str
    authorization: str


@dataclass
class ModelMirror:
    """What the mirror has, whom it gives it to, and how it misbehaves."""

    url: str = ""
    token: str = ""
    """Asked of everybody; empty: of nobody."""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Files by commit, by repository."""
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    breaks: dict[str, list[int]] = field(default_factory=dict)
    """After how many bytes the next answers about a file break off."""
    down: set[str] = field(default_factory=set)
    """Files that are answered with 503."""
    stalls: set[str] = field(default_factory=set)
    """Files of which an answer that breaks off says nothing before, until `released` is set."""
    released: threading.Event = field(default_factory=threading.Event)
    altered: dict[str, bytes] = field(default_factory=dict)
    """What is sent in place of files, whatever the listing says of them."""
    requests: list[MirrorRequest] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of each file that were sent."""

    def add(self, repository: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit to a branch of a repository and returns it."""
        text = json.dumps(
            {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
        )
        commit = hashlib.sha1(f"{repository}{branch}{text}".encode()).hexdigest()
        self.commits.setdefault(repository, {})[commit] = dict(files)
        self.branches.setdefault(repository, {})[branch] = commit
        return commit

    def add_folder(self, repository: str, folder: Path) -> str:
        """Adds the files of a folder as the main branch of a repository."""
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): path.read_bytes() for path in found}
        return self.add(repository, files)

    def of(self, name: str) -> list[MirrorRequest]:
        """Returns the requests about a file."""
        return [each for each in self.requests if each.path.endswith(f"/{name}")]


@contextmanager
def model_mirror() -> Iterator[ModelMirror]:
    """Serves a mirror on a free port of this machine."""
    mirror = ModelMirror()

    class Handler(_MirrorHandler):
        served = mirror

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _MirrorHandler(BaseHTTPRequestHandler):
    served: ClassVar[ModelMirror]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        mirror, path = self.served, unquote(urlsplit(self.path).path)
        sent = self.headers.get("Authorization") or ""
        mirror.requests.append(MirrorRequest(path, self.headers.get("Range") or "", sent))
        if mirror.token and sent != f"Bearer {mirror.token}":
            why = "Invalid credentials in Authorization header" if sent else "Invalid username"
            self._refuse(401, "" if sent else "RepoNotFound", why)
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body=body)
        else:
            self._refuse(404, "", "no such page")

    def _commit(self, repository: str, revision: str) -> str | None:
        branches = self.served.branches.get(repository, {})
        commit = branches.get(revision, revision)
        return commit if commit in self.served.commits.get(repository, {}) else None

    def _list(self, repository: str, revision: str) -> None:
        if repository not in self.served.commits:
            self._refuse(404, "RepoNotFound", "Repository not found")
            return
        commit = self._commit(repository, revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = self.served.commits[repository][commit]
        siblings = [_sibling(name, content) for name, content in files.items()]
        page = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
        self._send(200, json.dumps(page).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, revision: str, name: str, *, body: bool) -> None:
        mirror, commit = self.served, self._commit(repository, revision)
        if commit is None or name not in mirror.commits[repository][commit]:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        if name in mirror.down:
            self._refuse(503, "", "busy")
            return
        content = mirror.altered.get(name, mirror.commits[repository][commit][name])
        begin, last = 0, len(content)
        if wanted := self.headers.get("Range"):
            first, _, end_of_range = wanted.removeprefix("bytes=").partition("-")
            begin = int(first)
            last = min(last, int(end_of_range) + 1) if end_of_range else last
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        if wanted:
            headers["Content-Range"] = f"bytes {begin}-{last - 1}/{len(content)}"
        end = last
        if body and mirror.breaks.get(name):
            end = min(end, begin + mirror.breaks[name].pop(0))
        self.send_response(206 if wanted else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(last - begin))
        self.end_headers()
        if not body:
            return
        for start in range(begin, end, _PIECE):
            piece = content[start : min(end, start + _PIECE)]
            self.wfile.write(piece)
            mirror.sent[name] += len(piece)
        if end < last:
            if name in mirror.stalls:
                mirror.released.wait(_LONGEST_STALL_S)
            self.close_connection = True

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send(status, b"{}", headers | {"X-Error-Message": message})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _sibling(name: str, content: bytes) -> dict[str, object]:
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    found: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git}
    if name.endswith(LARGE):
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 134}
    return found
