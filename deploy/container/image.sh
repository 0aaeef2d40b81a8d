#!/bin/bash
# image.sh PYTHON [IMAGE [BASE]]: wheels into state/image/wheels with the host's own pip settings, then the image.
# CONTAINER_TOOL is podman (default) or docker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${1:?a Python 3.11 with pip}
image=${2:-localhost/qwengyre:latest}
base=${3:-}
tool=${CONTAINER_TOOL:-podman}
folder=state/image
key=$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
if [ ! -e "$folder/wheels-$key" ]; then
  rm -rf "$folder"
  mkdir -p "$folder/needs"
  # Only the project file: what it needs, not the code.
  cp pyproject.toml "$folder/needs"
  "$python" -m pip wheel -q -c constraints.txt -w "$folder/wheels" 'setuptools>=77' torch==2.13.0
  "$python" -m pip wheel -q -c constraints.txt -w "$folder/wheels" --find-links "$folder/wheels" "$folder/needs[cpu]"
  rm -rf "$folder"/wheels/qwengyre-*.whl "$folder/needs"
  touch "$folder/wheels-$key"
fi
"$tool" build -q --label "qwengyre.code=$(deploy/container/code.sh)" ${base:+--build-arg "BASE=$base"} -f deploy/container/Containerfile -t "$image" .
