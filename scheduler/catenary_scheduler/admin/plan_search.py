"""Questions about plans as messages, and their answers as messages."""

from __future__ import annotations

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.planning import ChainPlacement, PipelinePlacement
from catenary_scheduler.planning.search import PlanAnswer, PlanOption, SearchOrder, ServingFigures
from catenary_scheduler.replanning.questions import PlanDemand
from catenary_services.domain.ids import Nanoseconds
from catenary_services.errors import InvalidInput

_MOST_TEXT = 4_096
"""Characters of a sentence that are sent."""
_LONGEST_NS = 2**62 - 1


async def search_plan(
    leader: LeaderRuntime, request: admin_pb2.SearchPlanRequest, most_s: float
) -> admin_pb2.SearchPlanResponse:
    """Returns what would serve a model on the devices of a question.

    Raises:
        CatenaryError: The question is wrong, the devices cannot serve the model, or there was no
            answer in time.
    """
    wanted = _demand(request)
    agents = [record.agent for record in leader.cluster.registry.values()]
    return _message(await leader.questions.ask(wanted, agents, most_s))


def _demand(request: admin_pb2.SearchPlanRequest) -> PlanDemand:
    gpus: dict[str, int] = {}
    for each in request.gpus:
        if each.device_class in gpus:
            raise InvalidInput("gpus", f"{each.device_class} is named twice")
        gpus[each.device_class] = each.count
    try:
        order = SearchOrder(request.objective or SearchOrder.THROUGHPUT)
    except ValueError:
        known = " or ".join(SearchOrder)
        raise InvalidInput("objective", f"{request.objective!r} is not {known}") from None
    return PlanDemand(
        request.model,
        request.version,
        gpus,
        order,
        request.rate_per_s,
        request.prompt_tokens,
        request.output_tokens,
    )


def _message(answer: PlanAnswer) -> admin_pb2.SearchPlanResponse:
    return admin_pb2.SearchPlanResponse(
        model=answer.model.name,
        version=answer.model.version,
        options=[_option(each) for each in answer.options],
        idle=[
            admin_pb2.IdleGpu(gpu=gpu, why=why[:_MOST_TEXT])
            for gpu, why in sorted(answer.idle.items())
        ],
        notes=[note[:_MOST_TEXT] for note in answer.notes],
        scheduler_groups=answer.groups,
    )


def _option(option: PlanOption) -> admin_pb2.PlanOption:
    placement = option.placement
    message = admin_pb2.PlanOption(
        shape=option.name,
        why_not=option.why_not[:_MOST_TEXT],
        possible=placement is not None,
        predicted=option.figures is not None,
    )
    if placement is not None:
        message.pipelines.extend(_pipeline(each) for each in placement.pipelines)
        message.chains.extend(_chain(each) for each in placement.chains)
    if option.figures is not None:
        _enter(message, option.figures)
    return message


def _enter(message: admin_pb2.PlanOption, figures: ServingFigures) -> None:
    message.throughput_per_s = figures.rate_per_s
    message.tokens_per_s = figures.tokens_per_s
    message.latency_ns = _clipped(figures.response_ns)
    message.first_token_ns = _clipped(figures.first_token_ns)
    message.per_token_ns = _clipped(figures.per_token_ns)
    message.attainment_ratio = figures.attainment
    message.gpus = figures.gpus
    message.sessions = figures.sessions
    message.survives = figures.survives
    message.binds = figures.limit[:_MOST_TEXT]


def _clipped(duration_ns: float) -> Nanoseconds:
    return round(min(duration_ns, _LONGEST_NS))


def _pipeline(pipeline: PipelinePlacement) -> admin_pb2.PipelineStatus:
    return admin_pb2.PipelineStatus(
        batch=pipeline.batch_size,
        stages=[
            admin_pb2.PoolStatus(
                first_block=stage.first_block, last_block=stage.last_block, agent_ids=stage.agents
            )
            for stage in pipeline.stages
        ],
    )


def _chain(chain: ChainPlacement) -> admin_pb2.ChainStatus:
    return admin_pb2.ChainStatus(
        hops=[
            admin_pb2.ChainHopStatus(
                agent_id=hop.agent, first_block=hop.entry, last_block=hop.last_block
            )
            for hop in chain.hops
        ],
        capacity=chain.capacity,
        role=chain.role,
        cache_tokens=chain.cache_tokens,
    )
