"""Bodies: a Hugging Face model's folder into a sharded model, directly and through a checkpoint."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn


def build(config: dict[str, Any], meshes: Any | None) -> nn.Module:
    """The model: stock TE on its device, or sharded and filled with other values."""
    import transformer_engine.pytorch as te

    import te_fsdp
    from te_fsdp.checkpoint.portable import huggingface as hf
    from tests.unit.huggingface_models import TeModel

    options: dict[str, Any] = {
        "set_parallel_mode": True,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
    }
    architecture = hf.read_config(config)
    if meshes is None:
        return TeModel(te, architecture, device=harness.device(), **options).to(harness.device())
    model = TeModel(te, architecture, device="meta", **options, **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, units=[te.TransformerLayer])
    te_fsdp.materialize(model, seed=3)
    return model


def wrong_pieces(model: nn.Module, whole: nn.Module) -> list[str]:
    """Parameters of which a local piece is not, bit for bit, what the unsharded model has at its place."""
    from te_fsdp.checkpoint.model_state import model_state

    originals = dict(whole.named_parameters())
    wrong = []
    for key, entry in model_state(model).entries.items():
        name = key.removeprefix("model.")
        for piece in entry.pieces if name in originals else ():
            box = [slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True)]
            if not torch.equal(piece.tensor, originals[name].detach()[tuple(box)]):
                wrong.append(name)
    return wrong


def load_everywhere(
    folder: str, config: dict[str, Any], axes: dict[str, int], checkpoint: str
) -> dict[str, Any]:
    """Load onto a mesh, directly, and from a checkpoint of the unsharded model.

    Returns:
        Parameters that are wrong after each, before any; the error where one rank lacks the folder; largest logit
        and its largest error.
    """
    import te_fsdp
    from te_fsdp.checkpoint.portable import huggingface as hf
    from te_fsdp.errors import CheckpointError

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    whole = build(config, None)
    hf.load_huggingface(folder, whole)
    tensors = dict(hf.import_huggingface(folder, blocks=hf.TeBlocks.of(whole)))
    assert all(torch.equal(p.detach().cpu(), tensors[n]) for n, p in whole.named_parameters())

    model = build(config, meshes)
    before = wrong_pieces(model, whole)
    refusal = ""
    try:  # all ranks must raise, and change nothing
        hf.load_huggingface(f"{folder}-missing" if dist.get_rank() == 1 else folder, model)
    except CheckpointError as error:
        refusal = str(error)
    assert wrong_pieces(model, whole) == before
    hf.load_huggingface(folder, model)
    direct = wrong_pieces(model, whole)
    tokens = torch.randint(0, config["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(harness.device())
    with torch.no_grad():
        expected, got = whole(tokens), model(tokens)

    te_fsdp.checkpoint.save(checkpoint, whole)
    other = build(config, meshes)
    te_fsdp.checkpoint.load(checkpoint, other)
    return {
        "parameters": len(list(model.parameters())),
        "before": before,
        "refusal": refusal,
        "direct": direct,
        "through a checkpoint": wrong_pieces(other, whole),
        "logit": expected.abs().max().item(),
        "error": (got - expected).abs().max().item(),
    }
