"""Texts through a real cluster: strings of an ONNX model, and the embeddings of an encoder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from catenary import Client
from cluster_harness import RunningCluster

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

TEXTS = np.array([[b"Cat", b"dog"], ["Übung".encode(), b""]], np.object_)
TWICE = [b"CatCat", b"dogdog", "ÜbungÜbung".encode(), b""]
SUMS = [4.0, -2.0]
PIECES = ["the cat sat on a mat .", "dog", "a dog on the mat sat", "cat " * 30]


def test_strings_over_grpc_raw_and_typed(cluster: RunningCluster) -> None:
    with triton_grpc.InferenceServerClient(cluster.grpc) as client:
        given = triton_grpc.InferInput("words", [2, 2], "BYTES")
        given.set_data_from_numpy(TEXTS)
        answer = client.infer("words", [given])
        assert answer.as_numpy("twice").ravel().tolist() == TWICE
        assert answer.as_numpy("sum").tolist() == SUMS
    request = service_pb2.ModelInferRequest(model_name="words")
    tensor = request.inputs.add(name="words", datatype="BYTES", shape=[2, 2])
    tensor.contents.bytes_contents.extend(TEXTS.ravel().tolist())
    with grpc.insecure_channel(cluster.grpc) as channel:
        typed = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        assert list(typed.outputs[0].contents.bytes_contents) == TWICE
        tensor.contents.bytes_contents[1] = b"\xff"
        with pytest.raises(grpc.RpcError, match="element 1 is not UTF-8"):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)


@pytest.mark.parametrize("binary", [True, False])
def test_strings_over_http_binary_and_json(cluster: RunningCluster, binary: bool) -> None:
    client = triton_http.InferenceServerClient(cluster.http.removeprefix("http://"))
    given = triton_http.InferInput("words", [2, 2], "BYTES")
    given.set_data_from_numpy(TEXTS, binary_data=binary)
    wanted = [
        triton_http.InferRequestedOutput(name, binary_data=binary) for name in ("twice", "sum")
    ]
    answer = client.infer("words", [given], outputs=wanted)
    found = [x if isinstance(x, bytes) else x.encode() for x in answer.as_numpy("twice").ravel()]
    assert found == TWICE
    assert answer.as_numpy("sum").tolist() == SUMS
    client.close()


def expected(encoder: Path, texts: list[str]) -> np.ndarray:
    """Embeddings of each text by itself, as the model's own library makes them."""
    from transformers import AutoModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(encoder / "tokenizer.json"))
    network = AutoModel.from_pretrained(encoder).eval()
    rows = []
    for text in texts:
        tokenizer.backend_tokenizer.no_truncation()
        tokens = tokenizer(text, truncation=True, max_length=24, return_tensors="pt")
        with torch.no_grad():
            vector = network(**tokens).last_hidden_state.mean(1)
        rows.append(torch.nn.functional.normalize(vector, dim=1)[0].numpy())
    return np.stack(rows)


def test_an_encoder_is_given_texts_and_answers_the_embeddings_of_its_library(
    cluster: RunningCluster, encoder: Path
) -> None:
    want = expected(encoder, PIECES)
    with Client(cluster.grpc) as client:
        metadata = client.model_metadata("sentences")
        assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
            ("text", "BYTES", [-1])
        ]
        whole = client.infer("sentences", {"text": np.array(PIECES * 4, np.object_)})
        np.testing.assert_allclose(
            whole.outputs["sentence_embedding"], np.tile(want, (4, 1)), atol=1e-5
        )

        def ask(index: int) -> np.ndarray:
            text = np.array([PIECES[index % len(PIECES)]], np.object_)
            return client.infer("sentences", {"text": text}).outputs["sentence_embedding"][0]

        # Texts of unlike lengths meet in batches; each has its own answer.
        with ThreadPoolExecutor(8) as pool:
            for index, found in enumerate(pool.map(ask, range(24))):
                np.testing.assert_allclose(found, want[index % len(PIECES)], atol=1e-5)


def test_a_batch_has_room_for_tokens_and_not_for_rows(
    cluster: RunningCluster, encoder: Path
) -> None:
    """There is room for four texts of full length (24 tokens, counted as two units of 16)."""
    short, long = ["dog", "a cat"] * 16, ["the dog sat on a cat " * 5] * 8
    texts = [*short, *long, *PIECES]
    want = expected(encoder, texts)
    with Client(cluster.grpc, admin_target=cluster.admin) as client:

        def batches(asked: list[str]) -> tuple[int, np.ndarray]:
            answer = client.infer("sentences", {"text": np.array(asked, np.object_)})
            spans = client.trace(answer.id).spans
            sent = {span.batch_id for span in spans if span.batch_id}
            return len(sent), answer.outputs["sentence_embedding"]

        number, found = batches(short)
        assert number == 2  # 128 tokens are room for 16 texts that count as 8 each
        np.testing.assert_allclose(found, want[:32], atol=1e-5)
        number, found = batches(long)
        assert number == 2  # and for 5 of 24
        np.testing.assert_allclose(found, want[32:40], atol=1e-5)
        _, found = batches(texts)
        np.testing.assert_allclose(found, want, atol=1e-5)
