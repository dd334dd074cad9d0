"""The command `catenary`: everything a person does to a cluster from afar.

One module a concern: `look` (status, models, top, requests, trace), `operate` (deploy, plan,
drain), `infer`, `chat`, `bench`. `kit` gives each command the same connection options, the same
errors (one sentence on stderr, exit code 1; 2 for bad usage) and `--json`.
"""

from __future__ import annotations

from catenary.command_line.application import app

__all__ = ["app", "main"]


def main() -> None:
    """Runs the command; the entry point of the package."""
    app(prog_name="catenary")
