#!/bin/bash
# code.sh: one digest over everything that an image is built from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
find schemas services replay examples deploy/container pyproject.toml constraints.txt -type f ! -path '*/__pycache__/*' -print0 |
  LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16
