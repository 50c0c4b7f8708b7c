"""Checkpoints: found, opened, checked, loaded onto devices, and kept in our own form."""
