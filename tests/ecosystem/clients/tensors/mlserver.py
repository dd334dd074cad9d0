"""MLServer's command `mlserver infer`, which asks for many rows from a file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from features import API_KEY, BASE_URL, NUMBER_MODEL, WORD_MODEL, feature, report


def infer(model: str, requests: list[dict[str, object]], *options: str) -> list[list[object]]:
    """Returns the data of the first output of each answer, in the order of the requests."""
    given, answered = Path("requests.jsonl"), Path("answers.jsonl")
    given.write_text("".join(json.dumps(request) + "\n" for request in requests))
    command = ["mlserver", "infer", "-u", BASE_URL.removeprefix("http://"), "-m", model]
    command += ["-i", str(given), "-o", str(answered), "-H", f"Authorization: Bearer {API_KEY}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    if any("outputs" not in answer for answer in answers):
        raise RuntimeError(str(answers))
    answers.sort(key=lambda answer: answer["parameters"]["batch_index"])
    return [answer["outputs"][0]["data"] for answer in answers]


def numbers(count: int) -> list[dict[str, object]]:
    return [
        {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [float(at)] * 4}]}
        for at in range(count)
    ]


@feature("infer, as JSON and with --binary-data")
def rows() -> None:
    for options in ((), ("--binary-data",)):
        assert infer(NUMBER_MODEL, numbers(6), *options) == [[2.0 * at] * 4 for at in range(6)]


@feature("--batch-size, with several workers")
def batches() -> None:
    answers = infer(NUMBER_MODEL, numbers(6), "--batch-size", "3", "--workers", "2")
    assert answers == [[2.0 * at] * 4 for at in range(6)]


@feature("texts (BYTES)")
def texts() -> None:
    words = {"name": "words", "shape": [1, 2], "datatype": "BYTES", "data": ["Cat", "dog"]}
    ((first, second),) = infer(WORD_MODEL, [{"inputs": [words]}])
    assert (first, second) == ("CatCat", "dogdog")


report("mlserver")
