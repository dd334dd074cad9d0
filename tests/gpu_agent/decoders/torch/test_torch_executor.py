"""The PyTorch decoder: every family as `transformers` says it, and what goes wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import weakref

import torch

from catenary_agent.decoders.base import CacheLayout, StepItem, set_layout
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.devices.device_errors import DeviceErrorKind, error_kind_of
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import DecoderForm
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import InternalError, InvalidInput, NotSupported, Overloaded
from catenary_services.models.model_repository import ModelRepository
from small_models.decoder_ring import DecoderRing
from small_models.tiny_decoders import (
    FAMILIES,
    LAYERS,
    make_tiny_decoder,
    prompts,
    reference_model,
    reference_tokens,
)

TOKENS = 96

Tiny = tuple[ModelRepository, ModelKey]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny_decoder(tmp_path_factory.mktemp("models"), "llama")


def decoder(tiny: Tiny, first: int = 0, last: int = LAYERS, slots: int = 40) -> TorchDecoder:
    repository, model = tiny
    layout = CacheLayout(slots, TOKENS, (first,))
    return TorchDecoder(repository, PartitionKey(model, first, last), Device("cpu"), layout, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    tiny = make_tiny_decoder(tmp_path, family)
    model = reference_model(*tiny)
    texts = prompts(3, 30)
    expected = {at: reference_tokens(model, text, 20) for at, text in enumerate(texts)}
    assert len(set(map(tuple, expected.values()))) == len(texts)  # not the same for any prompt
    ring = DecoderRing([decoder(tiny, 0, 1), decoder(tiny, 1, LAYERS)])
    assert ring.generate(dict(enumerate(texts)), 20, chunk=7) == expected


def test_a_row_does_not_depend_on_its_batch_by_more_than_rounding(llama: Tiny) -> None:
    executor = decoder(llama)
    texts = [np.array(text, np.int64) for text in prompts(6, 30, seed=9)]
    alone = []
    for s, text in enumerate(texts):
        executor.open_session(s, 0)
        alone.append(executor.step([StepItem(s, 0, text, "logits")])[0])
        executor.close_session(s)
    for s in range(6):
        executor.open_session(s, 0)
    together = executor.step([StepItem(s, 0, t, "logits") for s, t in enumerate(texts)])
    for one, all_of_them in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, all_of_them, rtol=1e-4, atol=1e-4)


def test_only_the_weights_of_its_blocks_are_held(llama: Tiny) -> None:
    repository, key = llama
    held = repository.decoder_table(key).held(DecoderForm.TORCH_FLOAT32)
    for first, last in ((0, 1), (1, 3), (3, 4), (0, 4)):
        assert decoder(llama, first, last).memory_bytes == held.weight_bytes(first, last)


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    tiny = make_tiny_decoder(tmp_path, "llama", shards=3)
    files = list(tiny[0].folder(tiny[1]).glob("*.safetensors"))
    assert len(files) >= 3
    (text,) = prompts(1, 10)
    ring = DecoderRing([decoder(tiny, 0, 2), decoder(tiny, 2, LAYERS)])
    assert ring.generate({1: text}, 5) == {1: reference_tokens(reference_model(*tiny), text, 5)}


def test_a_family_nobody_knows_is_refused(tmp_path: Path) -> None:
    tiny = make_tiny_decoder(tmp_path, "llama")
    config = tiny[0].folder(tiny[1]) / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"gpt2"'))
    with pytest.raises(NotSupported, match="gpt2"):
        decoder(tiny)


def test_a_missing_tensor_is_named(llama: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny = make_tiny_decoder(tmp_path, "llama")
    file = tiny[0].model_file(tiny[1])
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(InvalidInput, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        decoder(tiny, 2, 3)
    assert decoder(tiny, 0, 2).sessions == 0


def test_a_device_that_is_not_there_is_refused(llama: Tiny) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    repository, model = llama
    layout = CacheLayout(4, 16, (0,))
    with pytest.raises(NotSupported, match="0 CUDA devices"):
        TorchDecoder(repository, PartitionKey(model, 0, 4), Device("cuda"), layout, 1)


def test_caches_that_do_not_fit_into_memory_are_refused_and_the_old_ones_stay(llama: Tiny) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    executor.step([StepItem(1, 0, np.array([5, 6]), "nothing")])
    before = executor.layout
    with pytest.raises(Overloaded, match="no memory for caches"):
        set_layout(executor, CacheLayout(10**12, TOKENS, (0,)))
    assert executor.layout == before
    assert executor.step([StepItem(1, 2, np.array([7]), "logits")])[0] is not None
    with pytest.raises(Overloaded):
        decoder(llama, slots=10**12)


def test_a_library_that_fails_is_our_error_and_the_session_can_go_on(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    item = StepItem(1, 0, np.array([5, 6]), "logits")

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(executor._model, "forward", broken)
        with pytest.raises(InternalError, match="illegal memory access"):
            executor.step([item])
    assert executor.step([item])[0] is not None


def test_a_step_without_memory_holds_none_when_it_is_tried_again_in_parts(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = decoder(llama)
    executor.open_session(1, 0)
    item = StepItem(1, 0, np.array([5, 6]), "logits")
    held = []

    def too_large(*_: object) -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(executor._model, "forward", too_large)
        with pytest.raises(InternalError, match="out of memory") as caught:
            executor.step([item])
    assert held[0]() is None
    assert error_kind_of(caught.value) is DeviceErrorKind.MEMORY
    assert executor.step([item])[0] is not None
