"""Test `te-fsdp ckpt` as a user starts it: exit codes, text, JSON, documented commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.cli import ckpt, main
from tests.unit import documented
from tests.unit.commands import ROOT, python_path, start


def make(path: Path, seed: int = 0, step: int = 100, spoil: bool = False, **extra: Any) -> Path:
    """Return a checkpoint of a small model with AdamW's state and extra."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 8).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.randn(4, 24)).sum().backward()
    optimizer.step()
    if spoil:
        with torch.no_grad():
            model[0].weight[3, 5] += 0.5
            model[2].bias[1] = torch.nan
    checkpoint.save(path, model, optimizer, extra={"step": step, "order": torch.arange(3)} | extra)
    return path


def run_json(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """Run in this process with --json; check the exit code, and that stdout is one JSON document."""
    capsys.readouterr()
    result = main(["ckpt", *words, "--json"])
    out = capsys.readouterr().out
    assert result == code, out
    return json.loads(out)


# ------------------------------------------------------------------------------------------ as a process


def test_ckpt_verify_sets_the_exit_code_of_the_process(tmp_path: Path, python: str) -> None:
    """The real program runs without TransformerEngine or a process group."""
    make(tmp_path / "step-100")
    good = start(python, "te_fsdp.cli", ["ckpt", "verify", "step-100"], tmp_path)
    assert (good.returncode, good.stderr) == (0, ""), good.stderr
    assert "no damage found, 3 files" in good.stdout
    data = next((tmp_path / "step-100").glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    bad = start(python, "te_fsdp.cli", ["ckpt", "verify", "step-100", "--json"], tmp_path)
    assert bad.returncode == 1
    (problem,) = json.loads(bad.stdout)["problems"]
    assert problem.startswith(f"{data.name}: its contents have changed (CRC-32 of bytes ")


def test_closed_stdout_exits_without_an_error_message(tmp_path: Path, python: str) -> None:
    """`te-fsdp ... | head` prints no error, and exits like a process that SIGPIPE ends.

    Commands that import torch are forked. Python's own end is the same for all of them.
    """
    make(tmp_path / "step-100")
    light = ["--help", "--version"]
    heavy = [
        "completion bash",
        "ckpt --help",
        "ckpt verify step-100 --json",
        "ckpt inspect step-100",
        "ckpt diff step-100 step-100",
    ]
    for command in [*light, *heavy]:
        unread, stdout = os.pipe()
        os.close(unread)
        args = [sys.executable if command in light else python, "-m", "te_fsdp.cli", *command.split()]
        done = subprocess.run(
            args,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
        )
        os.close(stdout)
        assert (done.returncode, done.stderr) == (141, b""), command


def test_help_does_not_import_torch() -> None:
    probe = (
        "import sys; from te_fsdp.cli import main; code = main(['--help']); "
        "assert 'torch' not in sys.modules and 'tyro' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ckpt" in done.stdout


def test_documented_cli_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands of the page unchanged and in order, in a folder with the files that it names."""
    for step in (100, 200):
        make(tmp_path / f"out/checkpoints/step-{step}", step=step, seed=step)
    state = {"model": nn.Linear(4, 4).state_dict(), "step": 7}
    torch.save(state, tmp_path / "plain.pt")
    torch.distributed.checkpoint.save(state["model"], checkpoint_id=tmp_path / "plain-dcp", no_dist=True)
    monkeypatch.chdir(tmp_path)
    listed = [line for block in documented.to_run("docs/cli.md") for line in block]
    assert len(listed) >= 10
    for line in listed:
        program, *words = documented.words(line)
        result = main(words)
        output = capsys.readouterr()
        code = int((re.findall(r"# exit code (\d)", line) or ["0"])[0])
        assert (program, result) == ("te-fsdp", code), f"{line}\n{output.out}\n{output.err}"
    ran = " ".join(listed)
    assert all(name in ran for name in ("inspect", "verify", "diff", "convert", "export"))


# ------------------------------------------------------------------------------------------------ inspect


def test_inspect_prints_json_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "step-100", step=100)
    path = make(tmp_path / "step-200", step=200)
    result = run_json(["inspect", str(tmp_path)], capsys)
    assert set(result) == {
        *("ok", "path", "kind", "step", "saved_at", "versions", "mesh", "parameters", "buffers"),
        *("optimizer", "delayed", "semantics", "extra", "bytes", "notes"),
    }
    assert result["path"] == str(path), "the newest of the folder"
    assert (
        result["step"] == 200
        and result["mesh"] == {"ranks": 1}
        and set(result["versions"]) >= {"te_fsdp", "torch"}
    )
    weight = next(p for p in result["parameters"] if p["name"] == "2.weight")
    assert weight == {
        "name": "2.weight",
        "shape": [8, 40],
        "dtype": "bfloat16",
        "format": None,
        "layout": None,
        "components": None,
        "bytes": 640,
    }
    assert [b["name"] for b in result["buffers"]] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    states = {state["name"]: state for state in result["optimizer"]["states"]}
    assert states["exp_avg"] == {
        "name": "exp_avg",
        "dtype": "float32",
        "tensors": 2,
        "bytes": 4 * (24 * 40 + 40),
    }
    parts = ("model", "optimizer", "delayed", "extra")
    assert result["bytes"]["total"] == sum(result["bytes"][part] for part in parts) > 0
    assert result["bytes"]["extra"] == 24
    assert main(["ckpt", "inspect", str(path), "--filter", "0.*"]) == 0
    text = capsys.readouterr().out
    assert "0.weight" in text and "2.weight" not in text and "step 200" in text and "AdamW" in text
    assert "torch.BatchNorm" not in text, "it is filtered as well"
    assert main(["ckpt", "inspect", str(path)]) == 0
    assert "settings of 1 module:\n  torch.BatchNorm (1): eps=1e-05" in capsys.readouterr().out


def test_verify_detects_every_kind_of_corruption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "a")
    assert run_json(["verify", str(path)], capsys)["ok"]
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for bad in (good[:-1], good[: len(good) // 2] + b"\0\1" + good[len(good) // 2 + 2 :], b""):
            file.write_bytes(bad)
            result = run_json(["verify", str(path)], capsys, code=1)
            assert not result["ok"] and result.get("problems", result.get("error")), (file, len(bad))
        file.unlink()
        run_json(["verify", str(path)], capsys, code=1)
        file.write_bytes(good)
    assert run_json(["verify", str(path)], capsys)["problems"] == []


# --------------------------------------------------------------------------------------------------- diff


def test_diff_reports_changed_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, same = make(tmp_path / "a"), make(tmp_path / "same")
    spoilt, other = make(tmp_path / "spoilt", spoil=True), make(tmp_path / "other", seed=1, step=101)
    result = run_json(["diff", str(a), str(same)], capsys)
    assert result["same"] and result["compared"] == result["equal"] > 10 and result["differences"] == []
    result = run_json(["diff", str(a), str(spoilt)], capsys, code=1)
    assert [(d["name"], d["kind"], d["elements"]) for d in result["differences"]] == [
        ("0.weight", "values", 1),
        ("2.bias", "values", 1),
    ]
    assert result["differences"][0]["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert result["differences"][1]["max_abs"] == "inf", "NaN on one side is beyond any tolerance"
    result = run_json(["diff", str(a), str(spoilt), "--atol", "1"], capsys, code=1)
    assert [d["name"] for d in result["differences"]] == ["2.bias"]
    result = run_json(["diff", str(a), str(other)], capsys, code=1)
    assert result["others"] == ["extra: step is 100 / 101"] and len(result["differences"]) > 5
    main(["ckpt", "diff", str(a), str(spoilt)])
    assert "max abs 0.5" in capsys.readouterr().out


def compared(path: Path, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **changes: Any) -> Path:
    """Save a checkpoint that differs from the default one only by the given changes, without optimizer state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first, second = list(model[0].parameters()), list(model[1].parameters())
    if changes.pop("moved", False):
        first.append(second.pop())
    options = {"lr": 0.1, "weight_decay": 0.5, **changes.pop("options", {})}
    groups = [{"params": first, **options}, {"params": second, **options}]
    if changes.pop("joined", False):
        groups = [{"params": [*first, *second], **options}]
    groups[-1] |= changes.pop("last", {})
    optimizer = None if changes.pop("without", False) else kind(groups, lr=0.1)
    extra = {"step": 1, "order": {"seed": 3, "kept": [1, 2]}, **changes.pop("extra", {})}
    assert not changes
    checkpoint.save(path, model, optimizer, extra=extra)
    return path


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({}, []),
        ({"last": {"lr": 0.2}}, ["optimizer group 1: lr is 0.1 / 0.2"]),
        ({"last": {"initial_lr": 0.2}}, ["optimizer group 1: initial_lr only in B"]),
        ({"options": {"nesterov": True, "momentum": 0.5}}, None),
        (
            {"moved": True},
            ["optimizer group 0: different parameters", "optimizer group 1: different parameters"],
        ),
        ({"joined": True}, ["optimizer: 2 / 1 groups"]),
        ({"kind": torch.optim.Adagrad}, None),
        ({"without": True}, ["optimizer: only in A"]),
        ({"extra": {"step": 2}}, ["extra: step is 1 / 2"]),
        ({"extra": {"epoch": 2}}, ["extra: epoch only in B"]),
        ({"extra": {"order": {"seed": 3, "kept": [1, 4]}}}, None),
    ],
    ids=[
        "same",
        "lr",
        "new option",
        "momentum",
        "moved",
        "joined",
        "class",
        "without",
        "step",
        "epoch",
        "nested",
    ],
)
def test_diff_reports_options_and_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], others: list[str] | None
) -> None:
    """Differences outside of tensors count for any tolerance, except with --weights-only."""
    a, b = compared(tmp_path / "a"), compared(tmp_path / "b", **changes)
    args = ["diff", str(a), str(b), "--atol", "1e9"]
    result = run_json(args, capsys, code=int(bool(changes)))
    assert result["same"] is not bool(changes)
    if others is not None:
        assert (result["others"], result["differences"]) == (others, [])
    assert result["others"] or not changes
    there = run_json(["diff", str(b), str(a), "--atol", "1e9"], capsys, code=int(bool(changes)))
    assert len(there["others"]) == len(result["others"]), "the same, whichever is named first"
    assert run_json([*args, "--weights-only"], capsys)["others"] == []


