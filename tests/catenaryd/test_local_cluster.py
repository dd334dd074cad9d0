"""How a local cluster is laid out."""

from __future__ import annotations

import pytest
import torch

from catenaryd.local_cluster import device_of
from services.errors import InvalidInput


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "emulated:p4"])
def test_a_named_device_is_every_agents(device: str) -> None:
    assert device_of(device, 2) == device


def test_gpus_are_dealt_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of("cuda", index) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidInput, match="device"):
        device_of("cuda", 0)
