"""What a file of a stranger's cannot do, even where it has come to run code: the jail holds it.

Each attempt is made by `hostile.hostile_work` inside of a real jail on this machine.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from catenary_services.errors import InternalError, InvalidInput, NotSupported
from catenary_services.jail import landlock
from catenary_services.jail.orders import JailLimit, JailLimits, JailProtection
from catenary_services.jail.protections import is_root, offered
from catenary_services.jail.run import JailedWork, run_jailed

SMALL = JailLimits(
    wall_clock_s=20,
    cpu_s=10,
    memory_bytes=1 << 30,
    file_bytes=1 << 20,
    folder_bytes=4 << 20,
    files=8,
    printed_bytes=1 << 20,
    result_bytes=1 << 16,
)
needs_landlock = pytest.mark.skipif(
    JailProtection.LANDLOCK not in offered(), reason="the kernel has no Landlock"
)
needs_seccomp = pytest.mark.skipif(
    JailProtection.SECCOMP not in offered(), reason="the kernel has no seccomp"
)


def attempt(code: str, *inputs: Path, limits: JailLimits = SMALL) -> str:
    """Returns what an expression comes to in the jail."""
    work = JailedWork(
        "hostile.hostile_work:attempts", code.encode(), "evil", inputs=inputs, limits=limits
    )
    return run_jailed(work).decode()


def stay(code: str, into: Path | None = None, limits: JailLimits = SMALL) -> bytes:
    """Runs statements in the jail."""
    work = JailedWork(
        "hostile.hostile_work:runs", code.encode(), "evil", wanted=("*.bin",), limits=limits
    )
    return run_jailed(work, into)


def test_work_is_done_and_its_files_are_taken_over(tmp_path: Path) -> None:
    assert stay("(room.output / 'a.bin').write_bytes(b'x' * 10)", tmp_path) == b"done"
    made = tmp_path / "a.bin"
    status = made.stat()
    assert (made.read_bytes(), status.st_mode & 0o7777) == (b"x" * 10, 0o644)
    assert (status.st_uid, status.st_nlink) == (os.geteuid(), 1)
    assert list(tmp_path.iterdir()) == [made]


NETWORK = {
    "a connection": "socket.create_connection(('127.0.0.1', {port}), 1)",
    "a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a local socket": "socket.socket(socket.AF_UNIX)",
    "a pair of sockets": "socket.socketpair()",
    "the kernel's own": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
}


@needs_seccomp
@pytest.mark.parametrize("way", NETWORK)
def test_there_is_no_network(way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert attempt(NETWORK[way].format(port=port)).startswith("refused PermissionError")


@needs_landlock
@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/hostname", "/proc/1/environ", "/proc/kmsg"])
def test_files_of_the_host_cannot_be_read(path: str) -> None:
    assert attempt(f"open({path!r}).read()").startswith("refused")


@needs_landlock
def test_keys_and_other_models_cannot_be_read(tmp_path: Path) -> None:
    mine, key = tmp_path / "mine" / "model.bin", tmp_path / "keys" / "key.pem"
    for file in (mine, key):
        file.parent.mkdir()
        file.write_text("secret")
        file.chmod(0o644)  # only the jail keeps it
    (mine.parent / "link").symlink_to(key)
    assert attempt("room.inputs[0].read_text()", mine) == "did 'secret'"
    assert attempt(f"Path({str(key)!r}).read_text()", mine).startswith("refused")
    assert attempt("(room.inputs[0] / 'link').read_text()", mine.parent).startswith("refused")
    assert attempt("list((room.inputs[0] / '..').iterdir())", mine.parent).startswith("refused")


def test_there_are_no_secrets_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_API_KEY", "sk-secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sk-secret")
    assert "sk-secret" not in attempt("dict(os.environ)")
    assert "sk-secret" not in attempt("Path('/proc/self/environ').read_text()")


def test_open_files_are_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    with (tmp_path / "secret").open() as secret:
        os.set_inheritable(secret.fileno(), True)
        found = attempt(
            "[os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')"
            " if os.path.exists(f'/proc/self/fd/{n}')]"
        )
    assert found.startswith("did")
    assert "secret" not in found


OUTSIDE = {
    "a file": "open({path!r}, 'w')",
    "through a descriptor": "os.open({path!r}, os.O_CREAT | os.O_WRONLY)",
    "a folder": "os.mkdir({path!r})",
    "a device": "os.mknod('x', 0o600 | 0o020000, os.makedev(1, 1))",
    "a hard link": "os.link('/etc/passwd', 'x')",
    "a symbolic link": "os.symlink('/etc/passwd', 'x')",
    "shorter": "os.truncate({there!r}, 0)",
    "gone": "os.unlink({there!r})",
    "elsewhere": "os.rename({there!r}, {path!r})",
    "another root": "os.chroot('.')",
    "memory of others": "open('/dev/mem', 'r+b')",
    "shared memory": "open('/dev/shm/x', 'w')",
}


@needs_landlock
@needs_seccomp
@pytest.mark.parametrize("what", OUTSIDE)
def test_nothing_is_written_outside(what: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("kept")
    tmp_path.chmod(0o777)
    code = OUTSIDE[what].format(path=str(tmp_path / "new"), there=str(there))
    assert attempt(code).startswith("refused")
    assert [*tmp_path.iterdir()] == [there]
    assert there.read_text() == "kept"


@needs_landlock
def test_a_mutable_map_of_a_file_cannot_write_outside(tmp_path: Path) -> None:
    """What `aten.from_file(shared=True)` did: the way in of finding A1, with the vetting gone."""
    torch = pytest.importorskip("torch")
    target = tmp_path / "cron"
    target.write_bytes(bytes(8))
    target.chmod(0o666)
    tmp_path.chmod(0o777)
    for shared in (True, False):
        code = f"import torch; torch.from_file({str(target)!r}, {shared}, 2).fill_(1.0)"
        with pytest.raises(InternalError, match=r"unable to open file|Permission denied"):
            run_jailed(
                JailedWork("hostile.hostile_work:runs", code.encode(), "evil", imports=("torch",))
            )
    assert target.read_bytes() == bytes(8)
    assert torch.from_file(str(target), True, 2).fill_(1.0).sum() == 2  # outside it would


PROCESSES = {
    "fork": "os.fork()",
    "exec": "os.execv('/bin/true', ['true'])",
    "a command": "subprocess.run(['/bin/true'])",
    "a shell": "os.posix_spawn('/bin/true', ['true'], {})",
    "a signal to its parent": "os.kill(os.getppid(), 0)",
    "a signal to everybody": "os.kill(-1, 9)",
    "a signal by descriptor": "os.pidfd_open(os.getppid())",
    "limits of its parent": "__import__('resource').prlimit(os.getppid(), 9)",
    "another user": "os.setuid(0)",
}


@needs_seccomp
@pytest.mark.parametrize("way", PROCESSES)
def test_other_processes_are_out_of_reach(way: str) -> None:
    if way == "another user" and not is_root():
        pytest.skip("it would be its own user")
    assert attempt(PROCESSES[way]).startswith("refused PermissionError")


SYSTEM_CALLS = {
    "ptrace": 101,
    "process_vm_readv": 310,
    "mount": 165,
    "unshare": 272,
    "keyctl": 250,
    "bpf": 321,
    "io_uring_setup": 425,
    "memfd_create": 319,
    "userfaultfd": 323,
    "perf_event_open": 298,
    "open_by_handle_at": 304,
    "shmget": 29,
    "x32 getpid": 0x40000000 + 39,
}


@needs_seccomp
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are of x86_64")
@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_system_calls_that_no_reader_needs_are_refused(name: str) -> None:
    code = f"(libc.syscall({SYSTEM_CALLS[name]}, 0, 0, 0, 0, 0), ctypes.get_errno())"
    assert attempt(code) == "did (-1, 1)"


@pytest.mark.skipif(not is_root(), reason="only root becomes others")
def test_it_is_a_user_that_owns_nothing() -> None:
    first, second = (int(attempt("os.getuid()").split()[1]) for _ in range(2))
    assert min(first, second) > 60_000
    assert first != second
    assert attempt("os.getresgid() == (os.getgid(),) * 3 and os.getgroups() == []") == "did True"
    assert "setcap" not in attempt("Path('/proc/self/status').read_text()")


# What never ends, or wants too much, is ended: each within its wall clock, with the reason.

ENDLESS = {
    "spins": ("while True: pass", JailLimit.CPU_TIME),
    "sleeps": ("__import__('time').sleep(1000)", JailLimit.WALL_CLOCK),
    "ignores the processor's limit": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        JailLimit.CPU_TIME,
    ),
    "allocates 100 GB": ("bytearray(100 << 30)", JailLimit.MEMORY),
    "allocates bit by bit": ("a = []\nwhile True: a.append(bytearray(1 << 24))", JailLimit.MEMORY),
    "prints for ever": ("while True: print('x' * 10000)", JailLimit.OUTPUT),
    "warns for ever": ("while True: os.write(2, b'x' * 10000)", JailLimit.OUTPUT),
    "answers for ever": (
        "while True: os.write(int(__import__('sys').argv[1]), b'x' * 10000)",
        JailLimit.RESULT,
    ),
    "writes many files": (
        "for n in range(1000): (room.output / f'{n}.bin').write_bytes(bytes(1 << 19))",
        JailLimit.FILES,
    ),
    "writes empty files": (
        "for n in range(1000): (room.output / f'{n}.bin').touch()",
        JailLimit.FILES,
    ),
    "fills its scratch": (
        "n = 0\nwhile True:\n n += 1\n (room.scratch / str(n)).write_bytes(bytes(1 << 19))",
        JailLimit.FILES,
    ),
    "crashes": ("ctypes.string_at(0)", JailLimit.CRASH),
    "aborts": ("os.abort()", JailLimit.CRASH),
}


@pytest.mark.parametrize("way", ENDLESS)
def test_what_does_not_end_is_ended_with_the_reason(way: str, tmp_path: Path) -> None:
    code, limit = ENDLESS[way]
    limits = SMALL
    if limit is JailLimit.WALL_CLOCK:
        limits = JailLimits(wall_clock_s=1)
    if limit is JailLimit.CPU_TIME:
        limits = JailLimits(cpu_s=1, wall_clock_s=120)
    started = time.monotonic()
    with pytest.raises(InvalidInput, match=r"^evil") as caught:
        stay(code, tmp_path, limits)
    assert caught.value.details["limit"] == limit
    assert time.monotonic() - started < limits.wall_clock_s + 30
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_grows_too_long_is_an_error_of_its_writer(tmp_path: Path) -> None:
    code = "(room.output / 'a.bin').write_bytes(bytes(2 << 20))"
    with pytest.raises(InternalError, match="File too large"):
        stay(code, tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_seccomp
def test_a_fork_bomb_is_none(tmp_path: Path) -> None:
    code = "while True:\n try: os.fork()\n except OSError: break"
    assert stay(code, tmp_path) == b"done"


def test_threads_are_limited_where_the_user_is_its_own() -> None:
    if not is_root():
        pytest.skip("others' threads count as well")
    code = (
        "[threading.Thread(target=threading.Event().wait, daemon=True).start()"
        " for _ in range(2000)]"
    )
    with pytest.raises(InternalError, match="can't start new thread"):
        attempt(code)


# What it leaves is looked at before anybody takes it.

LEFT = {
    "another name": "(room.output / 'a.txt').touch()",
    "a hidden name": "(room.output / '.a.bin').touch()",
    "a name with a line break": "(room.output / 'a\\nb.bin').touch()",
    "a pipe": "os.mkfifo(room.output / 'a.bin')",
    "a deep folder": "(room.output / 'a/b/c/d/e/f').mkdir(parents=True);"
    " (room.output / 'a/b/c/d/e/f/g.bin').touch()",
    "a sparse giant": "open(room.output / 'a.bin', 'wb').truncate(1 << 19);"
    " [open(room.output / f'{n}.bin', 'wb') for n in range(9)]",
}


@pytest.mark.parametrize("what", LEFT)
def test_only_plain_files_of_wanted_names_are_taken(what: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidInput, InternalError)) as caught:
        stay(LEFT[what], tmp_path)
    assert list(tmp_path.iterdir()) == []
    if isinstance(caught.value, InvalidInput):
        assert caught.value.details["limit"] == JailLimit.FILES


def test_an_answer_that_is_none_is_no_answer() -> None:
    with pytest.raises(InternalError, match="exit code 0"):
        stay(
            "os.write(int(__import__('sys').argv[1]), b'{\"type\":\"answer\"}\\n' + b'nonsense\\n'); os._exit(0)"
        )


def test_errors_of_our_tree_come_back_as_they_are() -> None:
    code = "from catenary_services.errors import NotSupported; raise NotSupported('no such thing')"
    with pytest.raises(NotSupported, match="no such thing"):
        stay(code)
    with pytest.raises(InvalidInput) as caught:
        stay(
            "from catenary_services.errors import InvalidInput; raise InvalidInput('x', 'is wrong')"
        )
    assert (caught.value.field, caught.value.message) == ("x", "x: is wrong")


def test_a_panic_of_a_binding_is_an_error() -> None:
    """`tokenizers` raises panics that are no `Exception`."""
    with pytest.raises(InternalError, match="BaseException: panic"):
        stay("raise BaseException('panic')")


@needs_seccomp
def test_no_process_is_left(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        stay("__import__('time').sleep(1000)", tmp_path, JailLimits(wall_clock_s=0.5))
    left = []
    for entry in Path("/proc").iterdir():
        # Processes of others may end while they are looked at.
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and b"catenary_services.jail.child" in (entry / "cmdline").read_bytes()
                and f"\nPPid:\t{os.getpid()}\n" in (entry / "status").read_text()
            ):
                left.append(entry)
    assert left == []


def test_what_is_missing_is_known() -> None:
    assert JailProtection.RESOURCE_LIMITS in offered()
    assert (JailProtection.LANDLOCK in offered()) == (landlock.version() > 0)
