"""benchmarks/step.py on the CPU. It checks the script, not the times."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.cpu
def test_benchmark_rows_are_measured_or_skipped_with_a_reason(tmp_path, python):
    out, picture, host = tmp_path / "step.json", tmp_path / "step.png", tmp_path / "host.txt"
    command = [
        python,
        str(BENCHMARKS / "step.py"),
        "--ranks",
        "2",
        "--steps",
        "1",
        "--weights",
        "fp8",
        "--model",
        "tiny-experts",
        "--settings",
        "ep",
        "ep default",
    ]
    command += [
        "--out",
        str(out),
        "--plot",
        str(picture),
        "--profile",
        str(host),
        "--row-seconds",
        "200",
        "--seconds",
        "400",
    ]
    python_path = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "TE_FSDP_EMULATION": "9.0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path,
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a check of the script: its times say nothing" in ended.stdout
    whole = json.loads(out.read_text(encoding="utf-8"))
    assert whole["machine"]["ranks"] == 2 and whole["options"]["sequence"] == 64
    rows = {(row["library"], row["setting"]): row for row in whole["rows"]}
    assert rows["te_fsdp", "ep graph"]["reason"] == "not recorded: there are no CUDA graphs on cpu"
    assert rows["te_fsdp", "ep units"]["reason"] == "not recorded: there are no CUDA graphs on cpu"
    assert rows["megatron-fsdp", "ep"]["reason"] == "megatron-fsdp is not installed"
    for place in (("te_fsdp", "ep"), ("te_fsdp", "ep default"), ("FSDP2", "ep"), ("limit", "ep")):
        row = rows[place]
        assert row["weights"] == "fp8" and 0 < row["best_ms"] <= row["ms"], row
        assert row.keys() >= {"host_ms", "peak_gib", "tokens_per_s_gpu", "model_tflops_gpu"}
    assert ("FSDP2", "ep default") not in rows
    assert picture.stat().st_size > 0
    profiles = host.read_text(encoding="utf-8")
    measured = [" ".join((r["library"], r["weights"], r["setting"])) for r in rows.values() if "ms" in r]
    assert re.findall(r"^\S+ fp8 .*$", profiles, re.MULTILINE) == measured
    parts = dict(zip(measured, profiles.split("\n\n"), strict=True))
    called = {row.split()[0]: "  torch.distributed.fsdp\n" in part for row, part in parts.items()}
    assert called == {"te_fsdp": True, "FSDP2": True, "limit": False}
