"""An engine for tests, run by the agent's own script in place of vLLM or llama-server.

It speaks their protocols on the Unix socket it is given. Its token at position p is that of emulated
decoders, a function of p alone, so that an answer that goes on elsewhere is known beforehand. What
it does wrong is asked for by an argument of the model: `fake.fault`, or `--fake-fault=`. With an
adapter a model says what it would say one place further on, with the next one two places, and so on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

VERSION = "1.2.3"
_MULTIPLIER = 2_654_435_761


def token_at(position: int, vocabulary: int, end: int) -> int:
    token = position * _MULTIPLIER % vocabulary
    while token == end:
        token = (token + 1) % vocabulary
    return token


def adapters_of(arguments: list[str], pairs: dict[str, str]) -> list[str]:
    """Returns the names by which vLLM serves adapters, of which each has files and room."""
    if "--lora-modules" not in arguments:
        return []
    given = [json.loads(each) for each in arguments[arguments.index("--lora-modules") + 1 :]]
    for each in given:
        said = json.loads(Path(each["path"], "adapter_config.json").read_text())
        assert said["r"] <= int(pairs["--max-lora-rank"])
        assert Path(each["path"], "adapter_model.safetensors").exists()
    assert "--enable-lora" in arguments
    assert int(pairs["--max-loras"]) == len(given)
    return [each["name"] for each in given]


class Plan:
    """What an engine was started with."""

    def __init__(self, engine: str, arguments: list[str]) -> None:
        self.engine = engine
        self.names = ["model"]
        if engine == "llama_server":
            given = json.loads(arguments[0])
            Path(given["model.path"]).stat()  # it is there
            self.socket = given["hostnames"][0]
            self.sessions, self.tokens = given["n_parallel"], given["n_ctx"]
            self.is_unified = given["kv_unified"]
            own = {n.removeprefix("fake."): v for n, v in given.items() if n.startswith("fake.")}
        else:
            pairs = dict(zip(arguments, [*arguments[1:], ""], strict=True))
            Path(pairs["--model"]).stat()
            self.socket = pairs["--uds"]
            self.sessions = int(pairs["--max-num-seqs"])
            self.block_tokens = int(pairs["--block-size"])
            self.blocks = int(pairs["--num-gpu-blocks-override"])
            self.names += adapters_of(arguments, pairs)
            own = {
                name.removeprefix("--fake-").replace("-", "_"): value
                for name, _, value in (each.partition("=") for each in arguments)
                if name.startswith("--fake-")
            }
        self.token_s = float(own.get("token_s", 0.001))
        self.vocabulary = int(own.get("vocabulary", 259))
        self.end = int(own.get("end", 1))
        self.end_at = int(own.get("end_at", 0))
        """The position of an end-of-text token; 0 for none."""
        self.fault = str(own.get("fault", ""))
        self.is_warm = False
        """True once it was asked with a grammar."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    plan: Plan

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""

    def address_string(self) -> str:
        return "agent"

    def do_GET(self) -> None:
        plan = self.plan
        if self.path == "/health":
            self.answer(503 if plan.fault == "never_ready" else 200, b"{}")
        elif self.path == "/props":
            slots = 1 if plan.fault == "small" else plan.sessions
            each = plan.tokens if plan.is_unified else plan.tokens // plan.sessions
            settings = {"total_slots": slots, "default_generation_settings": {"n_ctx": each}}
            self.answer(200, json.dumps(settings).encode())
        elif self.path == "/metrics":
            labels = f'block_size="{plan.block_tokens}",num_gpu_blocks="{plan.blocks}"'
            self.answer(200, f"vllm:cache_config_info{{{labels}}} 1.0\n".encode())
        else:
            self.answer(404, b"")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        has_grammar = bool(asked.get("grammar") or asked.get("structured_outputs"))
        if self.plan.fault == "lazy" and has_grammar and asked["seed"] and not self.plan.is_warm:
            os._exit(9)
        self.plan.is_warm |= has_grammar
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self.plan.fault == "plain" and has_grammar:
                self.answer(400, b'{"error":{"message":"no grammars here"}}')
            elif self.plan.fault == "refuses" and asked["seed"]:
                self.answer(400, b'{"error":{"message":"no such thing"}}')
            elif asked.get("model", "model") not in self.plan.names:
                self.answer(404, b'{"error":{"message":"no such model"}}')
            else:
                self.generate(asked)

    def generate(self, asked: dict[str, Any]) -> None:
        plan = self.plan
        prompt = asked["prompt"]
        most = asked["n_predict" if plan.engine == "llama_server" else "max_tokens"]
        shift = plan.names.index(asked.get("model", "model"))
        tokens, finish = [], "length"
        for position in range(len(prompt), len(prompt) + most):
            if position == plan.end_at and not asked["ignore_eos"]:
                tokens.append(plan.end)
                finish = "stop"
                break
            tokens.append(token_at(position + shift, plan.vocabulary, plan.end))
        self.send_response(200)
        self.end_headers()
        is_real = bool(asked["seed"])  # the agent measures with the seed 0
        if plan.fault == "silent" and is_real:
            time.sleep(60)
        for count in range(1, len(tokens) + 1):
            time.sleep(plan.token_s)
            if plan.fault == "garbage" and is_real and count == 3:
                self.line(b"data: {no json")
            if plan.fault == "long_line" and is_real and count == 3:
                self.line(b"data: " + b"x" * (5 << 20))
            if plan.fault == "breaks_off" and is_real and count == 3:
                return
            if plan.fault == "other_vocabulary" and is_real and count == 3:
                tokens[count - 1] = plan.vocabulary
            if plan.engine == "llama_server":
                said = tokens[count - 1 : count]
                self.event(stop=False, content="x", tokens=said, tokens_predicted=count)
            else:
                self.event(choices=[{"token_ids": tokens[count - 1 : count]}])
        if plan.engine == "llama_server":
            kind = "eos" if finish == "stop" else "limit"
            self.event(
                stop=True, stop_type=kind, content="", tokens=[], tokens_predicted=len(tokens)
            )
        else:
            self.event(choices=[{"token_ids": [], "finish_reason": finish}])
            self.line(b"data: [DONE]")

    def event(self, **said: Any) -> None:
        self.line(b"data: " + json.dumps(said).encode())

    def line(self, text: bytes) -> None:
        self.wfile.write(text + b"\n\n")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)


