"""Round robin over scheduler groups, what they serve together, and sums over them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_gateway.groups import sums
from catenary_gateway.groups.admin import GroupsAdmin
from catenary_gateway.groups.rotation import WeightedRotation
from catenary_gateway.groups.router import GroupRouter
from catenary_gateway.groups.tables import ModelTables, PeerDirectories
from catenary_protos.catenary.v1 import admin_pb2, common_pb2, scheduler_pb2
from catenary_services.domain.groups import first_id, next_epoch
from catenary_services.errors import InvalidInput, Overloaded

Message = scheduler_pb2.GatewayMessage


@given(st.dictionaries(st.integers(0, 5), st.integers(1, 9), min_size=1), st.integers(0, 40))
def test_every_round_gives_each_group_its_weight(weights: dict[int, int], before: int) -> None:
    rotation = WeightedRotation()
    for _ in range(before):
        rotation.next("m", weights)
    turns = Counter(rotation.next("m", weights) for _ in range(sum(weights.values())))
    assert turns == weights


def test_turns_are_spread_and_each_model_has_its_own() -> None:
    rotation = WeightedRotation()
    turns = [rotation.next("m", {0: 2, 1: 1}) for _ in range(6)]
    assert turns == [0, 1, 0, 0, 1, 0]
    assert [rotation.next("n", {0: 1, 1: 1}) for _ in range(4)] == [0, 1, 0, 1]
    assert rotation.next("m", {1: 1}) == 1, "a group that is away gets nothing"
    assert Counter(rotation.next("m", {0: 2, 1: 1}) for _ in range(6)) == {0: 4, 1: 2}


def table(**ready: int) -> scheduler_pb2.ModelTable:
    """Models and their workers; 0: not ready."""
    models = [
        scheduler_pb2.ServedModel(
            name=name,
            version="1",
            generates=True,
            ready=workers > 0,
            workers=workers,
            not_ready_reason="" if workers else "partitions are loading",
        )
        for name, workers in ready.items()
    ]
    return scheduler_pb2.ModelTable(models=models)


def test_a_model_is_ready_if_any_group_has_it_ready() -> None:
    tables = ModelTables()
    tables.update(0, table(a=0, b=2))
    tables.update(1, table(a=3, b=1, c=0))
    models = {model.name: model for model in tables.merged().models}
    assert {name: (m.ready, m.workers) for name, m in models.items()} == {
        "a": (True, 3),
        "b": (True, 3),
        "c": (False, 0),
    }
    assert models["c"].not_ready_reason
    assert tables.weights("a", "1", [0, 1]) == {1: 3}
    assert tables.weights("b", "1", [0, 1]) == {0: 2, 1: 1}
    assert tables.knowing("c", "1", [0, 1]) == [1]
    tables.drop(1)
    assert {m.name: m.ready for m in tables.merged().models} == {"a": False, "b": True}


def test_a_peer_that_changed_groups_is_reached_where_it_is_now() -> None:
    def peers(**incarnations: int) -> scheduler_pb2.Directory:
        return scheduler_pb2.Directory(
            peers=[common_pb2.Peer(peer_id=n, incarnation=i) for n, i in incarnations.items()]
        )

    def known() -> dict[str, int]:
        return {peer.peer_id: peer.incarnation for peer in directories.merged().peers}

    directories = PeerDirectories()
    directories.update(0, peers(a=1, g=9))
    directories.update(1, peers(b=2, g=9))
    assert known() == {"a": 1, "b": 2, "g": 9}
    directories.update(1, peers(b=2, g=9, a=5))
    assert known()["a"] == 5
    directories.update(0, peers(a=1, g=9))  # lingers there, but says nothing new
    assert known()["a"] == 5
    directories.update(0, peers(g=9))
    directories.update(1, peers(b=2, g=9))
    assert known() == {"b": 2, "g": 9}


def test_the_number_of_gateways_is_what_the_group_says_that_knows_most() -> None:
    directories = PeerDirectories()
    assert directories.merged().gateways == 0
    directories.update(0, scheduler_pb2.Directory(gateways=2))
    directories.update(1, scheduler_pb2.Directory(gateways=3))
    assert directories.merged().gateways == 3
    directories.update(1, scheduler_pb2.Directory(gateways=1))
    assert directories.merged().gateways == 2


class FakeLink:
    def __init__(self) -> None:
        self.is_connected = True
        self.full = False
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        if self.full:
            raise Overloaded("full")
        self.sent.append(message)

    send_soon = send

    def numbers(self, kind: str) -> list[int]:
        return [getattr(m, kind).request_id for m in self.sent if m.WhichOneof("kind") == kind]


class FakePlane:
    """Requests that were not begun."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()

    def resubmission(self, number: int) -> Message | None:
        return submission(number) if number in self.waiting else None


