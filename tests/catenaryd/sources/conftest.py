from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from catenaryd.sources import hub
from shared_helpers.model_mirror import ModelMirror, model_mirror


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelMirror]:
    """A mirror, and an environment in which nothing of this machine's hub is known."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_PAUSE_S", 0.01)
    with model_mirror() as made:
        yield made
