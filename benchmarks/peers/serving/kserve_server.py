"""KServe's Python server: `kserve_server.py HTTP_PORT GRPC_PORT NAME=FILE ..`."""

from __future__ import annotations

import logging
import sys
from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from onnx_session import OnnxSession, models_of


class OnnxModel(Model):  # type: ignore[misc]
    """A model as KServe calls it."""

    def __init__(self, name: str, file: str) -> None:
        super().__init__(name)
        self._model = OnnxSession(file)
        self.ready = True

    async def predict(
        self,
        payload: InferRequest,
        headers: Any = None,
        response_headers: Any = None,
    ) -> InferResponse:
        answer = self._model.answer(payload.inputs[0].as_numpy())
        output = InferOutput(self._model.output_name, list(answer.shape), "FP32")
        output.set_data_from_numpy(answer, binary_data=True)
        binary = payload.use_binary_outputs
        return InferResponse(payload.id or "", self.name, [output], use_binary_outputs=binary)


if __name__ == "__main__":
    http_port, grpc_port, *words = sys.argv[1:]
    logging.disable(logging.INFO)  # it logs each request three times
    models = [OnnxModel(name, file) for name, file in models_of(words).items()]
    server = ModelServer(
        http_port=int(http_port),
        grpc_port=int(grpc_port),
        workers=1,
        enable_latency_logging=False,
    )
    server.start(models)
