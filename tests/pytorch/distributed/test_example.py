"""The training example: resume is bit-exact on the same mesh, within rounding on a different one."""

from __future__ import annotations

import ast
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import harness
import pytest
from example_runs import FOLDER, ROOT, TOLERANCE, example, rows

TRAIN = FOLDER / "train.py"
ON_CPU = harness.device_type() == "cpu"
SIZES = "--layers 1 --hidden 128 --ffn 128 --heads 4 --seq 32 --batch 8 --megabytes 0.3 --lr 3e-3"
HALF, STEPS = 2, 4


def run(words: list[str], forgetful: bool = False) -> None:
    """Run the example with these options; a forgetful one has lost how far the data was read at a resume."""
    import tyro

    import te_fsdp

    train, load = example("train"), te_fsdp.checkpoint.load
    with pytest.MonkeyPatch.context() as patch:
        if forgetful:
            patch.setattr(te_fsdp.checkpoint, "load", lambda *given: load(*given) | {"position": 0})
        train.main(tyro.cli(train.Options, args=words, console_outputs=False))


def train(pool: Any, out: Path, ranks: int, options: str, **more: Any) -> dict[int, float]:
    """Return the losses of a run on this number of workers."""
    words = [*SIZES.split(), "--out", str(out), *options.split()]
    pool.run(
        run, ranks, env={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, words=words, **more
    )  # as the example does
    return losses(out)


def losses(out: Path) -> dict[int, float]:
    """Step -> loss, to the bit."""
    found = rows(out)
    for row in found:
        assert float.fromhex(row["loss_hex"]) == row["loss"]
        assert row["tokens_per_s"] > 0
    assert len({row["step"] for row in found}) == len(found), found
    return {row["step"]: row["loss"] for row in found}


@pytest.fixture(scope="module")
def saved_runs() -> dict[str, tuple[dict[int, float], Path]]:
    """Return the tests' common data: for each setting the losses of STEPS steps, and a checkpoint of HALF of them."""
    return {}


@pytest.fixture
def single_process(setting, pool, saved_runs, tmp_path_factory) -> tuple[dict[int, float], Path]:
    options, ranks, mesh = setting
    if options not in saved_runs:
        folder = tmp_path_factory.mktemp("example")
        save = f"--save {folder / 'checkpoints'} --save-every {HALF}"
        found = train(pool, folder, ranks, f"{options} {mesh} --steps {STEPS} {save}")
        saved_runs[options] = found, folder / f"checkpoints/step-{HALF}"
    return saved_runs[options]


ADAMW = ("--recipe current --sequence-parallel", 2, "--tp 2")
FUSED = (
    f"--recipe {'mxfp8' if ON_CPU else 'current'} --quantized-weights --optimizer fused_adam"
    " --micro 2 --clip 1.0 --warmup 2 --decay 8",
    4,
    "--tp 2",
)
adamw = pytest.param(ADAMW, marks=pytest.mark.ranks(2), id="adamw-tp2")
fused = pytest.param(FUSED, marks=pytest.mark.ranks(4), id="quantized-weights-dp2tp2")
both_settings = pytest.mark.parametrize("setting", [adamw, fused])


@both_settings
def test_example_trains(setting, single_process):
    found, _ = single_process
    assert list(found) == list(range(STEPS))
    # A blind guess over 256 bytes, and a first lesson: the space is the most frequent one.
    assert found[0] == pytest.approx(math.log(256), abs=0.5)
    assert found[STEPS - 1] < 0.9 * found[0]


@both_settings
def test_resume_on_the_same_mesh_is_bitwise_equal(setting, pool, single_process, tmp_path):
    found, checkpoint = single_process
    options, ranks, mesh = setting
    # Named by their folder: the newest complete one is used, not the rest of a save that did not end.
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoint, folder / checkpoint.name)
    (folder / f"step-{STEPS}").mkdir()
    again = train(pool, tmp_path, ranks, f"{options} {mesh} --steps {STEPS} --resume {folder}")
    assert again == {step: found[step] for step in range(HALF, STEPS)}


@both_settings
def test_resume_on_a_different_mesh_is_close(setting, pool, single_process, tmp_path):
    found, checkpoint = single_process
    options, ranks, _ = setting
    # FSDP alone, on half as many processes: dp2 x tp2 becomes dp2, tp2 one process.
    other = train(pool, tmp_path, ranks // 2, f"{options} --tp 1 --steps {STEPS} --resume {checkpoint}")
    assert list(other) == list(range(HALF, STEPS))
    for step, loss in other.items():
        assert abs(loss - found[step]) < TOLERANCE, (step, other, found)
    assert other != {step: found[step] for step in other}, "bit-equal: was it really a different mesh?"


@pytest.mark.parametrize("setting", [adamw])
def test_negative_control_lost_data_position(setting, pool, single_process, tmp_path):
    found, checkpoint = single_process
    options, ranks, mesh = setting
    resumed = f"{options} {mesh} --steps {HALF + 1} --resume {checkpoint}"
    other = train(pool, tmp_path, ranks, resumed, forgetful=True)
    assert abs(other[HALF] - found[HALF]) > 10 * TOLERANCE


# ------------------------------------------------------------------------------------------------ as a user starts it


def environment() -> dict[str, str]:
    """Return this process's environment, with the checkout importable and TransformerEngine emulated if necessary."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    emulation = {"TE_FSDP_EMULATION": "10.0", "CUDA_VISIBLE_DEVICES": ""} if ON_CPU else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **emulation}


def start(python: str, out: Path, processes: int, options: str) -> str:
    """Run the example under torchrun; returns what it printed."""
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    command += [str(TRAIN), *SIZES.split(), "--out", str(out), *options.split()]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("setting", [adamw])
def test_example_under_torchrun(setting, single_process, tmp_path, python):
    options, processes, mesh = setting
    save = f"--save {tmp_path / 'checkpoints'}"
    printed = start(python, tmp_path, processes, f"{options} {mesh} --steps {HALF} {save}")
    for expected in ("sharding", "tokens/s", f"{HALF}/{HALF}", f"done: step {HALF}"):
        assert expected in printed
    assert ("emulated" in printed) == ON_CPU
    printed = start(
        python, tmp_path, 1, f"{options} --tp 1 --steps {STEPS} --resume {tmp_path / 'checkpoints'}"
    )
    assert f"step {HALF}" in printed
    assert {row["emulated"] for row in rows(tmp_path)} == {"10.0" if ON_CPU else None}
    found = losses(tmp_path)
    assert list(found) == list(range(STEPS))
    assert max(abs(loss - single_process[0][step]) for step, loss in found.items()) < TOLERANCE


@pytest.mark.cpu
def test_error_without_gpu_names_the_setting(python):
    bare = environment()
    del bare["TE_FSDP_EMULATION"]
    done = subprocess.run([python, TRAIN], env=bare, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "torch sees no GPU" in done.stderr
    assert "TE_FSDP_EMULATION=10.0" in done.stderr
    assert "Traceback" not in done.stderr


OPTIONS = [
    *("dp_replicate", "dp_shard", "tp", "sequence_parallel"),
    *("recipe", "quantized_weights", "optimizer", "lr", "warmup", "decay", "clip", "micro"),
    *("layers", "hidden", "ffn", "heads", "activation"),
    *("data", "pattern", "megabytes", "seq", "batch", "steps", "seed"),
    *("save", "save_every", "resume", "reference", "out"),
]


def test_command_line_options_are_stable():
    """Check the options that documentation and scripts use. Announce a renamed or removed option."""
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