def test_diff_reports_module_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, eps, momentum in (("a", 1e-5, 0.1), ("b", 1e-3, 0.1), ("c", 1e-5, 0.2)):
        checkpoint.save(tmp_path / name, nn.Sequential(*(nn.BatchNorm1d(4, eps, momentum) for _ in range(5))))
    result = run_json(["diff", str(tmp_path / "a"), str(tmp_path / "b")], capsys, code=1)
    assert (result["others"], result["differences"]) == (["eps: 1e-05 / 0.001 (*: 5 modules)"], [])
    assert run_json(["diff", str(tmp_path / "a"), str(tmp_path / "c")], capsys)["same"], "training alone"


def test_diff_reports_names_shapes_and_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = {
        "w": torch.arange(6.0).view(2, 3),
        "x": torch.ones(4),
        "y": torch.ones(2),
        "n": torch.tensor(2**53),
    }
    right = {"w": left["w"].bfloat16(), "x": torch.ones(5), "z": torch.ones(2), "n": torch.tensor(2**53 + 1)}

    def convert(state: dict[str, torch.Tensor], name: str) -> str:
        torch.save(state, tmp_path / f"{name}.pt")
        target = str(tmp_path / name)
        assert main(["ckpt", "convert", f"{target}.pt", target, "--to", "checkpoint"]) == 0
        return target

    words = ["diff", convert(left, "a"), convert(right, "b")]
    result = run_json(words, capsys, code=1)
    kinds = {(d["name"], d["kind"]) for d in result["differences"]}
    assert kinds == {("w", "dtype"), ("x", "shape"), ("y", "only in A"), ("z", "only in B"), ("n", "values")}
    words = ["diff", convert({"w": left["w"]}, "c"), convert({"w": right["w"]}, "d")]
    run_json(words, capsys)
    assert "cannot be compared" in run_json([*words[:2], f"{words[2]}.pt"], capsys, code=1)["error"]
    run_json([*words, "--strict"], capsys, code=1)


