"""Peer optimizers of the registry, each driven as its own documentation drives it."""