def submission(number: int) -> Message:
    return Message(
        submit=scheduler_pb2.SubmitRequest(request_id=number, model="a", model_version="1")
    )


class Routing:
    def __init__(self, **ready: int) -> None:
        self.links = [FakeLink(), FakeLink()]
        self.tables = ModelTables()
        for group in range(2):
            self.tables.update(group, table(a=ready.get(f"g{group}", 1)))
        self.reasons: list[str] = []
        self.plane = FakePlane()
        self.router = GroupRouter(self.links, self.tables, self.reasons.append)
        self.router.serve(self.plane)

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            self.plane.waiting.add(number)
            self.router.send(submission(number))

    def refuse(self, number: int, reason: str = "OVERLOADED", retry_ns: int = 1) -> bool:
        group = self.router.group_of(number)
        assert group is not None
        order = scheduler_pb2.RejectRequest(
            request_id=number, retry_after_ns=retry_ns, failure=common_pb2.Failure(reason=reason)
        )
        return self.router.refused(order, group)


def test_everything_about_a_request_goes_to_the_group_that_has_it() -> None:
    routing = Routing()
    routing.submit(1, 2, 3, 4)
    assert [link.numbers("submit") for link in routing.links] == [[1, 3], [2, 4]]
    report = scheduler_pb2.SessionsProgressed(
        sessions=[scheduler_pb2.SessionProgress(request_id=n) for n in (1, 2, 3, 99)]
    )
    routing.router.send(Message(sessions_progressed=report))
    told = [
        [each.request_id for each in link.sent[-1].sessions_progressed.sessions]
        for link in routing.links
    ]
    assert told == [[1, 3], [2]]
    for group, link in enumerate(routing.links):
        number = first_id(next_epoch(0, group, 2)) + 7
        failed = scheduler_pb2.SessionFailed(session_id=number)
        routing.router.send(Message(session_failed=failed))
        assert link.sent[-1].session_failed.session_id == number
        lost = scheduler_pb2.DeliveryFailed(batch_id=number)
        routing.router.send(Message(delivery_failed=lost))
        assert link.sent[-1].delivery_failed.batch_id == number
    routing.router.send(Message(cancel=scheduler_pb2.CancelRequest(request_id=4)))
    routing.router.send_soon(Message(finished=scheduler_pb2.RequestFinished(request_id=1)))
    assert routing.links[1].numbers("cancel") == [4]
    assert routing.links[0].numbers("finished") == [1]
    assert [routing.router.group_of(n) for n in (1, 2, 3, 4)] == [None, 1, 0, None]


def test_what_is_about_a_window_goes_to_the_group_that_granted_it() -> None:
    routing = Routing()
    for number, group in ((11, 1), (12, 0), (13, 1)):
        batch = first_id(next_epoch(0, group, 2)) + 7
        link = routing.links[group]
        report = scheduler_pb2.WindowReport(window_id=batch, number=1)
        routing.router.send(Message(window_report=report))
        assert link.sent[-1].window_report.window_id == batch
        late = submission(number)
        late.submit.in_flight.add(batch_id=batch, rows=1)
        routing.router.send(late)
        assert link.sent[-1].submit.request_id == number
        assert routing.router.group_of(number) == group


def test_a_refused_request_goes_to_one_other_group_and_then_to_its_client() -> None:
    routing = Routing()
    routing.submit(1)
    assert routing.refuse(1)
    assert routing.links[1].numbers("submit") == [1]
    assert routing.reasons == ["OVERLOADED"]
    assert not routing.refuse(1), "tried twice"
    assert routing.router.group_of(1) is None


