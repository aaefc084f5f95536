"""Check that checkpoints of earlier te_fsdp versions load with the same bits.

tests/unit/old_checkpoints has one archive per version: te_fsdp's own directory, written by 4 ranks on
dp_shard 2 x tp 2, the same values as plain DCP, written by one rank, and the digests of what that version loaded. Its
write.py is the program that wrote them. The model has a gated LayerNormMLP in BF16 and one with FP8 weights.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import te_fsdp

FOLDER = Path(__file__).parent / "old_checkpoints"
#: b52647e recorded no constructor settings of modules.
ALLOW = ["settings"]
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder with a version's files."""
    with tarfile.open(FOLDER / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path)  # `filter` needs Python 3.11.4
    return tmp_path


def build() -> nn.Sequential:
    """Return the model of write.py in one process, with other values."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    def mlp() -> te.LayerNormMLP:
        return te.LayerNormMLP(32, 32, activation="swiglu", params_dtype=torch.bfloat16, device="cpu")

    torch.manual_seed(1)
    first = mlp()
    with te.quantized_model_init(recipe=Float8CurrentScaling(), preserve_high_precision_init_val=True):
        return nn.Sequential(first, mlp())


def digest(tensor: Any) -> str:
    """Return the digest of a tensor's values in FP32, as write.py computes it."""
    values = tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor
    return hashlib.sha256(values.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def digests(model: nn.Module) -> dict[str, str]:
    """Return the digests of a model's parameters."""
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


def test_two_older_versions_are_tested() -> None:
    """Both versions whose files must load are present."""
    assert VERSIONS == ["a0e77c7", "b52647e"]


def test_older_checkpoint_loads_bitwise_equal(te: Any, old: Path) -> None:
    """A checkpoint of 4 ranks loads in one process: weights, main weights and moments as the old version read them."""
    expected = json.loads((old / "digests.json").read_text())
    model = build()
    assert digests(model) != expected["parameters"]  # control
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    te_fsdp.main_weights(model, optimizer)
    assert te_fsdp.checkpoint.load(old / "te", model, optimizer, allow=ALLOW)["step"] == 2
    assert digests(model) == expected["parameters"]
    states = {
        f"{name} {key}": digest(torch.as_tensor(value))
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    assert states == expected["optimizer"]


def test_older_plain_dcp_loads_bitwise_equal(te: Any, old: Path) -> None:
    """Plain DCP of the old version loads through ``te_fsdp.checkpoint.load``, and by DCP if torch finds the keys."""
    expected = json.loads((old / "digests.json").read_text())["parameters"]
    model = build()
    te_fsdp.checkpoint.load(old / "dcp", model, allow=ALLOW)
    assert digests(model) == expected
    model = build()
    state = model.state_dict()
    if any(
        "._extra_state." in key
        for key in dcp.FileSystemReader(old / "dcp").read_metadata().state_dict_metadata
    ):
        with pytest.raises(
            dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: 0\._extra_state"
        ):
            dcp.load(state, checkpoint_id=old / "dcp")  # b52647e wrote the mesh into the name
        return
    dcp.load(state, checkpoint_id=old / "dcp")
    model.load_state_dict(state)
    assert digests(model) == expected
