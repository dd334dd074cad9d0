"""The runtime that MLServer loads; its settings name the file."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from onnx_session import OnnxSession


class OnnxModel(MLModel):  # type: ignore[misc]
    """A model as MLServer calls it."""

    async def load(self) -> bool:
        self._model = OnnxSession(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        row = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output(self._model.output_name, self._model.answer(row))
        return InferenceResponse(model_name=self.name, outputs=[output])
