"""Planning tasks made from a data set: smaller clusters, other SLOs, more classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from catenary_scheduler.planning.pooled.dataset import PlanningDataset
from catenary_scheduler.planning.pooled.problem import GpuClass, PooledModel, PoolingProblem
from catenary_services.errors import InvalidInput

_SLO_SCALE = 5.0
"""Ratio of the data set's SLOs to the latency on the fastest GPU."""
_BATCH_BUILDING = 1.3e6
"""Product of the artifact's batch building time and the rate of a plan without partitions."""


def with_gpus(
    problem: PoolingProblem, gpus: Mapping[str, int], *, levels: tuple[int, ...] | None = None
) -> PoolingProblem:
    """Returns the problem on a cluster with other numbers of GPUs.

    Args:
        problem: The problem; its classes keep their order, and those without GPUs are left out.
        gpus: Number of GPUs by class.
        levels: Virtual-GPU sizes of every class; None: those of the problem.

    Raises:
        InvalidInput: The problem has no such class.
    """
    known = {each.name: each for each in problem.classes}
    for name in gpus:
        if name not in known:
            raise InvalidInput("gpus", f"the cluster has no {name}; it has {', '.join(known)}")
    classes = tuple(
        replace(each, count=gpus[each.name], levels=levels or each.levels)
        for each in problem.classes
        if gpus.get(each.name)
    )
    return replace(problem, classes=classes)


def only(problem: PoolingProblem, names: Sequence[str]) -> PoolingProblem:
    """Returns the problem with the named models only; one alone has weight 1."""
    models = tuple(model for model in problem.models if model.name in names)
    if len(models) == 1:
        models = (replace(models[0], weight=1.0),)
    return replace(problem, models=models)


def single_model(
    dataset: PlanningDataset, cluster: str, name: str, *, slo_scale: float, margin: float
) -> PoolingProblem:
    """Returns the task of serving one model of the data set on the whole of a cluster.

    The batch building time is left out: it depends on the rate of a plan, see
    `with_batch_building`.
    """
    model = known_models(dataset)[name]
    slo_us = model.slo_us * slo_scale / _SLO_SCALE
    model = replace(
        model, slo_us=slo_us, margin_us=margin * slo_us, weight=1.0, batch_build_us_per_row=0.0
    )
    return PoolingProblem(classes_of(dataset, cluster), (model,))


def known_models(dataset: PlanningDataset) -> dict[str, PooledModel]:
    """Returns every model of the data set, as the first instance that serves it states it."""
    found: dict[str, PooledModel] = {}
    for instance_id, instance in dataset.instances.items():
        if any(dnn["dnn"] not in found for dnn in instance.dnns):
            models = {model.name: model for model in dataset.problem(instance_id).models}
            found = {**models, **found}
    return found


def of_models(problem: PoolingProblem, dataset: PlanningDataset, count: int) -> PoolingProblem:
    """Returns the problem with so many models of the data set, however many it has.

    A model that comes again has an SLO that is longer by a tenth each time, up to half, and loads
    are from one to seven parts. The batch building time is left out, as it depends on the plan.
    """
    known = list(known_models(dataset).values())
    models = []
    for index in range(count):
        turn, at = divmod(index, len(known))
        scale = 1 + (turn % 6) / 10
        models.append(
            replace(
                known[at],
                name=f"{known[at].name}-{turn + 1}",
                slo_us=known[at].slo_us * scale,
                margin_us=known[at].margin_us * scale,
                weight=(1 + index % 7) / (4 * count),
                batch_build_us_per_row=0.0,
            )
        )
    return replace(problem, models=tuple(models))


def classes_of(dataset: PlanningDataset, cluster: str) -> tuple[GpuClass, ...]:
    """Returns the classes of a cluster.

    Raises:
        InvalidInput: No instance is of this cluster.
    """
    for instance_id, instance in dataset.instances.items():
        if instance.cluster == cluster:
            return dataset.problem(instance_id).classes
    raise InvalidInput("cluster", f"no instance of the data set is on {cluster!r}")


def with_batch_building(problem: PoolingProblem, rates_rps: Mapping[str, float]) -> PoolingProblem:
    """Returns the problem with the batch building times that follow from expected rates."""

    def built(model: PooledModel) -> PooledModel:
        rate = rates_rps[model.name]
        per_row = _BATCH_BUILDING / rate if rate > 0 else 0.0
        return replace(model, batch_build_us_per_row=per_row)

    return replace(problem, models=tuple(built(model) for model in problem.models))


def of_classes(
    problem: PoolingProblem, names: Sequence[str], gpus: int, first_share: float, gbps: float
) -> PoolingProblem:
    """Returns the problem on a cluster of other classes, with a server for each GPU.

    Args:
        problem: The problem, whose models must have profiles of the classes.
        names: Names of the classes; the first has `first_share` of the GPUs, the others share the
            rest evenly.
        gpus: Number of GPUs of all classes together.
        first_share: Share of the first class, 0 to 1.
        gbps: Effective rate of a server's link, in Gbit/s.

    Raises:
        InvalidInput: A model has no profile of a class.
    """
    for model in problem.models:
        for name in names:
            if (name, 1) not in model.latency_us:
                raise InvalidInput("classes", f"{model.name} has no profile on {name}")
    first = round(gpus * first_share) if len(names) > 1 else gpus
    others = len(names) - 1
    counts = [first, *((gpus - first + index) // others for index in range(others))]
    return replace(
        problem,
        classes=tuple(
            GpuClass(name, count, _levels(problem, name), 1, gbps * 1e9)
            for name, count in zip(names, counts, strict=True)
        ),
    )


def _levels(problem: PoolingProblem, name: str) -> tuple[int, ...]:
    """Returns the virtual-GPU sizes that every model was profiled at."""
    sizes = [{level for gpu, level in model.latency_us if gpu == name} for model in problem.models]
    return tuple(sorted(set.intersection(*sizes)))
