"""LitServe: `litserve_server.py HTTP_PORT NAME=FILE ..`."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np
from onnx_session import OnnxSession, models_of


class OnnxApi(litserve.LitAPI):  # type: ignore[misc]
    """A model as LitServe calls it, in a worker process of its own."""

    def __init__(self, name: str, file: str) -> None:
        super().__init__(api_path=f"/{name}")
        self._file = file

    def setup(self, device: str) -> None:
        self._model = OnnxSession(self._file)

    # Without an annotation LitServe hands over what it reads of JSON.
    def decode_request(self, request) -> np.ndarray:  # type: ignore[no-untyped-def]
        return np.asarray(request["row"], np.float32)

    def predict(self, row: np.ndarray) -> np.ndarray:
        answer: np.ndarray = self._model.answer(row)
        return answer

    def encode_response(self, answer: np.ndarray) -> list[Any]:
        found: list[Any] = answer.tolist()
        return found


if __name__ == "__main__":
    port, *words = sys.argv[1:]
    apis = [OnnxApi(name, file) for name, file in models_of(words).items()]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(
        host="127.0.0.1",
        port=int(port),
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
    )