@pytest.mark.parametrize(
    ("reason", "retry_ns"), [("SLO_UNATTAINABLE", 0), ("INVALID_INPUT", 0), ("INTERNAL", 5)]
)
def test_what_no_other_group_could_mend_is_answered_at_once(reason: str, retry_ns: int) -> None:
    routing = Routing()
    routing.submit(1)
    assert not routing.refuse(1, reason, retry_ns)
    assert not routing.links[1].sent
    assert not routing.reasons


def test_a_request_that_was_begun_or_that_nobody_else_serves_stays() -> None:
    begun = Routing()
    begun.submit(1)
    begun.plane.waiting.clear()
    assert not begun.refuse(1)
    alone = Routing(g1=0)
    alone.submit(1)
    assert not alone.refuse(1)


def test_requests_of_a_group_that_stays_away_move_and_it_is_told_when_it_is_back() -> None:
    routing = Routing()
    routing.submit(1, 2, 3)
    routing.plane.waiting.discard(1)  # begun: its agents go on
    routing.links[0].is_connected = False
    routing.submit(4)
    assert routing.links[1].numbers("submit") == [2, 4]
    routing.router.away(0)
    assert routing.links[1].numbers("submit") == [2, 4, 3]
    assert routing.reasons == ["GROUP_AWAY"]
    routing.links[0].is_connected = True
    routing.router.connected(0)
    assert routing.links[0].numbers("cancel") == [3]
    due = routing.router.is_due(0)
    assert [due(number) for number in (1, 2, 3, 4, 5)] == [True, False, False, False, True]
    assert routing.router.is_elsewhere(3, 0)
    assert routing.links[0].numbers("cancel") == [3, 3]
    assert not routing.router.is_elsewhere(1, 0)


def test_a_scheduler_that_does_not_keep_up_is_passed_over() -> None:
    routing = Routing()
    routing.links[0].full = True
    routing.submit(1, 2)
    assert routing.links[1].numbers("submit") == [1, 2]
    routing.links[1].full = True
    with pytest.raises(Overloaded):
        routing.submit(3)
    assert routing.router.group_of(3) is None


def test_without_any_scheduler_a_request_waits_for_the_first_that_comes() -> None:
    routing = Routing()
    for link in routing.links:
        link.is_connected = False
    routing.submit(1)
    assert routing.router.group_of(1) is None
    assert all(routing.router.is_due(group)(1) for group in range(2))


def test_a_model_that_no_group_has_ready_waits_where_it_is_known() -> None:
    routing = Routing(g0=0, g1=0)
    routing.submit(1, 2)
    assert [link.numbers("submit") for link in routing.links] == [[1], [2]]


def status(scheduler: str, **agents: str) -> admin_pb2.GetStatusResponse:
    chain = admin_pb2.ChainStatus(chain_id="chain-0", capacity=2)
    model = admin_pb2.ModelStatus(
        name="m",
        version="1",
        ready=scheduler == "s1",
        reason="" if scheduler == "s1" else "why",
        queued_requests=2,
        chains=[chain],
        sessions=1,
    )
    return admin_pb2.GetStatusResponse(
        scheduler_id=scheduler,
        epoch=5,
        plan_id=f"plan-{scheduler}",
        models=[model],
        agents=[admin_pb2.AgentStatus(agent_id=a, state=s) for a, s in agents.items()],
        gateways=["g"],
        queued_requests=3,
        redis_connected=True,
    )


def test_a_status_of_all_groups_adds_up() -> None:
    both = {0: status("s0", a="ready", b="lost"), 1: status("s1", c="ready")}
    joint = sums.joint_status(both, groups=3)
    assert joint.scheduler_id == "s0, s1"
    assert [agent.agent_id for agent in joint.agents] == ["a", "b", "c"]
    assert (joint.queued_requests, list(joint.gateways)) == (6, ["g"])
    (model,) = joint.models
    assert (model.ready, model.queued_requests, model.sessions) == (True, 4, 2)
    assert model.reason == "group 0: why"
    assert [chain.chain_id for chain in model.chains] == ["0/chain-0", "1/chain-0"]
    assert [(g.group, g.scheduler_id, g.agents) for g in joint.groups] == [
        (0, "s0", 1),
        (1, "s1", 1),
        (2, "", 0),
    ]


