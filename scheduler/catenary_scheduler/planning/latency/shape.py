"""Choice of the number of devices of a worker (Aladdin, 3.2, eq. 5-6).

A worker of N_g devices that compute one model together (tensor parallel) has M = N_g * m_gpu -
m_model of memory for caches. Per device it generates at most

    T_max(N_g) = min{ M / (N_g * m_r * (t_compute + t_comm)),  B / (N_g * T_dec) }     (eq. 6)

tokens per time: the first term with its caches full (a batch of M / m_r), the second with the
largest batch B that stays within the objective per token. The best N_g does not depend on the load.

No memory is reserved, because the published answer for 70b on A100 (two devices) follows only from
M = N_g * m_gpu - m_model as it stands; with a tenth of each device reserved it would be four
(pitfall 5 of the specification).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.latency.nnls import normal_equations, solve_nonnegative
from catenary_services.domain.latency import LatencyLines
from catenary_services.errors import PlanInfeasible


@dataclass(frozen=True, slots=True)
class DeviceScaling:
    """Step times by eq. 5: t_compute = k4 / N_g + c4 and t_comm = kc * (N_g - 1) / N_g."""

    compute_ns: float
    """Coefficient k4, in nanoseconds."""
    constant_ns: float
    """Constant c4, in nanoseconds."""
    transfer_ns: float = 0.0
    """Coefficient kc, in nanoseconds; (N_g - 1) / N_g is the share of the volume that an all-reduce
    moves per device."""

    def step_ns(self, devices: int) -> float:
        """Returns the nanoseconds of one decode step, t_compute + t_comm."""
        transfer = self.transfer_ns * (devices - 1) / devices
        return self.compute_ns / devices + self.constant_ns + transfer


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """Shape of a worker: its number of devices.

    Attributes:
        devices: Number N_g of devices.
        lines: Its latency lines, for decode; None if only eq. 5 is known.
    """

    devices: int
    lines: LatencyLines | None = None


@dataclass(frozen=True, slots=True)
class WorkerDemand:
    """Sizes and objective for which a worker is chosen.

    Attributes:
        device_bytes: Memory m_gpu of one device.
        model_bytes: Weights m_model of the whole model.
        session_bytes: Mean cache m_r of a session.
        context_tokens: Mean context l_ave of a session.
        per_token_ns: Objective T_dec per token.
    """

    device_bytes: float
    model_bytes: float
    session_bytes: float
    context_tokens: float
    per_token_ns: float


def fit_compute(times: Sequence[tuple[int, float]]) -> DeviceScaling:
    """Returns eq. 5 fitted to step times by number of devices.

    N_g = 1 / x makes all three terms linear, but k4 / N_g and kc * (N_g - 1) / N_g = kc - kc / N_g
    lie in one plane with c4, so only k4 - kc and c4 + kc can be determined. The constant is
    attributed to compute if time falls with devices, and to transfer if it rises.
    """
    rows = np.array([[1.0 / count, (count - 1.0) / count] for count, _ in times], np.float64)
    targets = np.array([time for _, time in times], np.float64)
    gram, moment, _ = normal_equations(rows, targets, targets**-2.0)
    first, last = (float(each) for each in solve_nonnegative(gram, moment))
    # first / N + last * (N - 1) / N = (first - last) / N + last.
    if first >= last:
        return DeviceScaling(first - last, last)
    return DeviceScaling(0.0, first, last - first)


def throughput(
    demand: WorkerDemand, shape: DeviceShape, scaling: DeviceScaling | None = None
) -> float:
    """Returns T_max in tokens per nanosecond and device; 0 if the model does not fit, or no batch.

    With the lines of the shape, the step of the first term is that of the batch that fills the
    caches. Without them it is the step of eq. 5.
    """
    count, lines = shape.devices, shape.lines
    caches = count * demand.device_bytes - demand.model_bytes
    if caches <= 0.0:
        return 0.0
    full = caches / demand.session_bytes
    if lines is not None:
        full_ns = lines.decode(2, full * demand.context_tokens)  # two: the line, not the lone step
        full_ns += (full - 2.0) * lines.decode_session_ns
    elif scaling is not None:
        full_ns = scaling.step_ns(count)
    else:
        raise PlanInfeasible(f"nothing is known of a worker of {count} devices")
    by_cache = full / (count * full_ns)
    if lines is None:
        return by_cache
    per_session_ns = lines.decode_context_token_ns * demand.context_tokens + lines.decode_session_ns
    batch = (demand.per_token_ns - lines.decode_ns) / max(per_session_ns, 1e-300)
    return max(0.0, min(by_cache, batch / (count * demand.per_token_ns)))


def best_shape(
    demand: WorkerDemand, shapes: Sequence[DeviceShape], scaling: DeviceScaling | None = None
) -> DeviceShape:
    """Returns the shape with the most tokens per device, and of equal ones that with fewer devices.

    Raises:
        PlanInfeasible: No shape holds the model and meets the objective.
    """
    ranked = sorted(shapes, key=lambda shape: shape.devices)
    best = max(ranked, key=lambda shape: throughput(demand, shape, scaling), default=None)
    if best is None or throughput(demand, best, scaling) <= 0.0:
        raise PlanInfeasible("no number of devices holds the model and meets the objective")
    return best
