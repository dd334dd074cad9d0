"""A real cluster with mutual TLS inside: it serves, rotates while it serves, and keeps others out."""

from __future__ import annotations

import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest

import catenary
import figures
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.security.authority import CertificateAuthority
from cluster_harness import MODEL, RunningCluster, running_cluster, wait_until
from fault_cluster import install_images
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

CHAT = "smollm2-135m"
OVER_TCP = {"gateway": {"transports": ["tcp"]}, "agent": {"transports": ["tcp"]}}
PROMPT = "Once upon a time"
PAIRS = 150
MOST_COST = 1.3
"""A request under mutual TLS takes at most so many times as long as without, over TCP."""
EXPIRY = "catenary_certificate_expiry_seconds"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tls") / "models"
    install_images(root)
    install(root)
    return root


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[RunningCluster]:
    """A cluster that the tests here share: what each does to it, the others stand."""
    folder = tmp_path_factory.mktemp("rotating")
    (folder / "models").symlink_to(models)
    with running_cluster(
        folder, models=(MODEL, CHAT), agents=2, config=OVER_TCP, tls=True
    ) as running:
        yield running


@dataclass
class Load:
    """Infers and chats again and again until it is told to stop."""

    cluster: RunningCluster
    done: dict[str, int] = field(default_factory=lambda: {"infer": 0, "chat": 0})
    problems: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self.threads = [threading.Thread(target=self._run, args=(k,)) for k in self.done]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)

    def _run(self, kind: str) -> None:
        with catenary.Client(self.cluster.grpc, timeout_s=60) as client:
            while not self.stop.is_set():
                try:
                    infer(client) if kind == "infer" else chat(client)
                except catenary.CatenaryError as error:
                    self.problems.append(f"{kind}: {error}")
                self.done[kind] += 1

    def more(self, count: int = 3) -> None:
        """Waits until so many more requests of each kind were answered."""
        wanted = {kind: number + count for kind, number in self.done.items()}
        wait_until(lambda: all(self.done[k] >= wanted[k] for k in wanted), 120, "more answers")


def infer(client: catenary.Client) -> None:
    name = client.model_metadata(MODEL).inputs[0].name
    client.infer(MODEL, {name: np.zeros((1, 3, 224, 224), np.float32)}, slo_ms=20_000)


def chat(client: catenary.Client) -> None:
    answer = client.generate(CHAT, PROMPT, max_tokens=8, temperature=0.0)
    assert answer.text


def drain(cluster: RunningCluster, folder: Path, who: str, key: str = "") -> str:
    """Returns the status of an order to drain an agent that is not there, at the scheduler."""
    credentials = grpc.ssl_channel_credentials(
        (folder / "ca.pem").read_bytes(),
        (folder / f"{who}-key.pem").read_bytes(),
        (folder / f"{who}.pem").read_bytes(),
    )
    options = [("grpc.ssl_target_name_override", "scheduler.main.catenary.internal")]
    target = f"127.0.0.1:{cluster.scheduler_port()}"
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    with grpc.secure_channel(target, credentials, options) as channel:
        try:
            admin_pb2_grpc.AdminStub(channel).DrainAgent(
                admin_pb2.DrainAgentRequest(agent_id="agent-9"), metadata=metadata, timeout=10
            )
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def seconds_left(cluster: RunningCluster) -> float:
    with urllib.request.urlopen(str(cluster.facts["metrics"])) as page:
        lines = page.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{EXPIRY} ")))


def taken_up(cluster: RunningCluster, times: int) -> bool:
    """Returns whether every process has taken changed files up so many times."""
    logs = [cluster.data_dir / "logs" / f"{name}.log" for name in cluster.facts["pids"]]
    return all(log.read_text().count("certificate_taken_up") >= times for log in logs)


def test_certificates_and_authority_rotate_while_the_cluster_serves(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    certs = cluster.data_dir / "certs"
    assert 29 * 86_400 < seconds_left(cluster) < 31 * 86_400
    old = tmp_path / "old"
    old.mkdir()
    for file in certs.iterdir():
        (old / file.name).write_bytes(file.read_bytes())
    authority = CertificateAuthority(certs, "main")
    with Load(cluster) as load:
        load.more()
        for number, step in enumerate(
            (authority.add_next, authority.use_next, authority.drop_others), 1
        ):
            step()
            took_s = wait_until(lambda n=number: taken_up(cluster, n), 20, "the files are read")
            load.more()
        problems = list(load.problems)
        # Who comes back has only the new ones to show, and finds the others by them. What was
        # under way on it may take longer than its deadline meanwhile.
        began = time.monotonic()
        cluster.kill("agent-1")
        load.more()
        back_s = time.monotonic() - began
    figures.report("mutual_tls", "changed files are taken up within", took_s, "s", "<= 10")
    figures.report("mutual_tls", "requests that failed while rotating", len(problems), "", "0")
    figures.report("mutual_tls", "answers after an agent came back within", back_s, "s")
    assert problems == []
    assert took_s <= 10
    assert drain(cluster, certs, "operator-local") == "INVALID_ARGUMENT"  # let in: no such agent
    assert drain(cluster, old, "operator-local") == "UNAVAILABLE"
    (old / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    assert drain(cluster, old, "operator-local") == "UNAVAILABLE"


def test_nobody_but_an_operator_changes_the_cluster(cluster: RunningCluster) -> None:
    certs = cluster.data_dir / "certs"
    key = (certs / "operator-api-key").read_text().strip()
    assert drain(cluster, certs, "operator-local") == "INVALID_ARGUMENT"
    assert drain(cluster, certs, "gateway-gateway-0") == "PERMISSION_DENIED"
    assert drain(cluster, certs, "gateway-gateway-0", key) == "INVALID_ARGUMENT"
    assert drain(cluster, certs, "agent-agent-0", key) == "PERMISSION_DENIED"
    assert drain(cluster, certs, "scheduler-scheduler-0") == "PERMISSION_DENIED"
    # The same through the gateway, as the `catenary` command does it.
    with grpc.insecure_channel(cluster.admin) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        assert len(stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10).agents) == 2
        with pytest.raises(grpc.RpcError) as refused:
            stub.Replan(admin_pb2.ReplanRequest(), timeout=10)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        metadata = (("authorization", f"Bearer {key}"),)
        assert stub.Replan(admin_pb2.ReplanRequest(), metadata=metadata, timeout=60).plan_id


def test_what_mutual_tls_costs_a_request(tmp_path: Path, models: Path) -> None:
    """Two clusters side by side take turns, so that whatever else runs here slows both alike."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        clients: dict[bool, catenary.Client] = {}
        for tls in took:
            folder = tmp_path / f"tls-{tls}"
            folder.mkdir()
            (folder / "models").symlink_to(models)
            running = stack.enter_context(
                running_cluster(folder, models=(MODEL,), agents=1, config=OVER_TCP, tls=tls)
            )
            clients[tls] = stack.enter_context(catenary.Client(running.grpc, timeout_s=60))
        for turn in range(PAIRS):
            for tls in (False, True) if turn % 2 else (True, False):
                began = time.perf_counter()
                infer(clients[tls])
                took[tls].append(time.perf_counter() - began)
    plain, mutual = (statistics.median(took[tls][10:]) for tls in (False, True))
    figures.report("mutual_tls", "request without TLS, over TCP", plain * 1e3, "ms")
    figures.report("mutual_tls", "request with mutual TLS, over TCP", mutual * 1e3, "ms")
    limit = f"<= {MOST_COST}"
    figures.report("mutual_tls", "times as long with mutual TLS", mutual / plain, "", limit)
    assert mutual / plain <= MOST_COST
