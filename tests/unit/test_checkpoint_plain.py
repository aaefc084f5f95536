"""Load files of stock `torch.distributed.checkpoint` scripts, or reject them with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from te_fsdp import checkpoint
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    results = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        results |= {f"{name}.{key}": v.clone() for key, v in optimizer.state[parameter].items()}
    return results


class App:
    """As in torch's tutorials: one object of a job, whose state DCP requests."""

    def __init__(self, *held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self.held)
        return {"model": model, "optim": optimizer, "step": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise if called: it only shows that this is one of DCP's stateful objects."""


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WRITERS: dict[str, Callable[..., Any]] = {
    "app": lambda m, o: {"app": App(m, o)},
    "weights on top": lambda m, o: {
        **get_state_dict(m, o, options=FLAT)[0],
        "optimizer": get_state_dict(m, o, options=FLAT)[1],
        "train_state": {"step": torch.tensor(3)},
        "names": ["a"],
        "epoch": 2,
    },
}


@pytest.mark.parametrize("form", WRITERS)
def test_load_reads_checkpoints_of_stock_dcp_scripts(tmp_path: Path, form: str) -> None:
    """torch's tutorials save one object. torchtitan saves the weights next to the optimizer."""
    expected = values(*(source := trained(0)))
    dcp.save(WRITERS[form](*source), checkpoint_id=tmp_path / "a")
    target = trained(1)
    assert not torch.equal(values(*target)["0.weight.exp_avg"], expected["0.weight.exp_avg"]), "the control"
    loaded = checkpoint.load(tmp_path / "a", *target)
    result = values(*target)
    assert [name for name in expected if not torch.equal(result[name], expected[name])] == []
    assert target[1].param_groups[0]["lr"] == 0.01
    left = {"weights on top": "left: epoch, names, train_state"}.get(form, "left: step")
    assert left in loaded.notes and any(n.startswith("optimizer: taken") for n in loaded.notes)
    assert main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "checkpoint"]) == 0
    checkpoint.load(tmp_path / "b", *trained(2))


def test_invalid_state_dicts_raise_with_a_fix(tmp_path: Path) -> None:
    model, optimizer = get_state_dict(*trained(0))
    unclear = {"models": [model], "others": []}, {"optimizer": optimizer}, {"average": model}
    for number, state in enumerate(unclear):
        dcp.save(state, checkpoint_id=tmp_path / f"{number}")
        with pytest.raises(CheckpointError, match="no state dict found.*use te-fsdp ckpt convert --key"):
            checkpoint.load(tmp_path / f"{number}", trained(1)[0])


def test_unflattened_dcp_checkpoint_is_read_by_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without flattening, DCP pickles complete dicts. `load` recommends `convert`, which reads their tensors."""
    model, optimizer = get_state_dict(*trained(0))
    state = {"model": model, "optimizer": optimizer}
    dcp.save(state, checkpoint_id=tmp_path / "flat")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=tmp_path / "whole", planner=planner)
    with pytest.raises(CheckpointError, match="without flattening, read it with te-fsdp ckpt convert"):
        checkpoint.load(tmp_path / "whole", trained(1)[0])
    for name in ("flat", "whole"):
        target = str(tmp_path / f"{name}-ours")
        assert main(["ckpt", "convert", str(tmp_path / name), target, "--to", "checkpoint"]) == 0
    assert main(["ckpt", "diff", str(tmp_path / "flat-ours"), str(tmp_path / "whole-ours")]) == 0
    target = trained(1)
    checkpoint.load(tmp_path / "whole-ours", *target)
    assert torch.equal(values(*target)["1.weight.exp_avg_sq"], values(*trained(0))["1.weight.exp_avg_sq"])


def test_other_dcp_serialization_formats_are_rejected_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors name the format instead of reporting corruption. One rank's file is never accepted as complete."""
    state = trained(0)[0].state_dict()
    writer = dcp.FileSystemWriter(tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer)
    with pytest.raises(CheckpointError, match="another piece stored there .safetensors"):
        checkpoint.load(tmp_path / "a", trained(1)[0])
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(tmp_path / "b"))
    with pytest.raises(CheckpointError, match="no such checkpoint.*te-fsdp ckpt convert .*/b TARGET --to"):
        checkpoint.load(tmp_path / "b", trained(1)[0])
    assert main(["ckpt", "convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "checkpoint"]) == 0
    target = trained(1)[0]
    checkpoint.load(tmp_path / "c", target)
    assert torch.equal(target[0].weight, state["0.weight"])
    # As HuggingFaceStorageWriter(save_distributed=True) writes on two ranks: the first one's begins at 0 like a full
    # tensor.
    (tmp_path / "d").mkdir()
    for rank in range(2):
        info = f'{{"0.weight": {{"saved_offsets": [{2 * rank}, 0]}}}}'
        part = {"0.weight": state["0.weight"][2 * rank :][:2].contiguous()}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(part, tmp_path / "d" / name, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info})
    capsys.readouterr()
    for source in ("d", "d/shard-00001-model-00001-of-00001.safetensors"):
        assert main(["ckpt", "convert", str(tmp_path / source), str(tmp_path / "e.pt")]) == 1
        assert "joins ranks' parts with enable_consolidation=True" in capsys.readouterr().err
    assert not (tmp_path / "e.pt").exists()
