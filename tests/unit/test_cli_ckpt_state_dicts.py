"""Test which state dict ``te-fsdp ckpt`` uses as the model's in files of training scripts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from te_fsdp.cli import main

WEIGHTS = {"weight": torch.arange(9000.0), "bias": torch.ones(3)}
GENERATOR = torch.get_rng_state()
TAKEN: dict[str, dict[str, Any]] = {
    "state of a generator": {"model": WEIGHTS, "rng_state": GENERATOR, "step": 3},
    "state of several": {"state_dict": WEIGHTS, "rng": [GENERATOR, GENERATOR], "loss": torch.tensor(2.0)},
    "a larger tensor": {"model": WEIGHTS, "samples": torch.ones(10_000)},
    "another dict under a usual name": {"model": WEIGHTS, "module": {"name": "x"}, "rng_state": GENERATOR},
    "an average next to the weights": {**WEIGHTS, "ema": WEIGHTS},
    "an average with a count": {**WEIGHTS, "ema": {**WEIGHTS, "count": torch.ones(1)}},
    "optimizers by name": {
        **WEIGHTS,
        "optimizers": {"adam": {"state": {0: {"a": torch.ones(40_000)}}, "param_groups": []}},
    },
    "keys of a checkpoint by dcp_to_torch_save": {
        **{f"model.{name}": value for name, value in WEIGHTS.items()},
        "optimizer.state.weight.exp_avg": torch.ones(9000),
        "delayed.layer:scale_fwd.scale": torch.ones(3),
    },
    "an optimizer's states": {**WEIGHTS, "optimizer": {0: {"a": torch.ones(40_000)}}},
    "an optimizer next to the weights": {
        **WEIGHTS,
        "opt": {"state": {0: {"a": torch.ones(20_000)}}, "param_groups": []},
    },
}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("case", TAKEN)
def test_convert_selects_the_model_state_dict(tmp_path: Path, kind: str, case: str) -> None:
    """Bug class: a tensor next to the model's state dict was used as the model, and weights were skipped."""
    source, target = tmp_path / "source", tmp_path / "x.safetensors"
    if kind == "torch":
        torch.save(TAKEN[case], source)
    else:
        dcp.save(TAKEN[case], checkpoint_id=source)
    assert main(["ckpt", "convert", str(source), str(target)]) == 0
    written = safetensors.torch.load_file(target)
    assert written.keys() == WEIGHTS.keys()
    assert all(torch.equal(written[name], value) for name, value in WEIGHTS.items())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(
            {"net": WEIGHTS, "rng_state": GENERATOR},
            "no state dict found: .*got the keys net, rng_state",
            id="unknown key",
        ),
        pytest.param(
            {"app": {"model": WEIGHTS}, "rng_state": GENERATOR},
            "no state dict found",
            id="nested model",
        ),
        pytest.param(
            {"model": WEIGHTS, "module": WEIGHTS, "rng_state": GENERATOR},
            "no state dict found",
            id="two models",
        ),
        pytest.param(
            {"model": [WEIGHTS, WEIGHTS], "rng_state": GENERATOR},
            "no state dict found",
            id="list of models",
        ),
        pytest.param(
            {"net": {"x": torch.ones(3)}, "rng_state": GENERATOR},
            "no state dict found",
            id="one tensor",
        ),
        pytest.param(
            {**WEIGHTS, "model": {"mean": torch.ones(3)}}, "no state dict found", id="weights and model"
        ),
        pytest.param(
            {"model": {"x": torch.ones(2, device="meta")}, "rng_state": GENERATOR},
            r"not plain tensors: x \(meta tensor\)",
            id="meta tensor in model",
        ),
        pytest.param({"model": {}, "step": 3}, "a state dict without tensors", id="empty model"),
        pytest.param({}, "no state dict found: .*got an empty dict", id="empty dict"),
        pytest.param(torch.ones(2), "no state dict found: .*got a tensor", id="tensor"),
        pytest.param(
            {"x": torch.ones(2, device="meta")}, r"not plain tensors: x \(meta tensor\)", id="meta tensor"
        ),
        pytest.param(
            {"x": torch.ones(2).to_sparse()},
            r"not plain tensors: x \(torch.sparse_coo tensor\)",
            id="sparse tensor",
        ),
        pytest.param(
            {"y": torch.ones(2), "x": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)},
            r"not plain tensors: x \(qint8 tensor\)",
            id="qint8 tensor",
        ),
    ],
)
def test_convert_rejects_files_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, text: str
) -> None:
    """Bug class: files without weights were written, or an unexpected exception was raised."""
    torch.save(content, tmp_path / "source.pt")
    for target in ("x.safetensors", "x.pt", "x"):
        kind = ["--to", "checkpoint"] if target == "x" else []
        assert main(["ckpt", "convert", str(tmp_path / "source.pt"), str(tmp_path / target), *kind]) == 1
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "unexpected" not in error
        assert re.search(text, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_key_selects_a_nested_state_dict(tmp_path: Path) -> None:
    torch.save({"net": WEIGHTS, "rng_state": GENERATOR}, tmp_path / "source.pt")
    target = tmp_path / "x.safetensors"
    assert main(["ckpt", "convert", str(tmp_path / "source.pt"), str(target), "--key", "net"]) == 0
    assert safetensors.torch.load_file(target).keys() == WEIGHTS.keys()
