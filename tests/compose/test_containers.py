"""The compose cluster on a real engine, used from outside through the SDK, broken and scaled.

The tests run in this order on one cluster; each leaves it whole.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import numpy as np
import pytest

import catenary
import figures
from catenary_services.domain.ids import ModelKey
from catenaryd.demo.demo_models import preprocess, sample_photographs, top_k
from deployed.compose_harness import SECRETS, ComposeCluster, wait_until
from language_model import shared_models

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

VISION, TEXT = "efficientnet-lite0", "smollm2-135m"
CATS = {"tabby, tabby cat", "Egyptian cat", "tiger cat"}
QUESTION = "What does a catenary curve look like?"
TOKENS = 24
TAKEOVER_LIMIT_S = 3.0
RATE_PER_S = 4.0
LOAD_S, KILL_AFTER_S = 12.0, 3.0
SLO_MS = 60_000
"""Each agent has a part of the model that nobody else has: when it is killed, requests wait until the
plan was made anew without it and the part is loaded elsewhere."""


@pytest.fixture(scope="module")
def client(cluster: ComposeCluster) -> catenary.Client:
    return catenary.Client(**cluster.connection())


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return preprocess(sample_photographs()["chelsea"])


@pytest.fixture(scope="module")
def expected_text() -> str:
    """What `transformers.generate` answers to the question, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shared_models(TEXT).folder(ModelKey(TEXT, "1"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": QUESTION}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    ids = torch.tensor([tokens["input_ids"]])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LONG_TOKENS
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


LONG_TOKENS = 96
"""Of a stream that is under way while things break."""


@dataclass
class Answers:
    """What came of an open-loop load: class numbers, or the error's name."""

    seen: list[int | str] = field(default_factory=list)
    longest_s: float = 0.0


async def offered_load(cluster: ComposeCluster, image: np.ndarray, breaking: object) -> Answers:
    """Sends photographs at a steady rate; calls `breaking` in a thread on the way."""
    answers = Answers()
    async with catenary.AsyncClient(**cluster.connection("api_key")) as client:
        name = (await client.model_metadata(VISION)).inputs[0].name

        async def one() -> None:
            sent = time.monotonic()
            try:
                result = await client.infer(
                    VISION, {name: image}, slo_ms=SLO_MS, timeout_s=SLO_MS / 1000 + 5
                )
                logits = next(iter(result.outputs.values()))
                answers.seen.append(int(logits[0].argmax()))
            except catenary.CatenaryError as error:
                answers.seen.append(type(error).__name__)
            answers.longest_s = max(answers.longest_s, time.monotonic() - sent)

        start = time.monotonic()
        under_way = [asyncio.create_task(_after(KILL_AFTER_S, breaking))]
        for number in range(int(LOAD_S * RATE_PER_S)):
            await asyncio.sleep(max(0.0, start + number / RATE_PER_S - time.monotonic()))
            under_way.append(asyncio.create_task(one()))
        await asyncio.gather(*under_way)
    return answers


async def _after(seconds: float, breaking: object) -> None:
    await asyncio.sleep(seconds)
    assert callable(breaking)
    await asyncio.to_thread(breaking)


def ready_agents(client: catenary.Client) -> set[str]:
    return {each.agent_id for each in client.status().agents if each.state == "ready"}


def serving_agents(client: catenary.Client) -> set[str]:
    return {each.agent_id for each in client.status().agents if each.partitions}


def test_containers_are_well_and_confined(cluster: ComposeCluster, client: catenary.Client) -> None:
    running = [each for each in cluster.containers() if each["State"]["Running"]]
    services = [each["Config"]["Labels"]["com.docker.compose.service"] for each in running]
    assert sorted(services) == sorted(
        ["agent"] * 3 + ["authority", "collector", "gateway", "redis", "scheduler-0", "scheduler-1"]
    )
    users: dict[str, set[str]] = {}
    for each in running:
        host = each["HostConfig"]
        role = each["Config"]["Labels"]["com.docker.compose.service"].partition("-")[0]
        users.setdefault(role, set()).add(each["Config"]["User"])
        assert host["ReadonlyRootfs"], each["Name"]
        assert host["CapDrop"] == ["ALL"], each["Name"]
        assert host["Memory"] > 0, each["Name"]
    assert len(set.union(*users.values())) == len(users), users  # one each, and no two the same
    wait_until(
        lambda: all(
            _health(each) == "healthy" for each in cluster.containers() if each["State"]["Running"]
        ),
        90,
        "every container is healthy",
    )
    assert ready_agents(client) == {"agent-1", "agent-2", "agent-3"}


def _health(container: dict[str, object]) -> str:
    state = container["State"]
    assert isinstance(state, dict)
    return str(state["Health"]["Status"])


def test_a_photograph_is_recognised(
    cluster: ComposeCluster, client: catenary.Client, image: np.ndarray
) -> None:
    name = client.model_metadata(VISION).inputs[0].name
    result = client.infer(VISION, {name: image}, slo_ms=SLO_MS)
    logits = next(iter(result.outputs.values()))
    assert top_k(logits, 1)[0][1] in CATS


def test_a_chat_says_what_transformers_say(client: catenary.Client, expected_text: str) -> None:
    answer = client.chat(TEXT, QUESTION, max_tokens=TOKENS)
    assert answer.text
    assert expected_text.startswith(answer.text)


def test_http_endpoint_answers_with_the_same_key(cluster: ComposeCluster) -> None:
    context = ssl.create_default_context(cafile=SECRETS / "ca.pem")
    key = (SECRETS / "api_key").read_text().strip()
    request = urllib.request.Request(
        f"{cluster.http}/v1/models", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        models = {each["id"] for each in json.load(answer)["data"]}
    assert TEXT in models


def test_nothing_is_served_without_tls_or_to_who_shows_no_certificate(
    cluster: ComposeCluster,
) -> None:
    for port in ("CATENARY_HTTP_PORT", "CATENARY_GRPC_PORT", "CATENARY_ADMIN_PORT"):
        number = int(cluster.environment[port])
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(f"http://localhost:{number}/v1/models", timeout=10)
    strange = ssl.create_default_context()
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{cluster.http}/v1/models", context=strange, timeout=10)
    # Inside, at the scheduler: TLS without a certificate of the cluster ends before a byte is read.
    asks = (
        "import socket, ssl; c = ssl._create_unverified_context();"
        " s = c.wrap_socket(socket.create_connection(('scheduler-0', 8007), 10));"
        " s.sendall(b'C' * 32); print(s.recv(1) or 'nothing')"
    )
    container = cluster.container("gateway")
    said = subprocess.run(
        ["docker", "exec", container, "python", "-c", asks],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=cluster.environment,
    )
    assert "nothing" in said.stdout or "ALERT" in said.stderr or "reset" in said.stderr, said


@pytest.mark.parametrize("service", ["gateway", "scheduler-0", "agent", "redis", "authority"])
def test_a_container_cannot_write_its_root_file_system(
    cluster: ComposeCluster, service: str
) -> None:
    for folder in ("/", "/etc", "/usr/bin", "/catenary"):
        done = subprocess.run(
            ["docker", "exec", cluster.container(service), "touch", f"{folder}/x"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=cluster.environment,
        )
        assert done.returncode != 0
        assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr


def test_every_replica_has_a_key_of_its_own(cluster: ComposeCluster) -> None:
    holders = [("agent", n) for n in (1, 2, 3)] + [("gateway", 1), ("scheduler-0", 1)]
    keys = {
        cluster.docker("exec", cluster.container(*who), "cat", "/catenary/certs/tls.key")
        for who in holders
    }
    assert len(keys) == len(holders)


@pytest.mark.parametrize("key", ["ctn_wrong", None])
def test_a_wrong_key_or_none_is_refused(
    cluster: ComposeCluster, image: np.ndarray, key: str | None
) -> None:
    with catenary.Client(**{**cluster.connection(), "api_key": key}) as stranger:
        with pytest.raises(catenary.UnauthenticatedError):
            stranger.infer(VISION, {"image": image})
        with pytest.raises(catenary.UnauthenticatedError):
            stranger.status()


def test_a_key_for_inference_cannot_drain(cluster: ComposeCluster) -> None:
    with (
        catenary.Client(**cluster.connection("api_key")) as user,
        pytest.raises(catenary.PermissionDeniedError),
    ):
        user.drain("agent-1")


def test_a_key_of_an_operator_goes_as_far_as_the_scheduler(cluster: ComposeCluster) -> None:
    with (
        catenary.Client(**cluster.connection("admin_key")) as operator,
        pytest.raises(catenary.InvalidInputError, match="agent-99"),
    ):
        operator.drain("agent-99")  # let in; there is no such agent


def test_one_trace_spans_the_containers(
    cluster: ComposeCluster, client: catenary.Client, image: np.ndarray
) -> None:
    name = client.model_metadata(VISION).inputs[0].name
    client.infer(VISION, {name: image}, slo_ms=SLO_MS)
    client.chat(TEXT, QUESTION, max_tokens=8)

    def spanning() -> dict[str, set[str]]:
        places: dict[str, set[str]] = {}
        for span in cluster.spans():
            places.setdefault(span["trace"], set()).add(f"{span['service']} {span['instance']}")
        kinds = {"catenary-gateway", "catenary-scheduler", "catenary-agent"}
        return {
            trace: found
            for trace, found in places.items()
            if {each.partition(" ")[0] for each in found} >= kinds
        }

    wait_until(spanning, 30, "a trace with spans of gateway, scheduler and agents")
    most = max(spanning().values(), key=len)
    figures.report("compose trace", "containers in one trace", len(most), "", ">= 4")
    figures.report("compose trace", "which", ", ".join(sorted(most)))
    assert len(most) >= 4


async def test_an_agent_killed_under_load_loses_no_request(
    cluster: ComposeCluster, client: catenary.Client, image: np.ndarray
) -> None:
    victim = cluster.container("agent", 2)
    answers = await offered_load(
        cluster, image, lambda: cluster.docker("kill", "--signal", "KILL", victim)
    )
    wrong = [each for each in answers.seen if each != answers.seen[0]]
    figures.report("compose agent killed", "requests", len(answers.seen))
    figures.report("compose agent killed", "not answered rightly", len(wrong), "", "0")
    figures.report("compose agent killed", "errors", ", ".join(map(str, set(wrong))) or "none")
    figures.report("compose agent killed", "longest answer", answers.longest_s, "s")
    assert not wrong
    assert isinstance(answers.seen[0], int)
    cluster.docker("start", victim)
    took_s = await asyncio.to_thread(
        wait_until, lambda: "agent-2" in serving_agents(client), 90, "agent-2 serves again"
    )
    figures.report("compose agent killed", "back and loaded after its start", took_s, "s")


def test_a_standby_leads_when_the_leader_is_killed(
    cluster: ComposeCluster, client: catenary.Client, image: np.ndarray, expected_text: str
) -> None:
    before = client.status()
    victim = cluster.container(before.scheduler_id)
    name = client.model_metadata(VISION).inputs[0].name
    stream = client.chat(TEXT, QUESTION, max_tokens=LONG_TOKENS, stream=True)
    text = next(stream).text
    killed = time.monotonic()
    cluster.docker("kill", "--signal", "KILL", victim)
    wait_until(lambda: client.status().scheduler_id != before.scheduler_id, 15, "a standby leads")
    leads_s = time.monotonic() - killed
    client.infer(VISION, {name: image}, slo_ms=SLO_MS)
    serves_s = time.monotonic() - killed
    text += "".join(piece.text for piece in stream)
    figures.report("compose leader killed", "standby leads", leads_s, "s", f"<= {TAKEOVER_LIMIT_S}")
    figures.report("compose leader killed", "new request answered", serves_s, "s")
    assert client.status().epoch > before.epoch
    assert text == expected_text
    assert leads_s <= TAKEOVER_LIMIT_S
    cluster.docker("start", victim)
    wait_until(
        lambda: _health(json.loads(cluster.docker("inspect", victim))[0]) == "healthy",
        60,
        "the killed scheduler stands by",
    )


def test_agents_are_scaled_up_and_serve(
    cluster: ComposeCluster, client: catenary.Client, image: np.ndarray
) -> None:
    began = time.monotonic()
    cluster.cluster("scale", "agent=5")
    five = {f"agent-{number}" for number in range(1, 6)}
    wait_until(lambda: serving_agents(client) >= five, 90, "five agents hold partitions")
    figures.report(
        "compose scaled", "3 to 5 agents, until all hold partitions", time.monotonic() - began, "s"
    )
    name = client.model_metadata(VISION).inputs[0].name

    async def many_at_once() -> None:
        async with catenary.AsyncClient(**cluster.connection("api_key")) as user:
            await asyncio.gather(*(user.chat(TEXT, QUESTION, max_tokens=16) for _ in range(8)))

    def worked() -> set[str]:
        client.infer(VISION, {name: image}, slo_ms=SLO_MS)
        asyncio.run(many_at_once())  # one at a time, those who were there before may do it all
        return {span["instance"] for span in cluster.spans()} & {"agent-4", "agent-5"}

    wait_until(worked, 60, "a new agent did work")


async def test_a_stopped_agent_drains_before_it_ends(
    cluster: ComposeCluster, client: catenary.Client, image: np.ndarray
) -> None:
    victim = cluster.container("agent", 5)
    took_s: list[float] = []

    def stop() -> None:
        began = time.monotonic()
        cluster.docker("stop", "--time", "40", victim)
        took_s.append(time.monotonic() - began)

    answers = await offered_load(cluster, image, stop)
    wrong = [each for each in answers.seen if each != answers.seen[0]]
    figures.report("compose agent stopped", "not answered rightly", len(wrong), "", "0")
    figures.report("compose agent stopped", "until it ended", took_s[0], "s", "< 40")
    assert not wrong
    state = json.loads(cluster.docker("inspect", victim))[0]["State"]
    assert state["ExitCode"] == 0
    assert took_s[0] < 38


def test_nothing_is_left_over(cluster: ComposeCluster) -> None:
    cluster.environment["PURGE"] = "1"
    began = time.monotonic()
    cluster.cluster("down")
    figures.report("compose down", "everything drained and removed", time.monotonic() - began, "s")
    assert cluster.left_over() == []
