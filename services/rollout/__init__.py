"""Rollout: the engines that sample, and the adapters through which the mesh drives them."""
