"""The command `catenary`, with which people use and operate a cluster from elsewhere.

There is one module a concern: `look` (status, models, top, requests, trace), `bringing` (deploy,
pull, undeploy), `operate` (drain, undrain), `plans`, `sessions`, `infer`, `chat`, `bench`. `kit`
gives each command the same connection options, errors (one sentence on stderr, exit code 1; 2 for
bad usage) and `--json`.
"""

from __future__ import annotations

from catenary.command_line.application import app

__all__ = ["app", "main"]


def main() -> None:
    """Runs the command; the entry point of the package."""
    app(prog_name="catenary")
