"""The servers that are compared: how each is started, and which forms of requests it takes.

Each serves one instance of every model, without batching where that is not what it does by itself,
and without a log of every request.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from benchmarks.peers.processes import environment_for
from benchmarks.peers.requests import (
    Form,
    oip_binary,
    oip_grpc,
    oip_json,
    plain_bytes,
    plain_json,
)
from benchmarks.peers.workloads import Workload
from catenaryd.local.local_cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-peers"
SERVING = Path(__file__).parent / "serving"

Protocol = Literal["grpc", "http"]


class Site:
    """A server's folder and ports, and the models it shall serve."""

    def __init__(self, folder: Path, repository: Path, models: Sequence[Workload]) -> None:
        self.folder = folder
        self.repository = repository
        self.models = models
        self.ports: dict[Protocol, int] = {"grpc": free_port(), "http": free_port()}
        self.spare_port = free_port()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def files(self) -> list[str]:
        """The models as `NAME=FILE`."""
        return [f"{each.name}={each.file}" for each in self.models]

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")


@dataclass(frozen=True, slots=True)
class Command:
    """A server's command line and environment."""

    words: list[str]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that is compared."""

    title: str
    package: str
    """The distribution whose version is told; empty for Catenary, whose commit is."""
    forms: Mapping[Protocol, Form]
    start: Callable[[Site, Path], Command]
    """Returns the command for a site, with the server's environment in a folder."""


def environment_of(name: str) -> Path:
    """Returns the folder of a server's environment, whether or not it is there."""
    return ENVIRONMENTS / name


def is_made(name: str) -> bool:
    """Returns True if the server can be started: `make peers` marks what it has installed."""
    return not PEERS[name].package or (environment_of(name) / ".installed").exists()


def version_of(name: str) -> str:
    """Returns package and version of what is installed in a server's environment."""
    package = PEERS[name].package
    if not package:
        return "this commit"
    site = next(environment_of(name).glob("lib/python*/site-packages"))
    for each in distributions(path=[str(site)], name=package):
        return f"{package} {each.version}"
    raise LookupError(f"{package} is not in {site}")


def _catenary(site: Site, _environment: Path) -> Command:
    words = [sys.executable, "-m", "catenaryd", "up", "--agents", "1"]
    for each in site.models:
        words += ["--model", each.name]
    ports = ["--grpc-port", str(site.ports["grpc"]), "--http-port", str(site.ports["http"])]
    # Its data folder is the one that the models were made in; logs and Redis data lie beside them.
    words += [*ports, "--admin-port", "0", "--metrics-port", "0"]
    words += ["--data-dir", str(site.repository.parent.resolve())]
    more = {name: os.environ[name] for name in ("CATENARY_PURE",) if name in os.environ}
    paths = os.pathsep.join(path for path in sys.path if path)
    return Command(words, environment_for(site.folder, PYTHONPATH=paths, **more))


def _own(site: Site, environment: Path, program: str, *words: str, **more: str) -> Command:
    """Returns the command of a program of `serving` in a server's own environment."""
    python = str(environment / "bin/python")
    command = [python, str(SERVING / program), *words, *site.files]
    return Command(command, _own_environment(site, environment, **more))


def _own_environment(site: Site, environment: Path, **more: str) -> dict[str, str]:
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return environment_for(site.folder, **{"PATH": path, "PYTHONPATH": str(SERVING), **more})


_TRITON_MODEL = """\
name: "{name}"
backend: "python"
max_batch_size: 0
input [{{ name: "{given}" data_type: TYPE_FP32 dims: {given_shape} }}]
output [{{ name: "{made}" data_type: TYPE_FP32 dims: {made_shape} }}]
instance_group [{{ count: 1 kind: KIND_CPU }}]
parameters: {{ key: "file" value: {{ string_value: "{file}" }} }}
"""


