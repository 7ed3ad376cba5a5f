"""What the recorded results of benchmarks/ have to show: bounds of the project that no timed test can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
VERIFIED = {"k3-tiny", "k3-dsa-tiny", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear", "glm_moe_dsa"}


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def test_the_whole_of_k3_compiles_within_its_time_memory_and_lines() -> None:
    found = rows("compile_time")
    whole = found[-1]
    assert (whole["target"], whole["layers"]) == ("k3", 93)
    assert whole["seconds"] < 120
    assert whole["peak_gib"] * 2**30 < 6e9
    assert whole["lines"] < 10_000


def test_compile_time_is_linear_in_depth() -> None:
    """The processor's own time of the last layers is at most half more than that of the first ones."""
    first, *_, middle, last = rows("compile_time")
    early, late = (
        (b["cpu_seconds"] - a["cpu_seconds"]) / (b["layers"] - a["layers"])
        for a, b in ((first, middle), (middle, last))
    )
    assert 0 < late < 1.5 * early


def test_a_compiled_step_on_a_cpu_takes_no_longer_than_an_eager_one() -> None:
    times = {row["variant"]: row["step_ms"] for row in rows("step_time_k3_tiny")}
    assert times["moec"] < 1.05 * times["eager"]


@pytest.mark.parametrize(
    ("name", "models"), [("verify_cuda", VERIFIED), ("verify_cuda_bfloat16", {"k3-tiny", "k3-dsa-tiny"})]
)
def test_every_model_was_verified_on_a_gpu(name: str, models: set[str]) -> None:
    found = rows(name)
    assert {row["model"] for row in found} >= models
    assert [row["model"] for row in found if not row["equal"]] == []
    assert {row["device"] for row in found} == {"cuda"}


def test_k3_mini_trained_on_a_gpu() -> None:
    result = json.loads((RESULTS / "step_time_k3_mini.json").read_text())
    assert "H200" in result["card"]
    assert all(row["preset"] == "k3-mini" and row["step_ms"] > 0 and row["peak_gib"] > 0 for row in result["rows"])
