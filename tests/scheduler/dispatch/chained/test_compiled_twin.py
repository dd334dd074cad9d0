"""The compiled dispatcher against the very same source run plain: every command, every booking."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from catenary_lab.policies import policy_named
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher, dispatcher
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    Event,
    PlanActivated,
    RequestCancelled,
    RequestCompleted,
    SessionFailed,
    SessionRequested,
    SessionsClosed,
    SessionsHeld,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.plan import Agent, Chain, ChainHop, ModelPlan, Plan

ROOT = Path(__file__).parents[4]
MODEL = ModelKey("m", "1")
# Sources only, and only for what lies in the project: the standard library keeps its extensions.
PLAIN = """
import sys
from importlib.machinery import FileFinder, SourceFileLoader
root, test, *path = sys.argv[1:]
make = FileFinder.path_hook((SourceFileLoader, [".py"]))
def hook(path):
    if not path.startswith(root) or "site-packages" in path:
        raise ImportError
    return make(path)
sys.path_hooks.insert(0, hook)
sys.path_importer_cache.clear()
sys.path[:0] = path
import runpy
print(runpy.run_path(test)["log"]())
"""


def random_plan(draw: random.Random) -> Plan:
    chains = []
    for k in range(draw.randint(1, 6)):
        cut = draw.randint(1, 5)
        one, two = draw.sample(range(6), 2)
        hops = (
            ChainHop(AgentId(f"a{one}"), PartitionKey(MODEL, 0, cut), 0, cut),
            ChainHop(AgentId(f"a{two}"), PartitionKey(MODEL, cut, 6), cut, 6),
        )
        chains.append(Chain(f"k{k}", hops, draw.randint(1, 3), draw.randint(1, 4)))
    return Plan(PlanId("p"), (ModelPlan(MODEL, 1, (), chains=tuple(chains)),))


def random_event(draw: random.Random, now: int, sessions: list[StartSession]) -> Event:
    kind = draw.randrange(14)
    agent = AgentId(f"a{draw.randrange(6)}")
    some = draw.choice(sessions) if sessions else None
    if kind == 0:
        return AgentLost(agent)
    if kind == 1:
        return AgentJoined(Agent(agent, "x", ServerId("s"), 1, 1))
    if kind == 2:
        return PlanActivated(random_plan(draw)) if draw.random() < 0.3 else Tick()
    if kind == 3:
        return SessionsHeld(agent, ())
    if some is None or kind < 8:
        request = RequestId(GatewayId("g"), draw.randrange(10**6))
        deadline = now + draw.randrange(1, 2000)
        return SessionRequested(request, MODEL, 1, 1, deadline, draw.randrange(2))
    if kind == 8:
        return RequestCancelled(some.request)
    if kind == 9:
        return SessionFailed(some.session, draw.choice([None, agent]), "INTERNAL", "", True)
    if kind == 10:
        return RequestCompleted(some.request)
    return SessionsClosed(draw.choice(some.hops).agent, (some.session,))


def log() -> str:
    """Returns a digest of what a few thousand random events lead to."""
    total = hashlib.sha256()
    for policy in ("jffc", "least-time", "jsq", "sa-jsq", "jiq", "sed"):
        draw = random.Random(policy)
        config = ChainedConfig(
            max_queued=20,
            deadline_grace_ns=30,
            delivery_grace_ns=40,
            close_patience_ns=25,
            suspicion_ns=15,
        )
        at = ChainedDispatcher(config, policy=policy_named(policy, random.Random(3).randrange))
        now, sessions = 0, list[StartSession]()
        for number in range(6):
            joined = AgentJoined(Agent(AgentId(f"a{number}"), "x", ServerId("s"), 1, 1))
            at.handle(joined, now)
        at.handle(PlanActivated(random_plan(draw)), now)
        for _ in range(1500):
            now += draw.randrange(10)
            commands = at.handle(random_event(draw, now, sessions), now)
            sessions += [each for each in commands if isinstance(each, StartSession)]
            sessions = sessions[-12:]
            told = (commands, at.next_wakeup(), at.take_changes(), at.statistics())
            total.update(repr(told).encode())
    return f"{total.hexdigest()} {dispatcher.__file__.endswith('.py')}"


def test_compiled_and_plain_dispatchers_do_the_same() -> None:
    if dispatcher.__file__.endswith(".py"):
        pytest.skip("the compiled modules were not built (make native)")
    ran = subprocess.run(
        [sys.executable, "-c", PLAIN, str(ROOT), __file__, *sys.path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    compiled, plain = log().split(), ran.stdout.split()
    assert (compiled[1], plain[1]) == ("False", "True")
    assert compiled[0] == plain[0]