# ------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frob"],
        ["ckpt"],
        ["ckpt", "frob"],
        ["ckpt", "inspect"],
        ["ckpt", "diff", "one"],
        ["ckpt", "inspect", "x", "--frob"],
        ["ckpt", "convert", "a", "b"],
        ["ckpt", "convert", "a", "b.pt", "--to", "safetensors"],
        ["ckpt", "convert", "a", "b.pt", "--max-shard-size", "many"],
        ["ckpt", "convert", "a", "b.pt", "--max-shard-size", "1GB"],
        ["ckpt", "diff", "a", "b", "--rtol", "-1"],
        ["ckpt", "export", "a", "b", "--dtype", "int8"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.err or output.out


def test_option_without_effect_exits_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(tmp_path / "a", torch.nn.Linear(2, 2))
    assert main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / "b.pt"), "--key", "x"]) == 2
    assert "--key is for torch.save or " in capsys.readouterr().err and not (tmp_path / "b.pt").exists()
    assert main(["ckpt", "inspect", str(tmp_path / "a"), "--key", "x"]) == 2
    assert "--key is for torch.save or " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2kB", 2000),
        ("1.5 GB", 1_500_000_000),
        ("2KiB", 2048),
        ("1MiB", 2**20),
        ("3GiB", 3 * 2**30),
    ],
)
def test_sizes_with_units_are_parsed(text: str, count: int) -> None:
    assert ckpt._bytes(text) == count