def _triton(site: Site, environment: Path) -> Command:
    (packages,) = environment.glob("lib/python*/site-packages")
    server = packages / "pytriton/tritonserver"
    backend = site.folder / "backends/python"
    shutil.copytree(server / "backends/python", backend, dirs_exist_ok=True)
    version = "{}.{}".format(*sys.version_info)
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, backend)
    for each in site.models:
        shapes = {"given": each.row.shape[1:], "made": each.expected.shape[1:]}
        text = _TRITON_MODEL.format(
            name=each.name,
            given=each.input_name,
            made=each.output_name,
            file=each.file,
            **{f"{name}_shape": [-1, *shape] for name, shape in shapes.items()},
        )
        site.write(f"repository/{each.name}/config.pbtxt", text)
        # The stub looks for modules beside the model, and not where PYTHONPATH says.
        for program, name in (("triton_model.py", "model.py"), ("onnx_session.py",) * 2):
            text = (SERVING / program).read_text("utf-8")
            site.write(f"repository/{each.name}/1/{name}", text)
    words = [
        str(server / "bin/tritonserver"),
        f"--model-repository={site.folder / 'repository'}",
        f"--backend-directory={site.folder / 'backends'}",
        f"--http-port={site.ports['http']}",
        f"--grpc-port={site.ports['grpc']}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--allow-metrics=false",
    ]
    # The stub looks for the wheel's libraries and for Python's own.
    libraries = [str(packages / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
    more = {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    return Command(words, _own_environment(site, environment, **more))


def _kserve(site: Site, environment: Path) -> Command:
    ports = str(site.ports["http"]), str(site.ports["grpc"])
    return _own(site, environment, "kserve_server.py", *ports)


def _mlserver(site: Site, environment: Path) -> Command:
    settings = {
        "host": "127.0.0.1",
        "http_port": site.ports["http"],
        "grpc_port": site.ports["grpc"],
        "metrics_port": site.spare_port,
        # Models run in the server's process: its usual worker costs another hop.
        "parallel_workers": 0,
        "debug": False,
    }
    site.write("models/settings.json", json.dumps(settings))
    for each in site.models:
        model = {
            "name": each.name,
            "implementation": "mlserver_model.OnnxModel",
            "parameters": {"uri": str(each.file)},
        }
        site.write(f"models/{each.name}/model-settings.json", json.dumps(model))
    words = [str(environment / "bin/mlserver"), "start", str(site.folder / "models")]
    return Command(words, _own_environment(site, environment))


def _bentoml(site: Site, environment: Path) -> Command:
    words = [str(environment / "bin/bentoml"), "serve", "bentoml_service:OnnxService"]
    words += ["--host", "127.0.0.1", "--port", str(site.ports["http"])]
    words += ["--working-dir", str(SERVING)]
    models = {each.name: str(each.file) for each in site.models}
    more = {
        "PEER_MODELS": json.dumps(models),
        "BENTOML_HOME": str(site.folder / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
    }
    return Command(words, _own_environment(site, environment, **more))


def _ray(site: Site, environment: Path) -> Command:
    # Ray makes sockets in its folder, whose paths may have 107 bytes.
    words = str(site.ports["http"]), str(site.folder / "ray")
    more = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # A busy machine does not start a process within the usual five seconds.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    return _own(site, environment, "ray_server.py", *words, **more)


def _litserve(site: Site, environment: Path) -> Command:
    return _own(site, environment, "litserve_server.py", str(site.ports["http"]))


OURS = "catenary"
_OIP: dict[Protocol, Form] = {"grpc": oip_grpc, "http": oip_binary}
PEERS: dict[str, Peer] = {
    OURS: Peer("Catenary", "", _OIP, _catenary),
    "triton": Peer("Triton", "nvidia-pytriton", _OIP, _triton),
    "kserve": Peer("KServe", "kserve", _OIP, _kserve),
    "mlserver": Peer("MLServer", "mlserver", {"grpc": oip_grpc, "http": oip_json}, _mlserver),
    "bentoml": Peer("BentoML", "bentoml", {"http": plain_json}, _bentoml),
    "ray": Peer("Ray Serve", "ray", {"http": plain_bytes}, _ray),
    "litserve": Peer("LitServe", "litserve", {"http": plain_json}, _litserve),
}
"""Every server by the name of its file in `requirements/peers`, ourselves first."""