def test_advice_and_plans_of_all_groups_add_up() -> None:
    def advice(wanted: int, rate: float, met: float) -> admin_pb2.ScalingAdvice:
        model = admin_pb2.ModelScaling(
            model="m",
            version="1",
            workers_wanted=wanted,
            workers_now=1,
            arrivals_per_s=rate,
            attainment_ratio=met,
            reason="more",
        )
        return admin_pb2.ScalingAdvice(agents_wanted=wanted, agents_now=2, models=[model])

    joint = sums.joint_advice([advice(3, 3.0, 1.0), advice(1, 1.0, 0.6)])
    assert (joint.agents_wanted, joint.agents_now) == (4, 4)
    (model,) = joint.models
    assert (model.workers_wanted, model.workers_now, model.reason) == (4, 2, "more")
    assert (model.arrivals_per_s, model.attainment_ratio) == (4.0, pytest.approx(0.9))
    idle = sums.joint_advice([advice(1, 0.0, 1.0), advice(1, 0.0, 0.5)])
    assert idle.models[0].attainment_ratio == pytest.approx(0.75)
    plans = {
        g: admin_pb2.GetPlanResponse(plan_json=json.dumps({"models": [g]}), plan_id=f"p{g}")
        for g in (0, 1)
    }
    plan = sums.joint_plan(plans)
    assert json.loads(plan.plan_json) == {"groups": {"0": {"models": [0]}, "1": {"models": [1]}}}
    assert plan.plan_id == "p0, p1"
    parts = sums.plans_by_group(plan.plan_json, groups=2)
    assert {group: json.loads(part) for group, part in parts.items()} == {
        0: {"models": [0]},
        1: {"models": [1]},
    }


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"models": []}', '{"groups": {"2": {}}}'])
def test_a_plan_that_does_not_say_which_group_it_is_for_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        sums.plans_by_group(text, groups=2)


class FakeScheduler:
    """Advises what the test puts into its queue; None ends the stream."""

    def __init__(self) -> None:
        self.advice: asyncio.Queue[int | None] = asyncio.Queue()

    async def watch_scaling(self, _: object) -> AsyncIterator[admin_pb2.ScalingAdvice]:
        while (wanted := await self.advice.get()) is not None:
            yield admin_pb2.ScalingAdvice(agents_wanted=wanted)


async def test_advice_is_summed_over_all_groups_or_not_given() -> None:
    both = GroupsAdmin([FakeLink(), FakeLink()])  # type: ignore[list-item]
    first, second = FakeScheduler(), FakeScheduler()
    both._each = [first, second]  # type: ignore[list-item]
    stream = both.watch_scaling(admin_pb2.WatchScalingRequest())
    async with asyncio.timeout(30):
        first.advice.put_nowait(3)  # alone it would be advice to stop the other group's agents
        second.advice.put_nowait(2)
        assert (await anext(stream)).agents_wanted == 5
        second.advice.put_nowait(4)
        assert (await anext(stream)).agents_wanted == 7
        first.advice.put_nowait(None)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


