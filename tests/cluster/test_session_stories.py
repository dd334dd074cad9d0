"""The story of one answer whose session is moved and then lost, told by the real command.

Two emulated agents serve a model whole, each by a chain of its own. An answer begins on one, is
moved to the other, which is killed there and then, and comes to its end on what is left.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

import catenary
from catenary.moving import SessionInfo
from cluster_harness import ROOT, RunningCluster, environment, running_cluster
from fault_cluster import TEXTS, shared_models

pytestmark = pytest.mark.timeout(600)  # the first test of all makes the model

BLOCKS = 6
TOKENS = 100
TOKEN_NS = 60_000_000
"""Long enough that a busy machine can move the session before the answer is complete."""
PROMPT = "w5 w6 w7 w8 w9"
ATTEMPTS = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("story")
    shutil.copytree(shared_models(), folder / "models")
    profile = folder / "times.json"
    step = {"prefill_ns": 1_000_000, "prefill_token_ns": 20_000, "decode_session_ns": 10_000}
    profile.write_text(json.dumps({TEXTS: {**step, "decode_ns": TOKEN_NS // BLOCKS}}))
    chains = [
        {"capacity": 4, "hops": [{"agent": f"agent-{number}", "blocks": [0, BLOCKS]}]}
        for number in range(2)
    ]
    with running_cluster(
        folder,
        models=(TEXTS,),
        placement={"models": [{"name": TEXTS, "chains": chains}]},
        config={"agent": {"threads": 1, "emulated_profile": str(profile)}},
        agents=2,
        device="emulated:text",
    ) as running:
        yield running


def told(cluster: RunningCluster, named: str, *options: str) -> str:
    """Returns what `catenary sessions --story` prints."""
    command = [sys.executable, "-m", "catenary", "sessions", "--story", named, *options]
    targets = ["--target", cluster.grpc, "--admin", cluster.admin]
    done = subprocess.run(
        [*command, *targets],
        capture_output=True,
        text=True,
        env={**environment(), "COLUMNS": "200"},
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def moved_and_lost(cluster: RunningCluster, client: catenary.Client) -> tuple[str, list[int], str]:
    """Has an answer made whose session is moved, and then lost with the agent it was moved to.

    Asks again if an answer is complete before its session has moved.

    Returns:
        The id of the request, both sessions, and the agent that was killed.
    """
    for _ in range(ATTEMPTS):
        stream = client.generate(TEXTS, PROMPT, stream=True, max_tokens=TOKENS, ignore_eos=True)
        pieces = iter(stream)
        next(pieces)
        found = generating(client)
        if found and moved(client, found[0]):
            now = client.sessions(TEXTS)
            if now and now[0].session_id != found[0].session_id:
                victim = now[0].hops[0][0]
                cluster.kill(victim)
                for _ in pieces:
                    pass
                answer = stream.so_far
                assert len(answer.token_ids) == TOKENS
                assert answer.token_ids == undisturbed(client)
                return answer.id, [found[0].session_id, now[0].session_id], victim
        for _ in pieces:
            pass
    raise AssertionError("no session was moved before its answer was complete")


def generating(client: catenary.Client) -> list[SessionInfo]:
    """Returns the sessions, once the scheduler knows that one generates; none if it ended before.

    A gateway tells it of a first token with its next report.
    """
    while found := list(client.sessions(TEXTS)):
        if found[0].generates:
            break
        time.sleep(0.01)
    return found


def moved(client: catenary.Client, session: SessionInfo) -> bool:
    try:
        move = client.move_session(session.session_id, mode="kv", wait_s=30.0)
    except catenary.UnavailableError:  # its answer is complete
        return False
    return move.outcome == "moved"


def undisturbed(client: catenary.Client) -> tuple[int, ...]:
    return client.generate(TEXTS, PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids


def test_a_session_that_was_moved_lost_and_finished_is_explained(cluster: RunningCluster) -> None:
    with catenary.Client(cluster.grpc, admin_target=cluster.admin, timeout_s=120) as client:
        request, (first, second), victim = moved_and_lost(cluster, client)
    story = json.loads(told(cluster, request, "--json"))
    third = next(
        each["session_id"]
        for each in reversed(story)
        if each["session_id"] and each["name"] == "started"
    )
    expected = [
        (0, "arrived", "waiting"),
        (0, "placed", "running"),
        (first, "started", "starting"),
        (first, "first token", "decoding"),
        (second, "reserved for a move", "migrating in"),
        (first, "move began", "migrating out"),
        (second, "took over", "starting"),
        (first, "moved away", "closing"),
        (0, "session lost", "waiting"),
        (second, "given up", "closing"),
        (0, "placed", "running"),
        (third, "started", "starting"),
        (third, "first token", "decoding"),
        (0, "completed", "answered"),
    ]
    steps = [(each["session_id"], each["name"], each["after"]) for each in story]
    rest = iter(steps)
    assert all(step in rest for step in expected), steps  # in this order, others between them
    assert len({first, second, third}) == 3

    causes = {(each["session_id"], each["name"]): each for each in story}
    assert causes[first, "move began"]["event_kind"] == "MoveRequested"
    assert causes[second, "took over"]["event_kind"] == "SessionMoved"
    assert causes[second, "took over"]["answers"] == causes[first, "move began"]["event"]
    lost = causes[0, "session lost"]
    assert lost["event_kind"] in ("SessionFailed", "AgentLost")
    assert victim in lost["why"]
    assert causes[0, "completed"]["event_kind"] == "RequestCompleted"
    assert [each["event"] for each in story] == sorted(each["event"] for each in story)

    # By the id of any of its sessions it is the same story, and so it is in the dashboard.
    for session in (first, second, third):
        again = json.loads(told(cluster, str(session), "--json"))
        assert [(each["event"], each["name"]) for each in again] == [
            (each["event"], each["name"]) for each in story
        ]
        with urllib.request.urlopen(
            f"{cluster.http}/dashboard/v1/story?session_id={session}", timeout=30
        ) as answer:
            shown = json.load(answer)["changes"]
        assert [each["name"] for each in shown] == [each["name"] for each in story]
    for_eyes = told(cluster, request)
    assert [line for line in for_eyes.splitlines() if "session lost" in line and victim in line]
