"""Packer: ready groups become micro-steps of at most T tokens."""
