"""What the scheduler is told of a partition that cannot be loaded."""

from __future__ import annotations

import pytest

from catenary_agent.hosting.loading import _failed, _told
from catenary_protos.catenary.v1 import scheduler_pb2


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's own."""


@pytest.mark.parametrize(
    ("failure", "would_fit_elsewhere"),
    [(MemoryError(), True), (OutOfMemoryError(), True), (RuntimeError(), False)],
)
def test_running_out_of_memory_is_told_from_other_failures(
    failure: Exception, would_fit_elsewhere: bool
) -> None:
    notice = _failed(scheduler_pb2.LoadPartition(), _told(failure))
    assert notice.message().partition_failed.out_of_memory is would_fit_elsewhere
