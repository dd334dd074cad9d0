"""The model of Triton's Python backend; the file's path is a parameter of the configuration."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as utils
from onnx_session import OnnxSession


class TritonPythonModel:
    """The class that the backend looks for."""

    def initialize(self, arguments: dict[str, str]) -> None:
        parameters = json.loads(arguments["model_config"])["parameters"]
        self._model = OnnxSession(parameters["file"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        row = utils.get_input_tensor_by_name(request, self._model.input_name).as_numpy()
        output = utils.Tensor(self._model.output_name, self._model.answer(row))
        return utils.InferenceResponse([output])
