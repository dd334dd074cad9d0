from __future__ import annotations

import pytest

from catenary_services.errors import InvalidInput
from catenaryd.sources.choosing import ModelForm, choose
from catenaryd.sources.listing import ListedFile


def files(*paths: str) -> list[ListedFile]:
    return [ListedFile(path, 10) for path in paths]


def paths(*listed: str, wanted: str = "") -> tuple[ModelForm, list[str]]:
    chosen = choose(files(*listed), wanted, "hf:org/name")
    return chosen.form, [each.path for each in chosen.files]


def test_weights_come_with_config_tokenizer_and_template_and_nothing_else() -> None:
    form, chosen = paths(
        "README.md",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/params.json",
        "onnx/model.onnx",
    )
    assert form is ModelForm.SAFETENSORS
    assert chosen == [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_of_several_gguf_files_one_is_chosen_by_its_name() -> None:
    listed = ("README.md", "Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf", "Tiny-F16.gguf")
    assert paths(*listed) == (ModelForm.GGUF, ["Tiny-Q4_K_M.gguf"])
    assert paths(*listed, wanted="Tiny-F16.gguf") == (ModelForm.GGUF, ["Tiny-F16.gguf"])
    with pytest.raises(InvalidInput, match=r"several models, name one of a.gguf, b.gguf"):
        paths("a.gguf", "b.gguf")
    with pytest.raises(InvalidInput, match=r"join the parts first"):
        paths("a-00001-of-00002.gguf", wanted="a-00001-of-00002.gguf")


def test_an_onnx_file_comes_with_the_files_of_its_weights() -> None:
    assert paths("model.onnx", "model.onnx.data", "other.onnx", "x.txt") == (
        ModelForm.ONNX,
        ["model.onnx", "model.onnx.data"],
    )
    assert paths("onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_int8.onnx")[1] == [
        "onnx/model.onnx",
        "onnx/model.onnx_data",
    ]
    assert paths("net.pt2") == (ModelForm.EXPORTED, ["net.pt2"])


def test_a_source_without_a_model_is_refused_with_what_it_has() -> None:
    with pytest.raises(
        InvalidInput, match=r"no config.json with safetensors.*has README.md, a.bin"
    ):
        paths("README.md", "a.bin")
    with pytest.raises(InvalidInput, match=r"has no file 'b.onnx'; it has a.onnx"):
        paths("a.onnx", wanted="b.onnx")
    with pytest.raises(InvalidInput, match=r"ends with none of"):
        paths("a.bin", wanted="a.bin")


def test_names_that_lead_out_of_the_folder_are_not_there() -> None:
    with pytest.raises(InvalidInput, match=r"it has nothing"):
        paths("../model.onnx", "/model.onnx", "a/../model.onnx")
