"""Weights that checkpoints keep in few bits: how each format lies in its file, and the same numbers as ours lie."""
