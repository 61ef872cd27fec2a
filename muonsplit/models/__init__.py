"""Configs become modules: published ones at full size on ``meta``, and their miniatures."""
