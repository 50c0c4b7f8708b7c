"""Meshes need eight devices: what is in ``eight/`` runs in processes that have them, started by test_meshes.py."""

import os

collect_ignore_glob = [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["eight/*"]
