"""`catenaryd profile` as a user meets it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.domain.profile import parse_profile
from catenary_services.models.model_repository import ModelRepository
from catenaryd import command_line
from catenaryd.commands import profiling
from cluster_harness import ROOT, environment

KEY = ModelKey("small", "1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a model nobody has cut yet: eight matrix products."""
    repository = ModelRepository(tmp_path / "models")
    repository.write_manifest(ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 8, True))
    generator = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for i in range(8):
        array = generator.standard_normal((512, 512)).astype(np.float32) / 23
        weights.append(numpy_helper.from_array(array, f"w{i}"))
        out = "y" if i == 7 else f"h{i}"
        nodes += [
            helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"]),
            helper.make_node("Relu", [f"m{i}"], [out]),
        ]
        last = out
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 512])],
        weights,
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, repository.model_file(KEY))
    return repository.root


def command(root: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "catenaryd",
        "profile",
        "small",
        "--model-repository",
        str(root),
        "--blocks",
        "3",
        *arguments,
    ]


@dataclass(frozen=True)
class Done:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; only what it measures runs in others."""
    monkeypatch.setattr(profiling, "configure_logging", lambda *_: None)
    monkeypatch.setattr(profiling, "_warn_if_busy", lambda: None)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["catenaryd", *command(root, *arguments)[3:]])
        code = 0
        try:
            command_line.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, errors = capsys.readouterr()
        return Done(code, out, errors)

    return run


QUICK = ("--levels", "1,2", "--batches", "1", "--runs", "3")


def test_json_on_stdout_is_the_profile_and_nothing_else(root: Path, run: Run) -> None:
    done = run(*QUICK, "--estimate", "T4", "--json", "--device-class", "desk")
    assert done.returncode == 0, done.stderr
    profile = parse_profile(json.loads(done.stdout))
    assert [(d.identity, d.estimated) for d in profile.devices] == [
        (("T4", 1), True),
        (("T4", 2), True),
        (("desk", 1), False),
        (("desk", 2), False),
    ]
    assert profile == ModelRepository(root).profile(KEY)
    assert done.stderr == ""


def test_people_are_told_what_is_estimated(root: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "own.json"
    done = run("--no-measure", "--levels", "1", "--estimate", "L4", "--output", str(file))
    assert done.returncode == 0, done.stderr
    assert "L4 as 1 virtual GPU, ESTIMATED:" in done.stdout
    assert "roofline" not in done.stdout.partition("ESTIMATED")[0]
    assert str(file) in done.stdout
    assert json.loads(file.read_text())["devices"][0]["source"].startswith("roofline")
    assert ModelRepository(root).profile(KEY) is None


@pytest.mark.timeout(400)
def test_a_terminal_shows_progress(root: Path) -> None:
    ours, theirs = pty.openpty()
    # A terminal nobody reads is full after ten seconds of a progress bar.
    with ThreadPoolExecutor(1) as reading:
        shown = reading.submit(read_to_its_end, ours)
        try:
            done = subprocess.run(
                command(root, "--levels", "1", "--batches", "1", "--runs", "2", "--json"),
                stdout=subprocess.PIPE,
                stderr=theirs,
                env=environment(),
                cwd=ROOT,
                timeout=300,
                check=True,
            )
        finally:
            os.close(theirs)
        assert b"profiling small:1" in shown.result(30)
    os.close(ours)
    json.loads(done.stdout)


def read_to_its_end(terminal: int) -> bytes:
    shown = b""
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # the other end is closed: that is how a terminal ends
            return shown
        if not chunk:
            return shown
        shown += chunk


@pytest.mark.system
def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(root: Path, run: Run) -> None:
    partial = ModelRepository(root).folder(KEY) / "profile.json.partial"
    slow = ("--levels", "1,2", "--batches", "1,2,4", "--runs", "20", "--json")
    process = subprocess.Popen(
        command(root, *slow),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not partial.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    kept = next(iter(json.loads(partial.read_text())["measured"].values()))
    done = run(*slow)
    assert done.returncode == 0, done.stderr
    devices = parse_profile(json.loads(done.stdout)).devices
    assert not partial.exists()
    for step, (p50, _) in kept.items():
        level, block, rows = map(int, step.split("/"))
        device = next(each for each in devices if each.virtual_level == level)
        assert device.p50_ns[block][device.batch_sizes.index(rows)] == p50


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--levels", "1,x"), 2, "--levels"),
        (("--levels", "16"), 1, "virtual_level"),
        (("--device", "emulated:T4"), 1, "emulated"),
        (("--estimate", "K80"), 1, "K80"),
        (("--no-measure",), 1, "estimate"),
        (("--blocks", "0"), 1, "blocks"),
    ],
)
def test_wrong_usage_is_one_sentence(
    run: Run, arguments: tuple[str, ...], code: int, named: str
) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert named in done.stderr
    if code == 1:
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_busy_host_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load, warned in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        profiling._warn_if_busy()
        assert ("load 2.1 on 4 cores" in capsys.readouterr().err) == warned
