"""A plan in words."""

from __future__ import annotations

from scheduler.plan_notes import PlanNotes
from scheduler.switch_report import SwitchReport
from services.domain.ids import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND
from services.domain.plan import ModelPlan, Pipeline, Plan, Stage


def explain(plan: Plan, notes: PlanNotes | None, problem: str, report: SwitchReport | None) -> str:
    """Returns what runs where and why, for a reader who has not seen the JSON.

    Args:
        plan: In force.
        notes: How it was made.
        problem: Why it is not the plan there should be; empty if it is.
        report: The switch under way, else the last one.
    """
    lines = [f"Plan {plan.plan_id} serves {len(plan.models)} model(s)."]
    if notes is not None:
        lines += notes.in_words()
    if problem:
        lines.append(f"Note: {problem}.")
    for model in plan.models:
        lines += ["", *_model(model)]
    if report is not None:
        lines += ["", report.in_words()]
    return "\n".join(lines)


def _model(model: ModelPlan) -> list[str]:
    cast = "float16" if model.float16_boundaries else "their own type"
    lines = [
        f"{model.model}: deadline {_ms(model.slo_ns)} unless a request names one;"
        f" feature maps between partitions travel as {cast}."
    ]
    for number, pipeline in enumerate(model.pipelines, start=1):
        lines += [f"  Pipeline {number}, batches of up to {pipeline.batch_size}:"]
        lines += [f"    {_stage(stage, pipeline.batch_size)}" for stage in pipeline.stages]
        lines += [f"    {_limits(pipeline)}"]
    return lines


def _stage(stage: Stage, batch: int) -> str:
    blocks = f"blocks {stage.partition.first_block} to {stage.partition.last_block - 1}"
    where = " or ".join(stage.agents)
    enters = f", {stage.input_bytes * batch} bytes enter" if stage.input_bytes else ""
    return f"{blocks} on {where}: {_ms(stage.compute_ns[batch - 1])} a batch{enters}."


def _limits(pipeline: Pipeline) -> str:
    batch = pipeline.batch_size
    total = sum(stage.compute_ns[batch - 1] for stage in pipeline.stages)
    slowest = max(pipeline.stages, key=lambda s: s.compute_ns[batch - 1] / len(s.agents))
    rate = batch * NANOSECONDS_PER_SECOND * len(slowest.agents)
    rate_per_s = rate / max(1, slowest.compute_ns[batch - 1])
    return (
        f"Computing takes {_ms(total)} from end to end; at most {rate_per_s:.0f} rows/s, limited by"
        f" blocks {slowest.partition.first_block} to {slowest.partition.last_block - 1}."
    )


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / NANOSECONDS_PER_MILLISECOND:.1f} ms"
