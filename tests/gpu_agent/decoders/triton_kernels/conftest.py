"""Triton's kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        # Before Triton is imported, whose own functions are interpreted, too.
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def loops_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of loops are arrays with one number in Triton's interpreter, which newer versions of
    NumPy do not convert."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
