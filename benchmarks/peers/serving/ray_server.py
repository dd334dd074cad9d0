"""Ray Serve on a Ray of its own: `ray_server.py HTTP_PORT FOLDER NAME=FILE ..`."""

from __future__ import annotations

import signal
import sys

import numpy as np
import ray
from onnx_session import OnnxSession, models_of
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
class OnnxDeployment:
    """A deployment of one replica with all models, which takes and gives bytes."""

    def __init__(self, files: dict[str, str]) -> None:
        self._models = {f"/{name}": OnnxSession(file) for name, file in files.items()}

    async def __call__(self, request: Request) -> Response:
        model = self._models[request.url.path]
        row = np.frombuffer(await request.body(), np.float32).reshape(model.row_shape)
        return Response(model.answer(row).tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    port, folder, *words = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(port)},
        logging_config={"enable_access_log": False},
    )
    serve.run(OnnxDeployment.bind(models_of(words)), route_prefix="/")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
