"""Language models of which one byte differs are loaded by nobody; nor are files of theirs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.decoders.onnx.building import ensure_graph
from catenary_agent.executors.device import Device
from catenary_gateway.generation.text.text_codec import files_in
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.storage.values.stored import DeploymentSpec
from catenary_services.content.record import RECORD_FILE
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import CatenaryError, ContentMismatch
from catenary_services.models.model_repository import ModelRepository
from tiny_language_models import LAYERS, copied_llama, worker_in_this_process

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

LAYOUT = CacheLayout(12, 32, (0,))


def by_onnx(repository: ModelRepository, key: ModelKey) -> None:
    whole = PartitionKey(key, 0, LAYERS)
    load_decoder(repository, whole, Device.parse("cpu"), LAYOUT, library="onnx").close()


def by_torch(repository: ModelRepository, key: ModelKey) -> None:
    whole = PartitionKey(key, 0, LAYERS)
    load_decoder(repository, whole, Device.parse("cpu"), LAYOUT, library="torch").close()


def by_torch_in_pieces(repository: ModelRepository, key: ModelKey) -> None:
    """Loads with weights that are read as for a CUDA device."""
    from catenary_agent.decoders.transfers.tensor_reader import TensorReader

    reader_for = partial(TensorReader, piece_bytes=1000, threads=2)
    with patch("catenary_agent.decoders.torch.torch_weights.reader_for", reader_for):
        by_torch(repository, key)


def by_gateway(repository: ModelRepository, key: ModelKey) -> None:
    with repository.reading(key) as reading:
        files_in(reading)


async def deployed(repository: ModelRepository, key: ModelKey) -> None:
    await Deployments(repository).deploy(str(key), DeploymentSpec())


Reader = Callable[[ModelRepository, ModelKey], None]
READERS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    "onnx": (
        by_onnx,
        (
            "model.yaml",
            "decoder.json",
            "model.safetensors",
            "onnx-fp32/model.onnx",
            "onnx-fp32/model.onnx.data",
            RECORD_FILE,
        ),
    ),
    "torch": (
        by_torch,
        ("model.yaml", "decoder.json", "model.safetensors", "config.json", RECORD_FILE),
    ),
    "torch in pieces": (by_torch_in_pieces, ("model.safetensors", RECORD_FILE)),
    "gateway": (
        by_gateway,
        ("tokenizer.json", "tokenizer_config.json", "config.json", RECORD_FILE),
    ),
}


def alter(path: Path, share: float, bits: int) -> None:
    content = bytearray(path.read_bytes())
    content[min(len(content) - 1, int(share * len(content)))] ^= bits
    path.write_bytes(content)


@pytest.mark.parametrize("reader", READERS)
def test_an_unaltered_copy_is_loaded(tmp_path: Path, reader: str) -> None:
    READERS[reader][0](*copied_llama(tmp_path / "models"))


@pytest.mark.parametrize("reader", READERS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), share=st.floats(0, 1), bits=st.integers(1, 255))
def test_a_copy_with_one_byte_altered_is_not_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    reader: str,
    data: st.DataObject,
    share: float,
    bits: int,
) -> None:
    load, files = READERS[reader]
    repository, key = copied_llama(tmp_path_factory.mktemp("altered") / "models")
    name = data.draw(st.sampled_from(files))
    alter(repository.folder(key) / name, share, bits)
    with pytest.raises(ContentMismatch) as raised:
        load(repository, key)
    assert name in raised.value.message
    shutil.rmtree(repository.root)


@pytest.mark.parametrize("name", ["model.yaml", "decoder.json", RECORD_FILE])
async def test_a_scheduler_deploys_no_altered_copy(tmp_path: Path, name: str) -> None:
    repository, key = copied_llama(tmp_path / "models")
    await deployed(repository, key)
    alter(repository.folder(key) / name, 0.5, 1)
    with pytest.raises(ContentMismatch, match=name.replace(".", r"\.")):
        await deployed(repository, key)


def test_a_copy_without_its_record_has_another_digest(tmp_path: Path) -> None:
    repository, key = copied_llama(tmp_path / "models")
    digest = repository.content_digest(key)
    (repository.folder(key) / RECORD_FILE).unlink()
    assert repository.content_digest(key) == digest
    (repository.folder(key) / RECORD_FILE).unlink()
    alter(repository.folder(key) / "onnx-fp32" / "model.onnx.data", 0.5, 1)
    assert repository.content_digest(key) != digest


def test_weights_that_were_added_later_are_not_loaded(tmp_path: Path) -> None:
    repository, key = copied_llama(tmp_path / "models")
    folder = repository.folder(key)
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    with pytest.raises(ContentMismatch, match="added later"):
        by_torch(repository, key)


def test_a_missing_file_is_said_to_be_missing_here(tmp_path: Path) -> None:
    repository, key = copied_llama(tmp_path / "models")
    (repository.folder(key) / "onnx-fp32" / "model.onnx.data").unlink()
    with pytest.raises(CatenaryError, match=r"model\.onnx"):
        by_onnx(repository, key)


def test_a_graph_made_on_demand_is_recorded_and_one_left_half_made_is_made_anew(
    tmp_path: Path,
) -> None:
    repository, key = copied_llama(tmp_path / "models")
    digest = repository.content_digest(key)
    left = repository.folder(key) / "onnx-int8"
    left.mkdir()
    (left / "model.onnx").write_bytes(b"half")  # by a builder that died before it was recorded
    with worker_in_this_process():
        made = ensure_graph(repository, key, "int8")
        stamp = (made / "model.onnx").stat().st_mtime_ns
        assert ensure_graph(repository, key, "int8") == made
    assert (made / "model.onnx").stat().st_mtime_ns == stamp
    assert (made / "model.onnx").read_bytes() != b"half"
    record = repository.content(key)
    assert record is not None
    assert record.files["onnx-int8/model.onnx"].derived
    assert record.digest == digest
    alter(made / "model.onnx", 0.5, 1)
    with pytest.raises(ContentMismatch, match="onnx-int8"), repository.reading(key) as reading:
        reading.begin(made / "model.onnx")


def test_a_graph_is_not_made_of_altered_weights(tmp_path: Path) -> None:
    repository, key = copied_llama(tmp_path / "models")
    alter(repository.folder(key) / "model.safetensors", 0.5, 1)
    with worker_in_this_process(), pytest.raises(ContentMismatch, match=r"model\.safetensors"):
        ensure_graph(repository, key, "int8")
    assert not (repository.folder(key) / "onnx-int8").exists()
