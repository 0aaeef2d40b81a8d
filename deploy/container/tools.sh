#!/bin/bash
# tools.sh: what `make containers` needs on Debian: podman, podman-compose, and debootstrap for the base image.
set -euo pipefail
packages=(podman podman-compose runc netavark aardvark-dns catatonit iptables debootstrap)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -q && apt-get install -q -y --no-install-recommends "${missing[@]}"
else
  echo "containers: for this test install ${missing[*]}: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
