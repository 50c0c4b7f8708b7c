"""The host's half of a step: which rows run, on which pages, and what becomes of their tokens (no jax)."""