class FakeCalls:
    """Has one session, and answers moves of it."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.requests: list[admin_pb2.MoveSessionRequest] = []

    async def call(self, method: str, request: object, timeout_s: float | None) -> object:
        if method == "ListSessions":
            answer = admin_pb2.ListSessionsResponse()
            answer.sessions.add(session_id=self.session, chain_id="m/0", moving_to="m/1")
            return answer
        if isinstance(request, admin_pb2.GetStoryRequest):
            if request.session_id != self.session:
                raise InvalidInput("session_id", f"{request.session_id} is not known")
            return admin_pb2.GetStoryResponse(changes=[admin_pb2.StateChange(why="found")])
        assert isinstance(request, admin_pb2.MoveSessionRequest)
        self.requests.append(request)
        return admin_pb2.MoveSessionResponse(outcome="moved")


async def test_sessions_of_all_groups_are_listed_and_each_is_moved_by_its_own() -> None:
    both = GroupsAdmin([FakeLink(), FakeLink()])  # type: ignore[list-item]
    first, second = FakeCalls(5), FakeCalls(6)
    both._each = [first, second]  # type: ignore[list-item]
    listed = await both.call("ListSessions", admin_pb2.ListSessionsRequest(), 1.0)
    assert [(s.session_id, s.group, s.chain_id, s.moving_to) for s in listed.sessions] == [
        (5, 0, "0/m/0", "0/m/1"),
        (6, 1, "1/m/0", "1/m/1"),
    ]
    request = admin_pb2.MoveSessionRequest(session_id=6, chain_id="1/m/1")
    assert (await both.call("MoveSession", request, 1.0)).outcome == "moved"
    assert not first.requests
    assert [(each.session_id, each.chain_id) for each in second.requests] == [(6, "m/1")]
    with pytest.raises(InvalidInput, match="7"):
        await both.call("MoveSession", admin_pb2.MoveSessionRequest(session_id=7), 1.0)
    for known in 5, 6:
        story = await both.call("GetStory", admin_pb2.GetStoryRequest(session_id=known), 1.0)
        assert [each.why for each in story.changes] == ["found"]
    with pytest.raises(InvalidInput, match="7 is not known"):
        await both.call("GetStory", admin_pb2.GetStoryRequest(session_id=7), 1.0)


async def test_a_question_about_a_plan_goes_to_the_group_whose_agents_know_the_devices() -> None:
    class Knows:
        def __init__(self, device_class: str) -> None:
            self.device_class = device_class

        async def call(
            self, _: str, request: admin_pb2.SearchPlanRequest, timeout_s: float | None
        ) -> admin_pb2.SearchPlanResponse:
            if request.gpus[0].device_class != self.device_class:
                raise InvalidInput("gpus", f"only {self.device_class} is known")
            return admin_pb2.SearchPlanResponse(notes=[f"times of {self.device_class}"])

    both = GroupsAdmin([FakeLink(), FakeLink()])  # type: ignore[list-item]
    both._each = [Knows("new"), Knows("old")]  # type: ignore[list-item]
    for name in "new", "old":
        counts = [admin_pb2.GpuCount(device_class=name, count=1)]
        answer = await both.call("SearchPlan", admin_pb2.SearchPlanRequest(gpus=counts), 1.0)
        assert list(answer.notes) == [f"times of {name}"]
    counts = [admin_pb2.GpuCount(device_class="odd", count=1)]
    with pytest.raises(InvalidInput, match="only old is known"):
        await both.call("SearchPlan", admin_pb2.SearchPlanRequest(gpus=counts), 1.0)


def test_timelines_of_all_groups_stand_side_by_side() -> None:
    answers = {}
    for group in (1, 0):
        answers[group] = admin_pb2.GetTimelinesResponse(truncated=group == 1)
        line = answers[group].resources.add(kind="gpu", owner=f"agent-{group}")
        line.bookings.add(batch_id=group + 1, booked_start_ns=-5, booked_end_ns=5)
    joint = sums.joint_timelines(answers)
    assert joint.truncated
    assert [(each.owner, each.group, each.bookings[0].batch_id) for each in joint.resources] == [
        ("agent-0", 0, 1),
        ("agent-1", 1, 2),
    ]


def test_a_model_of_several_groups_has_the_attainment_of_the_worst() -> None:
    statuses = {}
    for group, ratio in enumerate((0.9, -1.0, 0.7)):
        statuses[group] = admin_pb2.GetStatusResponse(audits=2, leaks_mended=group)
        model = statuses[group].models.add(name="m", version="1", attainment_ratio=ratio)
        model.pipelines_served.add(batch=group + 1)
    joint = sums.joint_status(statuses, 3)
    assert round(joint.models[0].attainment_ratio, 6) == 0.7
    assert [each.batch for each in joint.models[0].pipelines_served] == [1, 2, 3]
    assert (joint.audits, joint.leaks_mended) == (6, 3)
