"""Policies in a table and in a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxinfer.bench.quality import draw_quality, format_quality


def figures(policy: str, size: int, kl: float, **speeds: float) -> dict[str, Any]:
    return {
        "policy": policy,
        "weight_bytes": {"embedding": size, "matrices": 2 * size},
        "kv_bytes_a_token": 23040.0,
        "bytes": 3 * size,
        "perplexity": 8 + kl,
        "kl": kl,
        "top1": 1 - kl,
        "tokens_per_second": speeds,
    }


FOUND = [figures("bfloat16", 2**21, 0.0, **{"decode x1": 31.4}), figures("w8a8,kv8", 2**20, 0.01)]


def test_table_has_a_policy_a_line():
    header, *lines = format_quality(FOUND).splitlines()
    assert header.split("  ")[0] == "policy"
    assert "decode x1 tok/s" in header
    assert [line.split()[0] for line in lines] == ["bfloat16", "w8a8,kv8"]
    assert lines[0].split()[1:] == ["2.0", "4.0", "23,040", "8.0000", "0.00000", "100.00%", "31.4"]
    assert lines[1].split()[-1] == "-"  # not measured


def test_picture_is_drawn(tmp_path: Path):
    path = tmp_path / "it.png"
    draw_quality(FOUND, str(path), "toy")
    assert path.read_bytes()[:4] == b"\x89PNG"
    draw_quality(FOUND[:1], str(path), "the reference alone")
    assert path.stat().st_size > 1000
