"""What set-up and a step cost a rank does not grow with the ranks: benchmarks/scale_worker.py, fake process group."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_model_on_few_and_on_many_ranks(python):
    worker = str(ROOT / "benchmarks/scale_worker.py")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TE_FSDP_EMULATION": "9.0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    running = [
        subprocess.Popen(
            [python, worker, "step", ranks, "te_fsdp"], env=environment, stdout=subprocess.PIPE, text=True
        )
        for ranks in ("64", "4096")
    ]
    few, many = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in running]
    assert few["calls"] == many["calls"] > 500
    assert _calls(few, "step") == _calls(many, "step")
    # Numbers that all ranks compare, and digests: never an object of each rank.
    assert _bytes(few, "set-up") == _bytes(many, "set-up")
    assert (
        _calls(few, "set-up") == _calls(many, "set-up") and {"tp", "dp_shard"} <= _calls(few, "set-up").keys()
    )


def test_real_processes(python, tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TE_FSDP_EMULATION": "9.0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [python, str(ROOT / "benchmarks/many_ranks.py"), "--ranks", "4", "--loading", "2"]
    command += ["--meshes", "0", "--out", str(tmp_path / "rows.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    row = json.loads((tmp_path / "rows.json").read_text())["rows"][0]
    assert row["loss"] == row["loss_after_load"]  # every rank computes all of it, whatever their number
    assert row["wall"].keys() == row["cpu"].keys() >= {"fully_shard", "save 1", "load"}


def _calls(row, phase):
    return {entry["over"]: entry["calls"] for entry in row["traffic"][phase]}


def _bytes(row, phase):
    return {entry["over"]: entry["bytes"] for entry in row["traffic"][phase]}
