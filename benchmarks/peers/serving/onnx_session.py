"""The model as every Python server here runs it: ONNX Runtime, one thread."""

from __future__ import annotations

from typing import Any

import onnxruntime


class OnnxSession:
    """A session of one input and one output."""

    def __init__(self, file: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(file, options, providers=providers)
        self.input_name: str = self._session.get_inputs()[0].name
        self.output_name: str = self._session.get_outputs()[0].name
        self.row_shape: tuple[int, ...] = (1, *self._session.get_inputs()[0].shape[1:])

    def answer(self, row: Any) -> Any:
        """Returns the output for a NumPy array."""
        return self._session.run([self.output_name], {self.input_name: row})[0]


def models_of(words: list[str]) -> dict[str, str]:
    """Returns the file of each model by its name, from words `NAME=FILE`."""
    return dict(word.split("=", 1) for word in words)
