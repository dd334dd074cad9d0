"""Epochs of a cluster: who is placed when, what is counted, and that equal runs are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from catenary_lab.packing.baselines import BestFit
from catenary_lab.packing.policies import PolicyChoice, PolicyName
from catenary_scheduler.packing.moves import EpochResult, Item
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.packing.invariants import violations
from catenary_simulator.packing.result import PackingResult
from catenary_simulator.packing.serve import GpuKind, PackingRun, serve_packing
from catenary_simulator.packing.workload import LognormalLengths, RateStep, drawn_sessions
from catenary_simulator.placement.workload import RequestWorkload

GPU = GpuKind(cache_tokens=1600, token_bytes=1000)
POLICIES: tuple[PolicyName, ...] = (
    "best-fit",
    "worst-fit",
    "load-balancing",
    "mell",
    "mell-batched",
    "pack",
)


def sessions(*each: tuple[float, int, int]) -> RequestWorkload:
    """Moments in seconds, prompts and answers."""
    return RequestWorkload(
        [round(moment * NANOSECONDS_PER_SECOND) for moment, _, _ in each],
        [prompt for _, prompt, _ in each],
        [answer for _, _, answer in each],
    )


def serve(
    work: RequestWorkload, policy: PolicyName = "best-fit", **changes: float
) -> PackingResult:
    fixed = {"warm_up_s": 0.0, "duration_s": 10.0, **changes}
    return serve_packing(PackingRun(GPU, PolicyChoice(policy), **fixed), work)  # type: ignore[arg-type]


def test_a_session_holds_a_gpu_from_the_epoch_after_it_came_until_its_last_token() -> None:
    # 40 tokens per epoch: 100 take three epochs.
    found = serve(sessions((0.5, 160, 100)))
    assert found.gpus == (0, 1, 1, 1, 0, 0, 0, 0, 0, 0)
    assert (found.gpus_mean, found.gpus_peak) == (0.3, 1)
    assert (found.arrived, found.ended, found.undisturbed) == (1, 1, 1.0)
    # Blocks at the ends of its epochs: 200, 240 and 260 tokens.
    assert found.utilisation == pytest.approx((13 + 15 + 17) / 300)
    assert found.lower_bound_gpus == 0.3


def test_the_warm_up_is_not_measured() -> None:
    work = sessions((0, 160, 80), (5, 160, 80))
    found = serve(work, warm_up_s=4.0, duration_s=6.0)
    assert len(found.gpus) == 10
    assert (found.arrived, found.ended) == (1, 1)
    assert found.gpus_mean == pytest.approx(2 / 6)


def test_an_overflow_preempts_and_is_read_again() -> None:
    # Together 1600 tokens at first; at the end of the next epoch they would be 1680.
    found = serve(sessions((0, 760, 200), (0, 760, 200)))
    assert found.gpus[:2] == (1, 2)
    assert found.preemptions_per_s == 0.1
    assert found.recomputed_tokens_per_s == pytest.approx(800 / 10)
    assert found.undisturbed == 0.5


def test_the_same_overflow_moves_where_the_policy_does() -> None:
    found = serve(sessions((0, 760, 200), (0, 760, 200)), "load-balancing")
    assert found.gpus[:2] == (1, 2)
    assert (found.migrations_per_s, found.preemptions_per_s) == (0.1, 0.0)
    assert found.migrated_bytes_per_s == pytest.approx(800 * 1000 / 10)


def test_who_finds_no_gpu_waits_and_may_give_up() -> None:
    work = sessions((0, 1400, 120), (0, 1400, 40))
    waits = serve(work, most_gpus=1)
    assert (waits.ended, waits.gave_up, waits.queued_peak) == (2, 0, 1)
    assert waits.undisturbed == 0.5
    assert waits.queued_mean == pytest.approx(0.3)
    assert waits.held == pytest.approx(1 - 3 / 7)
    leaves = serve(work, most_gpus=1, patience_s=2.0)
    assert (leaves.ended, leaves.gave_up) == (1, 1)


def test_a_session_that_waits_does_not_grow() -> None:
    found = serve(sessions((0, 1400, 120), (0, 1400, 40)), most_gpus=1)
    assert found.gpus == (1, 1, 1, 1, 0, 0, 0, 0, 0, 0)


def test_reserved_lengths_need_no_preemption_and_more_gpus() -> None:
    work = sessions((0, 400, 400), (0, 400, 480))
    grown = serve(work)
    assert grown.gpus[0] == 1
    choice = PolicyChoice("best-fit", reserve=True)
    reserved = serve_packing(PackingRun(GPU, choice, 0.0, 10.0), work)
    assert reserved.gpus[0] == 2
    assert reserved.preemptions_per_s == 0
    # What is used is what is held, not what is reserved.
    assert reserved.utilisation < grown.utilisation


def test_sessions_larger_than_a_gpu_are_refused_or_cut() -> None:
    work = sessions((0, 1500, 200), (0, 2000, 10), (0, 100, 40))
    refused = serve(work)
    assert (refused.unfit, refused.arrived) == (2, 1)
    cut = serve(work, cut=True)
    assert (cut.unfit, cut.arrived, cut.gpus_peak) == (2, 3, 3)
    assert cut.ended == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_violated_and_equal_seeds_give_equal_runs(policy: PolicyName) -> None:
    def run(seed: int) -> PackingResult:
        work = drawn_sessions(
            LognormalLengths(80, 1),
            LognormalLengths(200, 1),
            PoissonArrivals(),
            (RateStep(3, 20), RateStep(1, 20)),
            seed,
        )
        return serve_packing(PackingRun(GPU, PolicyChoice(policy), 10, 30), work)

    found = run(1)
    assert found.violations == 0
    assert found.ended > 10
    assert found.lower_bound_gpus <= found.gpus_mean
    assert found == run(1)
    assert found != run(2)


def test_batching_moves_no_more_than_one_by_one() -> None:
    work = drawn_sessions(
        LognormalLengths(80, 1), LognormalLengths(200, 1), PoissonArrivals(), (RateStep(4, 60),), 3
    )
    single, batched = (serve(work, name, duration_s=60.0) for name in ("mell", "mell-batched"))
    assert 0 < batched.migrations_per_s < single.migrations_per_s


def test_decisions_are_timed_if_asked_for() -> None:
    moments = iter(range(0, 10**9, 500))
    run = PackingRun(GPU, PolicyChoice("pack"), 0.0, 10.0, stopwatch=lambda: next(moments))
    found = serve_packing(run, sessions((0, 100, 100)))
    assert (found.decision_p50_us, found.decision_p99_us) == (0.5, 0.5)
    assert serve(sessions((0, 100, 100))).decision_p50_us is None


def test_an_epoch_shorter_than_a_step_is_refused() -> None:
    with pytest.raises(InvalidInput, match="epoch_s"):
        serve(sessions((0, 10, 10)), epoch_s=0.01)


class Forgetful(BestFit):
    """Loses one of its sessions, and does not say so."""

    def epoch(
        self, departed: Iterable[Item], sizes: Mapping[Item, int], arrived: Mapping[Item, int]
    ) -> EpochResult:
        result = super().epoch(departed, sizes, arrived)
        if "lost" in arrived:
            self._forget("lost")
        return result


def test_what_a_policy_does_wrong_is_seen() -> None:
    policy = Forgetful(10)
    policy.epoch((), {}, {"kept": 4, "lost": 4})
    assert violations(policy, 10, {"kept": 4}, set()) == []
    assert "known" in violations(policy, 10, {"kept": 4, "lost": 4}, set())[0]
    assert "another size" in violations(policy, 10, {"kept": 5}, set())[0]
    assert "holds 4 of 3" in violations(policy, 3, {"kept": 4}, set())[0]
    assert "queued" in violations(policy, 10, {"kept": 4}, {"kept"})[0]
