"""The blocking half of the SDK is what the asyncio half makes of itself."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from cluster_harness import ROOT


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "client/generate.py"
    spec = importlib.util.spec_from_file_location("generate_sdk", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_blocking_client_is_generated_from_the_asyncio_client(generator) -> None:
    for name, source in generator.generate().items():
        committed = (generator.PACKAGE / f"{name}.py").read_text()
        assert committed == source, f"catenary/{name}.py is stale; run `make sdk`"


def test_a_phrase_that_no_module_says_any_more_is_noticed(generator, monkeypatch) -> None:
    monkeypatch.setattr(generator, "PHRASES", (("never said", "never read"),))
    with pytest.raises(SystemExit, match="never said"):
        generator.generate()
