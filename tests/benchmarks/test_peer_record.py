"""Rounds over servers and the record of them: with small servers of the test's own as peers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from benchmarks.peers import checks, servers
from benchmarks.peers.__main__ import NOT_MADE, comparison_of
from benchmarks.peers.load import Outcome
from benchmarks.peers.measuring import Options, count_for, measure, orders
from benchmarks.peers.processes import ServerProcesses, environment_for
from benchmarks.peers.record import Cell, Comparison, PeerFacts, Settings, document_of, save
from benchmarks.peers.record import comparison_of as read
from benchmarks.peers.requests import plain_bytes
from benchmarks.peers.servers import PEERS, Command, Peer, Site
from benchmarks.peers.summary import failures, printed, targets
from benchmarks.peers.workloads import Workload
from catenary_lab.scenarios.record import sealed
from docs_build.peers import PeersPage

MADE = {"commit": "0" * 40, "date": "2026-11-26", "machine": "a test", "from": "the run"}
SERVER = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        answer = body if sys.argv[2] == "right" else body[::-1]
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *words):
        pass
# A process that outlives its parent, as some servers have them.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def peer(kind: str) -> Peer:
    def start(site: Site, _environment: Path) -> Command:
        site.write("server.py", SERVER)
        words = [sys.executable, str(site.folder / "server.py"), str(site.ports["http"]), kind]
        return Command(words, environment_for(site.folder))

    return Peer(kind.title(), "", {"http": plain_bytes}, start)


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workload:
    """A model whose answer is its input, and two servers of it: a right one and a wrong one."""
    monkeypatch.setitem(PEERS, "right", peer("right"))
    monkeypatch.setitem(PEERS, "wrong", peer("wrong"))
    row = np.arange(8, dtype=np.float32).reshape(1, 8)
    return Workload("tiny", tmp_path / "model.onnx", "x", "y", row, row, 0.1)


def options(*peers: str, rounds: int = 2) -> Options:
    connections = {"tiny": (1, 3)}
    return Options(peers, rounds, 7, 0.1, {"grpc": "player", "http": "player"}, connections)


def marked_processes() -> list[int]:
    marks = {each.pid: servers_mark(each.pid) for each in psutil.process_iter()}
    return [pid for pid, marked in marks.items() if marked]


def servers_mark(pid: int) -> bool:
    try:
        return b"CATENARY_PEER=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_rounds_measure_every_cell_and_end_every_process(echo: Workload, tmp_path: Path) -> None:
    before = set(marked_processes())
    said: list[str] = []
    found = measure(options("right"), tmp_path, [echo], said.append)
    cells = list(found.all_cells())
    assert [cell.connections for cell in cells] == [1, 3]
    for cell in cells:
        assert cell.key == ("tiny", "http", cell.connections)
        assert cell.failed == (0, 0)
        assert min(cell.answers) >= 20
        assert all(count % cell.connections == 0 for count in cell.answers)
        assert min(*cell.rates, *cell.p50_ms, *cell.cpu_ms) > 0
        assert all(p50 <= p99 for p50, p99 in zip(cell.p50_ms, cell.p99_ms, strict=True))
    assert len(found.memory_mb["right"]) == 2
    assert min(found.memory_mb["right"]) > 10, "two processes of Python"
    assert found.forms == {"right": {"http": "bytes"}}
    assert set(marked_processes()) <= before
    assert said == ["round 1: Right", "round 2: Right"]


def test_a_wrong_answer_leaves_a_server_out_and_the_others_in(
    echo: Workload, tmp_path: Path
) -> None:
    chosen = options("right", "wrong", rounds=1)
    found = measure(chosen, tmp_path, [echo], lambda _line: None)
    compared = comparison_of(found, chosen, [echo], ["right", "wrong", "triton"], MADE, whole=False)
    assert {cell.peer for cell in compared.cells} == {"right"}
    assert compared.peers["wrong"].left_out == "tiny over http is not what ONNX Runtime answers"
    assert compared.peers["triton"].left_out == NOT_MADE
    assert compared.settings.quick


def test_a_server_that_does_not_start_says_why(tmp_path: Path, echo: Workload) -> None:
    words = [sys.executable, "-c", "raise SystemExit('no such model')"]
    processes = ServerProcesses(words, environment_for(tmp_path), tmp_path / "log")
    with pytest.raises(checks.NotServingError, match=r"(?s)refused.*no such model"):
        checks.answer_bytes(processes, "http", servers.free_port(), echo, plain_bytes(echo))
    processes.stop()


def test_a_server_whose_program_is_missing_is_left_out(
    echo: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(site: Site, _environment: Path) -> Command:
        return Command([str(tmp_path / "missing")], environment_for(site.folder))

    monkeypatch.setitem(PEERS, "wrong", Peer("Wrong", "", {"http": plain_bytes}, start))
    found = measure(options("wrong", "right", rounds=2), tmp_path, [echo], lambda _line: None)
    assert list(found.failures) == ["wrong"]
    assert "cannot be started" in found.failures["wrong"]
    assert len(found.memory_mb["right"]) == 2


def test_orders_are_the_seeds_and_hold_every_server() -> None:
    names = list(PEERS)
    assert orders(names, 3, 1) == orders(names, 3, 1)
    assert orders(names, 3, 1) != orders(names, 3, 2)
    assert all(sorted(order) == sorted(names) for order in orders(names, 5, 1))
    assert len({tuple(order) for order in orders(names, 5, 1)}) > 1


def test_a_load_has_as_many_requests_for_each_connection() -> None:
    outcome = Outcome(100, 0, 0.5, 1.0, 2.0)
    assert count_for(outcome, 16, 1.0) == 192, "200 at this rate, 12 for each"
    assert count_for(outcome, 1, 0.01) == 20, "the fewest"
    assert count_for(outcome, 64, 0.01) == 64


def cell(peer: str, model: str, protocol: str, connections: int, rate: float) -> Cell:
    rates = (rate * 0.9, rate, rate * 1.1)
    times = (1e3 / rate,) * 3
    return Cell(
        peer,
        model,
        protocol,
        connections,
        (100,) * 3,
        (0, 1, 0),
        rates,
        times,
        times,
        times,  # type: ignore[arg-type]
    )


@pytest.fixture
def comparison() -> Comparison:
    """Triton at 1000 a second everywhere, we at 850, KServe at 900 with one connection."""
    facts = {
        "catenary": PeerFacts(
            "Catenary", "this commit", "", {"http": "OIP"}, (200.0, 300.0, 240.0)
        ),
        "triton": PeerFacts("Triton", "nvidia-pytriton 0.7.0"),
        "kserve": PeerFacts("KServe", "kserve 0.21.0"),
        "ray": PeerFacts("Ray Serve", "", NOT_MADE),
    }
    cells = [
        cell(name, model, "http", connections, rate)
        for name, rate in (("catenary", 850.0), ("triton", 1000.0))
        for model, connections in (("tiny", 1), ("tiny", 16), ("efficientnet-lite0", 4))
    ]
    cells.append(cell("kserve", "tiny", "http", 1, 900.0))
    settings = Settings(3, 1, 1.25, False, True, {"grpc": "h2load", "http": "h2load"})
    direct_ms = {"tiny": 0.02, "efficientnet-lite0": 13.0}
    return Comparison(facts, direct_ms, tuple(cells), settings, dict(MADE))


def test_a_record_is_read_as_it_was_written(comparison: Comparison, tmp_path: Path) -> None:
    save(comparison, tmp_path / "peers.json")
    document = json.loads((tmp_path / "peers.json").read_text())
    assert sealed(document) == document == document_of(comparison)
    again = read(document)
    assert again.cells == comparison.cells
    assert again.peers == comparison.peers


@pytest.mark.parametrize("field", ["cells", "settings", "peers", "direct_ms", "made"])
def test_a_record_without_a_field_is_refused(field: str, comparison: Comparison) -> None:
    document = document_of(comparison)
    del document[field]
    with pytest.raises(msgspec.ValidationError, match=field):
        read(document)


def test_a_record_with_something_unknown_is_refused(comparison: Comparison) -> None:
    document = document_of(comparison)
    document["cells"][0]["luck"] = 1
    with pytest.raises(msgspec.ValidationError, match="luck"):
        read(document)


def test_targets_are_ratios_of_medians_beside_their_limits(comparison: Comparison) -> None:
    found = {
        figure["name"]: (round(figure["value"], 3), figure["ok"]) for figure in targets(comparison)
    }
    assert found == {
        "tiny, HTTP, 16 in flight: rate over Triton's": (0.85, True),
        "efficientnet-lite0, HTTP, 4 in flight: rate over Triton's": (0.85, False),
        "tiny, HTTP, 1 in flight: p50": (1.176, True),
        "tiny: rate over the fastest Python server's, worst cell": (0.944, False),
        "memory of a cluster with one agent and all models": (240.0, True),
    }


def test_the_page_has_ratios_gaps_and_reasons(comparison: Comparison) -> None:
    page = PeersPage(document_of(comparison))
    rates = page.rates("tiny").splitlines()
    assert rates[0] == "| server |  | 1 in flight | 16 in flight |"
    assert rates[2] == "| Catenary | HTTP | 850 (0.85) | 850 (0.85) |"
    assert rates[3] == "| Triton | HTTP | 1,000 | 1,000 |"
    assert rates[4] == "| KServe | HTTP | 900 (0.90) | - |"
    assert page.latencies("tiny").splitlines()[3] == "| Triton | HTTP | 1.00 / 1.00 | 1.00 / 1.00 |"
    assert f"| Ray Serve | - | {NOT_MADE} | - |" in page.servers
    assert "3 rounds of 1.25 s by h2load, seed 1; Catenary compiled" in page.how
    assert failures(comparison) == {"Catenary": 3, "Triton": 3, "KServe": 1}
    assert "20% of it apart" in page.how


def test_what_is_left_out_of_a_round_does_not_break_the_tables(comparison: Comparison) -> None:
    empty = msgspec.structs.replace(comparison, cells=())
    assert [figure["unit"] for figure in targets(empty)] == ["MB"]
    assert "tiny: 0.02 ms of ONNX Runtime" in printed(empty)
