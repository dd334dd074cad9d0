"""Graphs and exported programs of every kind compute in parts what the whole computes.

Parts are cut everywhere, and asked with other sizes than the model was exported with.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from catenary_agent.partitioning import jailed
from catenary_agent.preparing import cutting, prepare
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.errors import CatenaryError, InvalidInput, NotSupported
from compared_models import onnx_files
from compared_models.graphs import KEY, GraphCase, compared, repository_of
from compared_models.page import Row, check_refused, check_written
from small_models.jail_here import run_here

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX with it")

from compared_models import nets


@pytest.fixture(autouse=True)
def _small_and_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows blocks of any length, and spares a process of the jail for each part."""
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
    for module in (jailed, prepare):
        monkeypatch.setattr(module, "run_jailed", run_here)


def of(cases: dict[tuple[str, str], GraphCase]) -> list[object]:
    """Returns cases as parameters; what takes seconds is for the nightly run."""
    return [
        pytest.param(
            *(name, case),
            id=", ".join(name),
            marks=[pytest.mark.nightly] if case.is_slow else [],
        )
        for name, case in cases.items()
    ]


@pytest.mark.parametrize(("name", "case"), of(onnx_files.CASES))
def test_files_written_by_hand(name: tuple[str, str], case: GraphCase, tmp_path: Path) -> None:
    check_written(Row(*name, "ONNX Runtime"), "the whole file", compared(tmp_path, case))


@pytest.mark.parametrize(("name", "case"), of(nets.onnx_cases()))
def test_files_of_both_exporters(name: tuple[str, str], case: GraphCase, tmp_path: Path) -> None:
    check_written(Row(*name, "ONNX Runtime"), "PyTorch", compared(tmp_path, case))


@pytest.mark.parametrize(("name", "case"), of(nets.program_cases()))
def test_exported_programs(name: tuple[str, str], case: GraphCase, tmp_path: Path) -> None:
    check_written(Row(*name, "PyTorch"), "PyTorch", compared(tmp_path, case))


@pytest.mark.parametrize("what", onnx_files.REFUSED)
def test_files_that_cannot_be_served_are_refused(tmp_path: Path, what: str) -> None:
    repository = repository_of(tmp_path)
    onnx_files.REFUSED[what](repository)
    with pytest.raises(CatenaryError) as refused:
        prepare_model(repository, KEY)
    assert isinstance(refused.value, InvalidInput | NotSupported)
    assert "\n" not in refused.value.message
    assert "block_node" not in refused.value.message
    check_refused("ONNX", what, refused.value.message)


@pytest.mark.parametrize("what", nets.REFUSED, ids=", ".join)
def test_exports_that_cannot_be_served_are_refused(tmp_path: Path, what: tuple[str, str]) -> None:
    form = "pytorch_exported" if what[0] == "torch.export" else "onnxruntime_onnx"
    repository = repository_of(tmp_path, form)
    nets.REFUSED[what](repository)
    with pytest.raises(InvalidInput) as refused:
        prepare_model(repository, KEY)
    check_refused(*what, refused.value.message)
