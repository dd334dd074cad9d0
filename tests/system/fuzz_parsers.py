"""A guided search for bytes that a parser does not cope with: `make fuzz-parsers MINUTES=60`.

The time is shared by all parsers (`tests/support/parser_fuzzing`); `--only wire/http2` searches in
some of them. A finding is written where kept inputs are, beside a text that says what is wrong, and
`tests/parsers/test_kept_inputs.py` fails from then on until the parser is mended. `--keep` replaces
the kept inputs by the shortest that reach as much code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster_harness import ROOT, environment
from parser_fuzzing import corpus
from parser_fuzzing.target import FuzzTarget

PYTHON = ROOT / ".venv-fuzz" / "bin" / "python"
LONGEST_INPUT_S = 60
"""Seconds after which an input that was not stopped by any limit of ours ends the search."""
MOST_MEMORY_MB = 3_000


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    known = [target for room in corpus.ROOMS for target in corpus.targets(room)]
    chosen = [each for each in known if not options.only or each.name in options.only]
    if options.only and len(chosen) != len(options.only):
        print("known:", *(each.name for each in known))
        return 2
    seconds = max(1, round(60 * options.minutes / len(chosen)))
    found = 0
    for target in chosen:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            found += _search(target, options, seconds, Path(folder))
    print(f"{found} findings" if found else "nothing found")
    return 1 if found else 0


def _search(target: FuzzTarget, options: argparse.Namespace, seconds: int, folder: Path) -> int:
    """Searches for a while; returns the number of findings."""
    inputs, words, findings = folder / "inputs", folder / "words", folder / "findings"
    inputs.mkdir()
    for data in [*target.seeds(), *(data for _, data in corpus.kept(target.name))]:
        (inputs / corpus.digest(data)).write_bytes(data)
    words.write_text("".join(f'"{_quoted(word)}"\n' for word in target.words))
    limits = [
        f"-max_total_time={seconds}",
        f"-max_len={target.longest_bytes}",
        f"-timeout={LONGEST_INPUT_S}",
        f"-rss_limit_mb={MOST_MEMORY_MB}",
        f"-artifact_prefix={folder}/ended-by-",
        f"-seed={options.seed}",
        "-print_final_stats=1",
    ]
    if target.words:
        limits.append(f"-dict={words}")
    told = _guided(options.python, target, findings, [*limits, str(inputs)])
    tries = next((line.split()[-1] for line in told if "number_of_executed_units" in line), "?")
    ended = sorted(folder.glob("ended-by-*"))
    texts = sorted(findings.glob("*.txt")) if findings.is_dir() else []
    count = len(ended) + len(texts)
    print(f"{target.name:24} {seconds:5} s {tries:>10} inputs {count:3} findings", flush=True)
    for text in texts:
        _keep_finding(target, text.with_suffix(""), text.read_text())
    for file in ended:
        _keep_finding(target, file, "\n".join(told[-20:]))
    if tries == "?" and not ended:
        print("\n".join(told[-20:]))
        return count + 1
    if options.keep and not count:
        small = folder / "small"
        small.mkdir()
        _guided(options.python, target, findings, ["-merge=1", str(small), str(inputs)])
        kept = corpus.keep(target.name, (file.read_bytes() for file in small.iterdir()))
        print(f"{'':24} {kept} inputs are kept")
    return count


def _guided(python: Path, target: FuzzTarget, findings: Path, options: list[str]) -> list[str]:
    """Runs the search in a process of its own; returns the lines that it wrote."""
    command = [str(python), "-m", "parser_fuzzing.guided", target.name, str(findings), *options]
    env = environment() | {"CATENARY_PURE": "1"}
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "support")
    done = subprocess.run(
        command, cwd=ROOT, env=env, check=False, capture_output=True, text=True, errors="replace"
    )
    return done.stderr.splitlines()


def _keep_finding(target: FuzzTarget, file: Path, told: str) -> None:
    folder = corpus.findings_folder(target.name)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / file.name
    kept.write_bytes(file.read_bytes())
    print(f"FINDING {kept.relative_to(ROOT)}\n{told}")


def _quoted(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of all parsers together")
    parser.add_argument("--seed", type=int, default=1, help="of what is tried")
    parser.add_argument("--only", nargs="*", help="the names of parsers")
    parser.add_argument("--keep", action="store_true", help="replaces the kept inputs")
    parser.add_argument("--python", type=Path, default=PYTHON, help="one that has atheris")
    return parser


if __name__ == "__main__":
    sys.exit(main())
