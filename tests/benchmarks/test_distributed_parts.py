"""The arithmetic of `benchmarks/distributed`: fits, spans of a profile, shares of an exchange, cases, link files."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.distributed.bandwidth import fit, rows_between
from benchmarks.distributed.equality import Case, cases
from benchmarks.distributed.jobs import TIMED_OUT, Job, descendants, run
from benchmarks.distributed.links import write_links
from benchmarks.distributed.overlap import merged, shares
from moec.compiler.hardware import Link


def test_a_fit_finds_the_line_through_noisy_times() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [2.0**power for power in range(12, 31)]
    noise = 1 + 0.02 * torch.randn(len(sizes), generator=generator)
    line = fit(sizes, [(2e-5 + size / 3e11) * float(n) for size, n in zip(sizes, noise, strict=True)])
    assert line.latency == pytest.approx(2e-5, rel=0.05)
    assert line.bytes_per_second == pytest.approx(3e11, rel=0.05)
    assert 0 < line.error < 0.05


def test_a_fit_has_no_latency_below_zero() -> None:
    line = fit([1.0, 2.0, 4.0], [0.9, 2.0, 4.2])
    assert line.latency == 0
    assert line.bytes_per_second == pytest.approx(1.0, rel=0.1)


def test_times_that_do_not_rise_have_a_latency_alone() -> None:
    line = fit([1.0, 2.0, 4.0], [2.0, 2.0, 1.9])
    assert line.latency == pytest.approx(2.0, rel=0.05)
    assert math.isinf(line.bytes_per_second)


def test_hidden_communication_is_what_lies_under_compute() -> None:
    found = shares(
        [
            ("ncclDevKernel_AllGather_RING_LL(x)", (0.0, 1000.0)),
            ("ncclDevKernel_SendRecv(x)", (800.0, 1500.0)),
            ("gemm", (500.0, 900.0)),
            ("add", (1400.0, 2000.0)),
        ]
    )
    assert found["communication_ms"] == pytest.approx(1.5)
    assert found["compute_ms"] == pytest.approx(1.0)
    assert found["hidden_ms"] == pytest.approx(0.5)
    assert found["hidden_share"] == pytest.approx(1 / 3)
    assert found["span_ms"] == pytest.approx(2.0)
    assert found["by_kind_ms"] == pytest.approx({"AllGather_RING_LL": 1.0, "SendRecv": 0.7})
    assert shares([])["hidden_share"] is None


def test_spans_that_touch_are_one() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (0.5, 0.7)]) == [(0.0, 2.0), (3.0, 4.0)]


@pytest.mark.parametrize("shape", ["even", "random", "last"])
def test_an_exchange_sends_every_row_once(shape: str) -> None:
    table = rows_between(shape, 103, 4, seed=1)
    assert all(sum(line) == 103 for line in table)
    assert all(rows >= 0 for line in table for rows in line)
    if shape == "last":
        assert all(line == [0, 0, 0, 103] for line in table)


def test_cases_cover_every_layout() -> None:
    found = cases(4, ["k3-tiny", "mixtral"], ["float32", "bfloat16"])
    assert {"k3-tiny:float32:ep=1", "mixtral:bfloat16:ep=2", "k3-tiny:float32:ep=4:capacity=8.0"} <= set(found)
    assert not any("ep=3" in name for name in found)
    plan = Case.of("k3-tiny:bfloat16:ep=2:gather=keep").plan(4)
    assert (plan.mesh.fsdp, plan.mesh.ep, plan.mesh.gather, plan.packing) == (4, 2, "keep", True)


def test_a_job_over_its_limit_ends_with_all_it_started() -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    script += "start_new_session=True).wait()"
    outcome = run(Job("sleeper", [sys.executable, "-c", script], 1.5))
    assert outcome.code == TIMED_OUT
    assert not descendants(os.getpid()) or all("sleep" not in _command(pid) for pid in descendants(os.getpid()))


def test_links_are_what_the_cost_model_reads(tmp_path: Path) -> None:
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    line = {"latency": 2.5e-5, "bytes_per_second": 3e11, "error": 0.1}
    text = write_links("test", dict.fromkeys(kinds, line), 2, tmp_path).read_text()
    assert text.startswith("# Measured by `python -m benchmarks.distributed --parts bandwidth --links test` on 2 ranks")
    links = {kind: Link(**values) for kind, values in yaml.safe_load(text)["links"].items()}
    assert set(links) == set(kinds)
    assert links["all_to_all"].seconds(3e9) == pytest.approx(0.010025)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
