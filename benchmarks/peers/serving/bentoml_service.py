"""The service that `bentoml serve` runs; `PEER_MODELS` holds its models as JSON."""

from __future__ import annotations

import json
import os

import bentoml
import numpy as np
from onnx_session import OnnxSession

FILES = json.loads(os.environ["PEER_MODELS"])


@bentoml.service(workers=1, logging={"access": {"enabled": False}}, traffic={"timeout": 60})
class OnnxService:
    """A service with a route for each model."""

    def __init__(self) -> None:
        self._models = {name: OnnxSession(file) for name, file in FILES.items()}

    @bentoml.api(route="/tiny")
    def tiny(self, row: np.ndarray) -> np.ndarray:
        return self._answer("tiny", row)

    @bentoml.api(route="/efficientnet-lite0")
    def efficientnet(self, row: np.ndarray) -> np.ndarray:
        return self._answer("efficientnet-lite0", row)

    @bentoml.api(route="/payload")
    def payload(self, row: np.ndarray) -> np.ndarray:
        return self._answer("payload", row)

    def _answer(self, name: str, row: np.ndarray) -> np.ndarray:
        answer: np.ndarray = self._models[name].answer(row.astype(np.float32))
        return answer