class UnixServer(socketserver.ThreadingMixIn, HTTPServer):
    """A server on a Unix socket with a thread for each request."""

    address_family = socketserver.socket.AF_UNIX
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "engine", 0

    def get_request(self) -> tuple[Any, str]:
        return self.socket.accept()[0], "agent"


def serve(engine: str, arguments: list[str]) -> None:
    plan = Plan(engine, arguments)
    if plan.fault == "ends":
        print("cannot find the weights", flush=True)
        raise SystemExit(9)
    if plan.fault == "worker":  # as vLLM does, which computes in processes of its own
        subprocess.Popen(["sleep", "600"])
    Handler.plan = plan
    print("loading", flush=True)
    UnixServer(plan.socket, Handler).serve_forever()


def main(script: str, engine: str, arguments: list[str]) -> None:
    """Runs the agent's script with this engine in the place of the real one."""
    spec = importlib.util.spec_from_file_location("engine_child", script)
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.version_of = lambda name: VERSION
    child.run_vllm = child.run_llama_server = lambda given: serve(engine, given)
    child.main(engine, arguments)


def fake_python(folder: Path) -> Path:
    """Writes an `engine_python` that has this engine, and returns its path."""
    path = folder / "engine-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{os.path.abspath(__file__)}" "$@"\n')
    path.chmod(0o755)
    return path


def fake_vllm(folder: Path) -> Path:
    """Writes an `engine_python` that finds this engine as the package of vLLM; returns its path.

    Unlike that of `fake_python`, it runs the agent's script as it is.
    """
    packages = folder / "packages"
    module = packages / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    (packages / "vllm-1.2.3.dist-info").mkdir()
    (packages / "vllm-1.2.3.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 1.2.3\n")
    here = Path(__file__).resolve().parent
    (module / "api_server.py").write_text(
        f"import sys\nsys.path.append({str(here)!r})\n"
        "import fake_engine\nfake_engine.serve('vllm', sys.argv[1:])\n"
    )
    path = folder / "vllm-python"
    path.write_text(f'#!/bin/sh\nexport PYTHONPATH="{packages}"\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
