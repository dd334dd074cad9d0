from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from catenary import InvalidInputError, ModelMetadata, TensorInfo
from catenary.command_line import app
from catenary.command_line.images import Normalisation, image_input, top_classes

Image = pytest.importorskip("PIL.Image", reason="Pillow is an optional extra")


def model(shape=(1, 3, 8, 12), datatype="FP32", inputs=1) -> ModelMetadata:
    tensors = tuple(TensorInfo(f"x{n}", datatype, tuple(shape)) for n in range(inputs))
    return ModelMetadata("net", ("1",), "onnx", tensors, ())


@pytest.fixture
def picture(tmp_path):
    """Red on the left half, blue on the right."""
    pixels = np.zeros((60, 80, 3), np.uint8)
    pixels[:, :40, 0] = 255
    pixels[:, 40:, 2] = 255
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


def test_an_image_becomes_planes_of_normalised_floats(picture):
    name, array = image_input(picture, model(), Normalisation())
    assert (name, array.dtype, array.shape) == ("x0", np.float32, (1, 3, 8, 12))
    red, green, blue = array[0]
    assert red[:, 0].min() == pytest.approx(1.0)
    assert red[:, -1].max() == pytest.approx(-127 / 128)
    assert np.all(green == pytest.approx(-127 / 128))
    np.testing.assert_allclose(blue, red[:, ::-1])


def test_mean_and_scale_are_options(picture):
    _, array = image_input(picture, model(), Normalisation(0, 255))
    assert (array.min(), array.max()) == (0.0, 1.0)


def test_free_dimensions_take_the_usual_size(picture):
    _, array = image_input(picture, model((-1, 3, -1, -1)), Normalisation())
    assert array.shape == (1, 3, 224, 224)


@pytest.mark.parametrize(
    "metadata",
    [
        model((1, 1, 8, 8)),
        model(datatype="UINT8"),
        model((1, 3, 8)),
        model((4, 3, 8, 8)),
        model(inputs=2),
    ],
)
def test_models_that_take_no_image_are_named(picture, metadata):
    with pytest.raises(InvalidInputError, match="--input"):
        image_input(picture, metadata, Normalisation())


def test_a_file_that_is_no_image_is_refused():
    with pytest.raises(InvalidInputError, match="no readable image"):
        image_input(__file__, model(), Normalisation())


def test_without_pillow_the_error_says_what_to_install(picture, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidInputError, match="Pillow"):
        image_input(picture, model(), Normalisation())


def test_the_highest_classes_come_first():
    best = top_classes(np.array([1.0, 3.0, 2.0]), 2)
    assert [index for index, _ in best] == [1, 2]
    assert sum(p for _, p in top_classes(np.array([1.0, 3.0, 2.0]), 3)) == pytest.approx(1)
    assert top_classes(np.array([0.25, 0.75]), 1) == [(1, 0.75)]


def test_infer_classifies_an_image(server, picture, tmp_path):
    def classify(request):
        from catenary_protos.inference import grpc_predict_v2_pb2 as oip

        scores = np.array([[0.0, 9.0, 5.0]], np.float32)
        reply = oip.ModelInferResponse(id=request.id, raw_output_contents=[scores.tobytes()])
        reply.outputs.add(name="y", datatype="FP32", shape=scores.shape)
        return reply

    server.reply = classify
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    arguments = [
        "infer",
        "net",
        "--image",
        str(picture),
        "--target",
        server.target,
        "--top",
        "2",
        "--labels",
        str(tmp_path / "labels.txt"),
    ]
    page = CliRunner().invoke(app, arguments)
    assert page.exit_code == 0, page.output
    assert page.stdout.index("dog") < page.stdout.index("request")
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [entry["index"] for entry in found["classes"]] == [1, 2]
    assert [entry["label"] for entry in found["classes"]] == ["dog", ""]
    assert list(server.requests[0].inputs[0].shape) == [1, 3, 8, 12]
