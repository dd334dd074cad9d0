#!/usr/bin/env bash
# Makes the environment $3 from the requirements $2, by uv where it can be had, else by pip of the environment $1.
set -euo pipefail
bin=$1/bin
"$bin/python" -m venv --clear --without-pip "$3"
uv=$(command -v uv || echo "$bin/uv")
"$uv" -q pip install --python "$3/bin/python" -r "$2" || {
  echo "uv is not there or failed: pip installs instead"
  "$bin/pip" --python "$3/bin/python" --disable-pip-version-check -q install -r "$2"
}
