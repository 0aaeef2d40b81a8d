#!/bin/bash
# base.sh IMAGE: makes a minimal Debian 12 image from the package archive, for machines that reach no image registry.
# Needs root, debootstrap and podman; takes a minute or two.
set -euo pipefail
image=${1:?the name of the image, for example localhost/debian:bookworm}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase bookworm "$folder" >"$folder.log" || { tail -n 5 "$folder.log" >&2; exit 1; }
rm -f "$folder.log" "$folder"/var/cache/apt/archives/*.deb
rm -rf "$folder"/var/lib/apt/lists/*
tar -C "$folder" -c . | podman import -q - "$image"
