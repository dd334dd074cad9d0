#!/usr/bin/env bash
# Makes the environment $3 from the requirements $2, by uv where it can be had, else by pip of the environment $1.
# With "--no-deps" behind it, of what is named there and nothing else.
set -euo pipefail
bin=$1/bin
into=$3/bin/python
limits=("${@:4}")
by_pip() { "$bin/pip" --python "$into" --disable-pip-version-check -q install "$@"; }

"$bin/python" -m venv --clear --without-pip "$3"
# uv does not look where pip is told to look, so torch comes by pip, which may find a build without CUDA.
if torch=$(grep '^torch==' "$2"); then
  by_pip --no-compile "$torch"
fi
uv=$(command -v uv || echo "$bin/uv")
"$uv" -q pip install --python "$into" ${limits[@]+"${limits[@]}"} -r "$2" || {
  echo "uv is not there or failed: pip installs instead"
  by_pip ${limits[@]+"${limits[@]}"} -r "$2"
}
