"""State dicts of stock TransformerEngine, exchanged with a mesh.

They are converted by `te-fsdp ckpt` in both directions, or read as plain DCP directories.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointing import stock_te
from checkpointing.models import Case

from te_fsdp.cli import main

DP2_TP2 = {"dp_shard": 2, "tp": 2}
ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# fp32: as in the parity tests, ten chained sums of up to 256 products in a different order. bf16: activations are
# rounded to 8 bits, so that a loss may move by a unit in the last place.
TOLERANCE = {"adamw": 1e-5, "fused": 2**-8}


def convert(folder: Path, source: str, target: str, *way: str) -> None:
    assert main(["ckpt", "convert", str(folder / source), str(folder / target), *way]) == 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_stock_te_to_a_mesh_and_back(pool, tmp_path, optimizer):
    """Check a round trip from DCP to dp2 x tp2 with stacked layouts and back to torch.load, bit for bit."""
    case, where = Case(stacked=True, optimizer=optimizer), {"directory": str(tmp_path)}
    (losses,) = pool.run(stock_te.save_with_torch, 1, env=ENVIRONMENT, case=case, **where)
    convert(tmp_path, "plain", "ours", "--to", "checkpoint")
    mesh = {"axes": DP2_TP2, "name": "ours", "env": ENVIRONMENT, **where}
    for outcome in pool.run(stock_te.load_converted, 4, case=case, train=True, **mesh):
        assert outcome["wrong"] == [] and outcome["tensors"] > 30
        assert outcome["losses"] == pytest.approx(losses, rel=TOLERANCE[optimizer], abs=0)
    control = pool.run(stock_te.load_converted, 4, case=case, train=False, load=False, **mesh)
    assert len(control[0]["wrong"]) > 20
    assert main(["ckpt", "diff", str(tmp_path / "ours"), str(tmp_path / "ours-from-mesh")]) == 0
    convert(tmp_path, "ours-from-mesh", "back.pt", "--everything")
    (outcome,) = pool.run(stock_te.load_with_torch, 1, env=ENVIRONMENT, case=case, name="back.pt", **where)
    assert outcome["wrong"] == []
    assert outcome["losses"] == losses, "the same state in the same process: the same losses, bit for bit"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_quantized_weights_of_stock_te_to_a_mesh(pool, tmp_path, recipe):
    case = Case(stacked=True, optimizer="fused", recipe=recipe, quantized=True)
    where = {"directory": str(tmp_path), "env": ENVIRONMENT}
    pool.run(stock_te.save_with_torch, 1, case=case, **where)
    pool.run(stock_te.convert, 1, **where)  # TE's tensors need TE or its emulation
    for outcome in pool.run(
        stock_te.load_converted, 4, case=case, axes=DP2_TP2, name="ours", train=False, **where
    ):
        assert outcome["wrong"] == [] and outcome["tensors"] > 30
    assert main(["ckpt", "diff", str(tmp_path / "ours"), str(tmp_path / "ours-from-mesh")]) == 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_dcp_directories_of_stock_te_load(pool, tmp_path, recipe):
    """Check DCP directories that torch saved, with and without optimizer, loaded on dp2 x tp2 bit for bit."""
    optimizer = "adamw" if recipe == "none" else "fused"
    case = Case(stacked=True, optimizer=optimizer, recipe=recipe, quantized=recipe != "none", unused=False)
    where = {"directory": str(tmp_path), "env": ENVIRONMENT}
    pool.run(stock_te.save_with_plain_dcp, 1, case=case, **where)
    results = pool.run(stock_te.load_plain_dcp, 4, case=case, axes=DP2_TP2, **where)
    assert [r["whole"]["warnings"] > 0 for r in results] == [True, False, False, False]
    for found in results:
        whole, weights, stripped = (found[name] for name in ("whole", "weights", "stripped"))
        assert whole["wrong"] == [] and whole["fresh"] > 20 and whole["left"] == whole["converted"] == {}
        assert "a plain torch.distributed.checkpoint directory" in whole["notes"][0]
        assert "left: step" in whole["notes"]
        assert any(note.startswith("optimizer: taken, ") for note in whole["notes"])
        taken = "delayed-scaling state: taken from TransformerEngine's _extra_state of 4 module(s)"
        assert (taken in whole["notes"]) == (recipe == "delayed")
        assert weights["wrong"] and all("." in name.removeprefix("head.") for name in weights["wrong"])
        assert not [name for name in stripped["wrong"] if ":scaling_" not in name], (
            "weights and states are there"
        )
        assert bool(stripped["wrong"]) == (recipe == "delayed"), (
            "the control: histories come from the extra state"
        )
        assert any("_extra_state: none" in note for note in stripped["notes"])


@pytest.mark.ranks(4)
def test_unfit_dcp_directories_raise(pool, tmp_path):
    case = Case(unused=False)
    where = {"directory": str(tmp_path), "env": ENVIRONMENT}
    pool.run(stock_te.save_with_plain_dcp, 1, case=case, **where)
    results = pool.run(stock_te.errors_of_dcp_directories, 4, case=case, axes=DP2_TP2, **where)
    assert all(found == results[0] for found in results)
    words = {
        "ours": "lost its manifest is incomplete",
        "torn": ".distcp: expected ",
        "missing": ".distcp is missing",
        "changed": "its contents have changed (CRC-32)",
        "optimizer": "saved AdamW, this one is SGD",
        "convert": "that would be converted",
    }
    for name, word in words.items():
        kind, text = results[0][name]
        assert kind == "CheckpointError" and word in text, name


@pytest.mark.ranks(2)
def test_exchange_with_stock_fsdp2_without_tp(pool, tmp_path):
    """Check gated fc1 and fused QKV without tp. Nothing is stacked, so both readers load both directories."""
    case = Case(stacked=True, unused=False)
    found = pool.run(
        stock_te.exchange_with_stock_fsdp2, 2, case=case, axes={"dp_shard": 2}, directory=str(tmp_path)
    )
    for outcome in found:
        assert outcome.pop("control") > 20
        assert {name: wrong for name, wrong in outcome.items() if wrong} == {}
        assert len(outcome) == 8


@pytest.mark.ranks(4)
@pytest.mark.parametrize("saved", [DP2_TP2, {"tp": 4}], ids=["dp2 tp2", "tp4"])
def test_rows_in_tp_order_raise(pool, tmp_path, capsys, saved):
    where = {"case": Case(stacked=True, unused=False), "axes": {"dp_shard": 4}, "directory": str(tmp_path)}
    results = pool.run(stock_te.error_of_tp_row_order, 4, saved=saved, env=ENVIRONMENT, **where)
    for outcome in results:
        kind, text = outcome["refused"]
        assert kind == "CheckpointError" and outcome["refused"] == results[0]["refused"]
        assert "with rows in a different order (tensor parallelism)" in text and "fc1_weight" in text
        stacked = {name for name in outcome["left"] if not name.startswith("optimizer.")}
        assert {name.rpartition(".")[2] for name in stacked} >= {"fc1_weight", "weight"} and len(stacked) >= 3
        assert outcome["unchanged"] and {name for name in outcome["wrong"] if name in stacked} == stacked
        assert not [name for name in outcome["wrong"] if not name.startswith(tuple(stacked))], (
            "the rest is there"
        )
    assert main(["ckpt", "export", str(tmp_path / "scrambled"), str(tmp_path / "weights")]) == 1
    assert "weight(s) in pieces of tensor parallelism" in capsys.readouterr().err


@pytest.mark.ranks(4)
@pytest.mark.parametrize("saved", [DP2_TP2, {"tp": 4}], ids=["dp2 tp2", "tp4"])
def test_rows_in_unsharded_order_load(pool, tmp_path, capsys, saved):
    """Check that tp=2 and `te-fsdp ckpt` load a DCP directory with rows in unsharded order. They rejected it."""
    where = {"case": Case(stacked=True, unused=False), "axes": DP2_TP2, "directory": str(tmp_path)}
    for outcome in pool.run(stock_te.load_unsharded_row_order, 4, saved=saved, env=ENVIRONMENT, **where):
        assert outcome["control"] > 20 and outcome["wrong"] == []
    assert main(["ckpt", "export", str(tmp_path / "ordered"), str(tmp_path / "weights")]) == 0, (
        capsys.readouterr()
    )