# ------------------------------------------------------------------------------------- folders of checkpoints


def test_commands_find_checkpoints_below_a_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cover a run folder with checkpoints some levels down, next to other files."""
    run = tmp_path / "run"
    for step in (5, 15):
        make(run / f"ckpt/step-{step}", step=step)
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "plots/old").mkdir(parents=True)
    for path in (run, run / "ckpt", tmp_path):
        assert run_json(["inspect", str(path)], capsys)["path"] == str(run / "ckpt/step-15"), path
        assert run_json(["verify", str(path)], capsys)["path"] == str(run / "ckpt/step-15"), path
    assert run_json(["diff", str(run), str(run / "ckpt/step-15")], capsys)["same"]
    assert main(["ckpt", "convert", str(run), str(tmp_path / "out.safetensors")]) == 0
    assert main(["ckpt", "export", str(run), str(tmp_path / "out")]) == 0
    # Two folders of checkpoints: which one is meant is not a guess.
    make(run / "best/step-3", step=3)
    error = run_json(["inspect", str(run)], capsys, code=1)["error"]
    assert "several folders with checkpoints" in error and f"{run}/best, {run}/ckpt" in error, error
    assert run_json(["inspect", str(run / "best")], capsys)["step"] == 3
    # No checkpoint anywhere: the error of a path without one.
    assert "no such checkpoint" in run_json(["inspect", str(run / "plots")], capsys, code=1)["error"]


def test_report_of_a_checkpoint_suggests_ckpt_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``report`` prints plans only. For a checkpoint it recommends ``ckpt inspect``."""
    make(tmp_path / "step-15")
    for path in (tmp_path, tmp_path / "step-15"):
        assert main(["report", str(path)]) == 1
        assert f"Fix: te-fsdp ckpt inspect {path}" in capsys.readouterr().err


def test_inspect_prints_extra_in_python_notation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text shows tensors, tuples and other values in Python notation instead of the manifest's JSON."""
    extra = {
        "order": torch.zeros(3, 2),
        "pair": (1, "a"),
        "seen": {4},
        "flags": [True, None],
        "epoch": {"n": 2},
    }
    path = make(tmp_path / "a", **extra)
    assert main(["ckpt", "inspect", str(path)]) == 0
    text = capsys.readouterr().out
    shown = ["order: tensor (3 x 2, float32)", "pair: (1, 'a')", "seen: set([4])", "flags: [True, None]"]
    assert all(f"\n  {line}\n" in text for line in [*shown, "epoch: {n: 2}"]), text
    assert "te_fsdp." not in text.split("\nextra:")[1], text


def test_max_shard_size_requires_a_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["ckpt", "convert", str(make(tmp_path / "a")), str(tmp_path / "b"), "--to", "safetensors"]
    assert main([*args, "--max-shard-size", "5000"]) == 2
    assert "expected a size with a unit" in capsys.readouterr().err
    assert main([*args, "--max-shard-size", "5kB"]) == 0
