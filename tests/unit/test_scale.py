"""Check with a fake process group that costs per rank do not grow with the number of ranks."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

from tests.unit.commands import python_path

ROOT = Path(__file__).resolve().parents[2]


def test_cost_per_rank_does_not_grow_with_the_number_of_ranks(python):
    worker = str(ROOT / "benchmarks/scale_worker.py")
    environment = {
        **os.environ,
        "TE_FSDP_EMULATION": "9.0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }
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


def test_many_ranks_benchmark_runs(python, tmp_path):
    environment = {
        **os.environ,
        "TE_FSDP_EMULATION": "9.0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }
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


def _text_chunks(path: Path) -> dict[str, str]:
    """Return the text chunks of a PNG file: keyword -> text."""
    data, at, results = path.read_bytes(), 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"tEXt":
            key, _, text = data[at + 8 : at + 8 + length].partition(b"\0")
            results[key.decode()] = text.decode("latin-1")
        at += length + 12
    return results


def test_scaling_plot_shows_the_recorded_rows(monkeypatch, tmp_path):
    """Bug class: the figure and its JSON differ. The PNG contains a digest of its rows."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scale

    path = ROOT / "benchmarks/results/scale-cpu.json"
    rows = json.loads(path.read_text())["rows"]
    assert _text_chunks(ROOT / "benchmarks/scale.png").get("Rows") == scale.digest(rows)
    monkeypatch.setattr(sys, "argv", ["scale.py", "--plot-of", str(path), "--plot", str(tmp_path / "a.png")])
    scale.main()
    assert _text_chunks(tmp_path / "a.png")["Rows"] == scale.digest(rows)
    rows[0]["set_up_seconds"] += 1  # the negative control
    scale.plot(rows, tmp_path / "b.png")
    assert _text_chunks(tmp_path / "b.png")["Rows"] != scale.digest(json.loads(path.read_text())["rows"])


def test_benchmark_page_shows_the_recorded_rows():
    """As above, for the table of benchmarks/README.md."""
    page = (ROOT / "benchmarks/README.md").read_text()
    for row in json.loads((ROOT / "benchmarks/results/scale-cpu.json").read_text())["rows"]:
        if row["model"] == "step":
            if row["ranks"] > 8:  # not in the table
                ms = f"{1e3 * row['own_seconds']:.1f}"
                assert f"| {row['ranks']:,} | {row['calls']:,} | {ms} |" in page, row["ranks"]
            continue
        name = {"405b": "405B", "671b-moe": "671B MoE"}[row["model"]]
        numbers = [f"{row['seconds'][key]:.1f} s" for key in ("fully_shard", "materialize")]
        numbers += [f"{row['set_up_seconds']:.1f} s", f"{row['fsdp2_seconds']:.1f} s"]
        numbers += [
            f"{max(row['peak_gib'].values()):.2f} GiB",
            f"{row['weights_gib']:.2f} GiB",
            str(row["groups"]),
        ]
        assert f"| {name} | {row['ranks']:,} | {' | '.join(numbers)} |" in page, (name, row["ranks"])
