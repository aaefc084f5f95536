"""The example under real torchrun: trains, saves, resumes on the same mesh to the bit, on another to rounding."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import devices

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples/fsdp2_tp/train.py"
ON_CPU = devices.device_type() == "cpu"
SIZES = "--layers 1 --hidden 128 --ffn 128 --heads 4 --seq 32 --batch 8 --megabytes 0.3 --lr 3e-3"
HALF, STEPS = 2, 4
# On another mesh bf16 sums are taken in another order, which moves a logit by about one rounding: half a unit in the
# last of bf16's 8 places, 2^-9 of a logit of size 1 to 2. The loss moves by at most twice the largest such move (a
# log-softmax has Lipschitz constant 2); most moves cancel over the 256 tokens. Measured: 4e-4.
TOLERANCE = 2**-8
# Seen through the example's eyes, a checkpoint that forgot how far the data was read.
FORGETFUL = f"""
import runpy, te_fsdp, te_fsdp.checkpoint
load = te_fsdp.checkpoint.load
te_fsdp.checkpoint.load = lambda *args: load(*args) | {{"position": 0}}
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""


def environment() -> dict[str, str]:
    """This process's, with the checkout importable and TransformerEngine emulated where it must be."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    emulation = {"TE_FSDP_EMULATION": "10.0", "CUDA_VISIBLE_DEVICES": ""} if ON_CPU else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **emulation}


def train(out: Path, processes: int, options: str, script: Path = TRAIN) -> str:
    """Run the example; returns what it printed."""
    gpus = torch.cuda.device_count()
    if ON_CPU or processes <= gpus:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(processes)]
    else:
        command = [sys.executable, str(ROOT / "scripts/torchrun_nodes.py"), str(processes // gpus), str(gpus)]
    command += [str(script), *SIZES.split(), "--out", str(out), *options.split()]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    return done.stdout + done.stderr


def losses(out: Path) -> dict[int, float]:
    """Step -> loss, to the bit."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert float.fromhex(row["loss_hex"]) == row["loss"]
        assert row["tokens_per_s"] > 0
        assert row["emulated"] == ("10.0" if ON_CPU else None)
    assert len({row["step"] for row in rows}) == len(rows), rows
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train STEPS steps with a checkpoint at HALF, once per setting."""
    done = {}

    def get(options: str, processes: int, mesh: str) -> tuple[dict[int, float], Path, str]:
        key = (options, processes, mesh)
        if key not in done:
            folder = tmp_path_factory.mktemp("example")
            save = f"--save {folder / 'checkpoints'} --save-every {HALF}"
            printed = train(folder, processes, f"{options} {mesh} --steps {STEPS} {save}")
            assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
            done[key] = losses(folder), folder / f"checkpoints/step-{HALF}", printed
        return done[key]

    return get


ADAMW = ("--recipe current --sequence-parallel", 2, "--tp 2")
FUSED = (
    f"--recipe {'mxfp8' if ON_CPU else 'current'} --quantized-weights --optimizer fused_adam",
    4,
    "--tp 2",
)
SETTINGS = [
    pytest.param(ADAMW, marks=pytest.mark.ranks(2), id="adamw-tp2"),
    pytest.param(FUSED, marks=pytest.mark.ranks(4), id="quantized-weights-dp2tp2"),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_trains(setting, run):
    whole, _, printed = run(*setting)
    assert list(whole) == list(range(STEPS))
    # A blind guess over 256 bytes, and a first lesson: the space is the most frequent one.
    assert whole[0] == pytest.approx(math.log(256), abs=0.5)
    assert whole[STEPS - 1] < 0.9 * whole[0]
    for expected in ("placements", "tokens/s", f"{STEPS}/{STEPS}", f"done: step {STEPS}"):
        assert expected in printed
    assert ("emulated" in printed) == ON_CPU


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_mesh_repeats_every_bit(setting, run, tmp_path):
    whole, checkpoint, _ = run(*setting)
    options, processes, mesh = setting
    # Named by their folder: the newest whole one is taken, not what is left of a save that did not end.
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoint, folder / checkpoint.name)
    (folder / f"step-{STEPS}").mkdir()
    train(tmp_path, processes, f"{options} {mesh} --steps {STEPS} --resume {folder}")
    assert losses(tmp_path) == {step: whole[step] for step in range(HALF, STEPS)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_another_mesh_goes_on_alike(setting, run, tmp_path):
    whole, checkpoint, _ = run(*setting)
    options, processes, _ = setting
    # FSDP alone, on half as many processes: dp2 x tp2 becomes dp2, tp2 one process.
    printed = train(tmp_path, processes // 2, f"{options} --tp 1 --steps {STEPS} --resume {checkpoint}")
    assert f"step {HALF}" in printed
    other = losses(tmp_path)
    assert list(other) == list(range(HALF, STEPS))
    for step, loss in other.items():
        assert abs(loss - whole[step]) < TOLERANCE, (step, other, whole)
    assert other != {step: whole[step] for step in other}, "bit-equal: was it really another mesh?"


@pytest.mark.ranks(2)
def test_a_forgotten_data_position_is_noticed(run, tmp_path):
    whole, checkpoint, _ = run(*ADAMW)
    options, processes, mesh = ADAMW
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    train(tmp_path, processes, f"{options} {mesh} --steps {HALF + 1} --resume {checkpoint}", script)
    assert abs(losses(tmp_path)[HALF] - whole[HALF]) > 10 * TOLERANCE


@pytest.mark.cpu
def test_without_a_gpu_it_says_what_to_set():
    bare = environment()
    del bare["TE_FSDP_EMULATION"]
    done = subprocess.run(
        [sys.executable, TRAIN], env=bare, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "torch sees no GPU" in done.stderr
    assert "TE_FSDP_EMULATION=10.0" in done.stderr
    assert "Traceback" not in done.stderr


OPTIONS = [
    *("dp_replicate", "dp_shard", "tp", "sequence_parallel"),
    *("recipe", "quantized_weights", "optimizer", "lr"),
    *("layers", "hidden", "ffn", "heads", "activation"),
    *("data", "pattern", "megabytes", "seq", "batch", "steps", "seed"),
    *("save", "save_every", "resume", "out"),
]


def test_options_are_frozen():
    """Commands in documentation and scripts depend on these; to rename or drop one is a change to announce."""
    tree = ast.parse(TRAIN.read_text())
    options = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options")
    assert [node.target.id for node in options.body if isinstance(node, ast.AnnAssign)] == OPTIONS


def test_documented_options_exist():
    pages = [TRAIN, TRAIN.with_name("README.md"), ROOT / "scripts/train.sh"]
    text = "\n".join(page.read_text() for page in pages)
    commands = re.findall(r"train\.py .*|--.*`", text)
    named = {name for command in commands for name in re.findall(r"--([a-z][a-z-]+)", command)}
    assert {"tp", "recipe", "save", "resume"} <= named
    assert named <= {name.replace("_", "-") for name in OPTIONS} | {"help"}
