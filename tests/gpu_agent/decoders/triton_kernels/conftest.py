"""Triton's kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        # Before Triton is imported, whose own functions are interpreted, too.
        os.environ.setdefault("TRITON_INTERPRET", "1")
