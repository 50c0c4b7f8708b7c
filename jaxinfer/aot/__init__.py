"""Ahead-of-time compilation: what a step will need of a device that is not here."""
