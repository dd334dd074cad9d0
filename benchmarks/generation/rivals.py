"""Rival engines, each in a process of its own: `python -m benchmarks.generation.rivals`.

An engine speaks lines of JSON on stdin and stdout, so that a bench can take turns between engines:

    {"prompt": [token ids], "tokens": 64}   ->   {"seconds": [moment of every token]}

Moments are seconds since the request was read. Every engine decodes greedily, and exactly as many
tokens as asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[int], int], list[float]]


class Rival:
    """A child process that generates with another engine."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        environment = {
            **os.environ,
            **{name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")},
            "OPENBLAS_NUM_THREADS": str(threads),
        }
        arguments = [engine, str(folder), "--threads", str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.generation.rivals", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def generate(self, prompt: list[int], tokens: int) -> list[float]:
        """Returns the time of every token, in seconds since the request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"prompt": prompt, "tokens": tokens}), file=self._process.stdin, flush=True
        )
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rival ended with {self._process.wait(5)}")
        seconds: list[float] = json.loads(line)["seconds"]
        return seconds

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def transformers(folder: Path, threads: int) -> Generate:
    """Returns the generator of `transformers.generate` in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    class Moments:
        """A streamer that notes when tokens arrive; the first call is the prompt."""

        def __init__(self) -> None:
            self.moments: list[float] = []

        def put(self, _tokens: Any) -> None:
            """Notes the time of a token."""
            self.moments.append(time.perf_counter())

        def end(self) -> None:
            """Does nothing when the answer is complete."""

    def generate(prompt: list[int], tokens: int) -> list[float]:
        ids = torch.tensor([prompt])
        seen = Moments()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                streamer=seen,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        return seen.moments[1:]

    return generate


def genai(folder: Path, threads: int) -> Generate:
    """Returns the generator of onnxruntime-genai on the whole graph.

    `folder` is its builder's output.
    """
    import onnxruntime_genai as og

    config = og.Config(str(folder))
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = og.Model(config)

    def generate(prompt: list[int], tokens: int) -> list[float]:
        parameters = og.GeneratorParams(model)
        length = len(prompt) + tokens
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompt)
        moments = []
        for _ in range(tokens):
            generator.generate_next_token()
            moments.append(time.perf_counter())
        return moments

    return generate


def ctranslate2(folder: Path, threads: int, precision: str) -> Generate:
    """Returns the generator of CTranslate2 on the same weights, converted beside them."""
    import ctranslate2 as ct2
    from transformers import AutoTokenizer

    converted = folder.parent / f"ctranslate2-{precision}"
    if not converted.exists():
        ct2.converters.TransformersConverter(str(folder)).convert(
            str(converted), quantization=precision
        )
    engine = ct2.Generator(
        str(converted), device="cpu", intra_threads=threads, inter_threads=1, compute_type=precision
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def generate(prompt: list[int], tokens: int) -> list[float]:
        pieces = tokenizer.convert_ids_to_tokens(prompt)
        steps = engine.generate_tokens(
            pieces, max_length=tokens, min_length=tokens, sampling_topk=1, end_token=[]
        )
        return [time.perf_counter() for _ in steps]

    return generate


def read_seconds(mebibytes: int = 512) -> float:
    """Returns the seconds in which this process reads some memory: the measure of the floor.

    It is the faster of a dot product with itself and a matrix-vector product: both read every byte
    once, and their arithmetic hides behind it.
    """
    import torch

    width = 1024
    matrix = torch.ones(mebibytes * (1 << 20) // 4 // width, width)
    vector, flat = torch.ones(width), matrix.view(-1)
    best = 1e9
    for _ in range(5):
        for kernel in (lambda: torch.dot(flat, flat), lambda: torch.mv(matrix, vector)):
            started = time.perf_counter()
            kernel()
            best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Serves requests until stdin ends."""
    parser = argparse.ArgumentParser(prog="benchmarks.generation.rivals", description=__doc__)
    parser.add_argument(
        "engine", choices=["transformers", "genai", "ct2-float32", "ct2-int8", "memory"]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    folder, threads = arguments.folder, arguments.threads
    engine: Generate
    if arguments.engine == "memory":
        import torch

        torch.set_num_threads(threads)

        def engine(_prompt: list[int], _tokens: int) -> list[float]:
            started = time.perf_counter()
            return [started + read_seconds()]
    elif arguments.engine == "transformers":
        engine = transformers(folder, threads)
    elif arguments.engine == "genai":
        engine = genai(folder, threads)
    else:
        engine = ctranslate2(folder, threads, arguments.engine.removeprefix("ct2-"))
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        moments = engine(request["prompt"], request["tokens"])
        print(json.dumps({"seconds": [moment - started for moment in moments]}), flush=True)


if __name__ == "__main__":
    main()
