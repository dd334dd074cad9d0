"""Launches of compiled kernels: what was compiled for some datatypes is for these alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from catenary_agent.decoders.triton_kernels.launching import KernelLauncher


class Compiler:
    """A kernel that notes how it is launched: through Triton's launcher, or as compiled before."""

    def __init__(self) -> None:
        self.compiled: list[list[torch.dtype]] = []
        self.launched: list[list[torch.dtype]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def compile_and_launch(*arguments: Any, **_: Any) -> Compiler:
            self.compiled.append([each.dtype for each in arguments if torch.is_tensor(each)])
            return self

        return compile_and_launch

    function = packed_metadata = None

    def run(self, *_: Any) -> None:
        self.launched.append(self.compiled[-1])


def test_what_was_compiled_for_some_datatypes_is_not_launched_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    kernel = Compiler()
    launch = KernelLauncher(kernel, {"SIZE": 4}, 4)
    half, whole = torch.zeros(64, dtype=torch.float16), torch.zeros(64)
    for given in ((half, half), (half, half), (half, whole), (half, whole)):
        launch((1, 1), given, 7)
    assert kernel.compiled == [[torch.float16] * 2, [torch.float16, torch.float32]]
    assert len(kernel.launched) == 2


def test_other_addresses_than_compiled_for_go_through_the_launcher() -> None:
    kernel = Compiler()
    launch = KernelLauncher(kernel, {}, 4)
    whole = torch.zeros(64)
    for _ in range(2):
        launch((1, 1), (whole[1:],))
    assert len(kernel.compiled) == 2


def test_nothing_is_launched_for_no_rows() -> None:
    kernel = Compiler()
    KernelLauncher(kernel, {}, 4)((0, 1), (torch.zeros(0),))
    assert kernel.compiled == []
