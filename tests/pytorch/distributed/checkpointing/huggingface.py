"""Bodies: a Hugging Face model's folder into a sharded model, directly or through a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from experts.model import _AllToAll
from torch import nn


def build(config: dict[str, Any], meshes: Any | None) -> nn.Module:
    """Return the model: stock TE on its device, or sharded and filled with other values."""
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


@dataclass(frozen=True)
class Case:
    """A trained model on a mesh that becomes a folder.

    Attributes:
        axes: Of the mesh.
        layers: Options of the layers.
        quantized: Whether weights are stored in FP8, with fp32 main weights in the optimizer.
    """

    axes: dict[str, int]
    layers: dict[str, Any] = field(default_factory=dict)
    quantized: bool = False

    def build(self, folder: str, *, sharded: bool = True) -> tuple[nn.Module, Any]:
        """Return the model of a folder, on the mesh or unsharded, and its optimizer."""
        import transformer_engine.pytorch as te
        import transformers
        from transformer_engine.common.recipe import Float8CurrentScaling
        from transformer_engine.pytorch.optimizers import FusedAdam

        import te_fsdp
        from te_fsdp.checkpoint.portable import huggingface as hf
        from tests.unit.huggingface_models import TeModel

        architecture, config = hf.read_config(folder), transformers.AutoConfig.from_pretrained(folder)
        options: dict[str, Any] = {"set_parallel_mode": True, **self.layers}
        if not sharded:
            return TeModel(te, architecture, config=config, device=harness.device(), **options), None
        meshes = te_fsdp.Meshes.build(**self.axes, device_type=harness.device_type())
        if meshes.ep is not None:
            options["own_experts"] = len(meshes.experts(architecture.experts.count))
        if self.quantized:
            options["params_dtype"] = torch.bfloat16
        with te.quantized_model_init(recipe=Float8CurrentScaling()) if self.quantized else nullcontext():
            model = TeModel(te, architecture, config=config, device="meta", **options, **meshes.te_kwargs())
        layers = [f"layers.{n}" for n in range(architecture.layers)]
        te_fsdp.fully_shard(model, meshes, units=layers)
        te_fsdp.materialize(model, seed=3)
        for layer in model.layers:
            if meshes.ep is not None and layer.experts is not None:
                layer.experts.exchange = partial(dispatch_to_experts, meshes.ep)
        if self.quantized:
            return model, FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


def dispatch_to_experts(ep: Any, experts: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Run rows, one expert's after the other, through the experts of all ranks of ``ep``."""
    own, size, group = len(counts) // ep.size(), ep.size(), ep.get_group()
    mine: list[Any] = [None] * size
    dist.all_gather_object(mine, [counts[r * own : (r + 1) * own] for r in range(size)], group=group)
    send = [sum(part) for part in mine[ep.get_local_rank()]]
    arriving = [every[ep.get_local_rank()] for every in mine]  # rank, expert
    receive = [sum(part) for part in arriving]
    pieces = _AllToAll.apply(rows, send, receive, group).split([n for part in arriving for n in part])
    by_expert = [pieces[r * own + e] for e in range(own) for r in range(size)]
    out = experts(torch.cat(by_expert), [sum(part[e] for part in arriving) for e in range(own)])
    back = out.split([len(piece) for piece in by_expert])
    by_rank = torch.cat([back[e * size + r] for r in range(size) for e in range(own)])
    return _AllToAll.apply(by_rank, receive, send, group)


def save_trained(folder: str, case: dict[str, Any], target: str) -> dict[str, Any]:
    """Load a folder onto a mesh, train a step and save it as a folder. Compare it with every reader.

    Returns:
        Of the folder that was written: tensors that differ from what the command line exports of a checkpoint, from
        the model when loaded, and from what they were before the step; files by rank 0's listing; on rank 0 the
        largest logit, transformers' own error in fp32 and the unsharded TransformerEngine model's.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp
    from te_fsdp.checkpoint.portable import huggingface as hf

    made = Case(**case)
    model, optimizer = made.build(folder)
    hf.load_huggingface(folder, model, optimizer)
    outcome: dict[str, Any] = {"reloaded": []}
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0)).to(harness.device())
    with te.autocast(enabled=made.quantized, recipe=Float8CurrentScaling()):
        loss = model(tokens).float().square().mean()
    loss.backward()
    optimizer.step()
    te_fsdp.checkpoint.save(f"{target}-checkpoint", model, optimizer)
    hf.save_huggingface(target, model, optimizer, config=folder, max_file_bytes=20_000)
    if not made.quantized:
        other, _ = made.build(folder)
        hf.load_huggingface(target, other)
        outcome["reloaded"] = _differing_pieces(model, other)
    if dist.get_rank() == 0:
        outcome |= _written(folder, target, "bfloat16" if made.quantized else "float32")
    dist.barrier()
    if not made.quantized:
        whole, _ = made.build(folder, sharded=False)
        te_fsdp.checkpoint.load(f"{target}-checkpoint", whole)
        if dist.get_rank() == 0:
            outcome |= _against_transformers(target, whole, tokens)
    return outcome


def _written(folder: str, target: str, dtype: str) -> dict[str, Any]:
    """Return the written folder, the folder that the command line exports, and the original."""
    from te_fsdp.checkpoint.lazy_tensors import open_safetensors
    from te_fsdp.cli import main

    export = ["ckpt", "export", f"{target}-checkpoint", f"{target}-cli", "--like", folder, "--dtype", dtype]
    assert main(export) == 0
    paths = map(Path, (target, f"{target}-cli", folder))
    written, exported, before = (open_safetensors(path)[0] for path in paths)
    assert exported.keys() == written.keys() == before.keys()
    return {
        "other than exported": _differing(written, exported),
        "trained": len(_differing(written, before)) / len(written),
        "files": sorted(path.name for path in Path(target).iterdir()),
        "hidden": [path.name for path in Path(target).parent.iterdir() if path.name.startswith(".")],
    }


def save_with_faults(folder: str, config: dict[str, Any], target: str) -> dict[str, list[str]]:
    """Save with a full disk on one rank and unreadable weights on another. Afterwards a save works."""
    import te_fsdp
    from te_fsdp.checkpoint.lazy_tensors import InMemory
    from te_fsdp.checkpoint.portable import huggingface as hf, weight_stream
    from te_fsdp.checkpoint.portable.huggingface_map import Group
    from te_fsdp.errors import CheckpointError

    model = build(config, te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type()))
    hf.load_huggingface(folder, model)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def unreadable(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    outcome: dict[str, list[str]] = {"errors": [], "left": []}
    faults = (
        (weight_stream, "write_header", full),
        (InMemory, "on_device", unreadable),
        (Group, "convert", unreadable),
    )
    for module, name, fault in faults:
        stock = getattr(module, name)
        try:
            if dist.get_rank() == 1:
                setattr(module, name, fault)
            hf.save_huggingface(target, model, config=config, max_file_bytes=20_000)
        except CheckpointError as error:
            outcome["errors"].append(str(error))
        finally:
            setattr(module, name, stock)
        dist.barrier()
        outcome["left"] += [path.name for path in Path(target).parent.iterdir() if path != Path(folder)]
        dist.barrier()
    hf.save_huggingface(target, model, config=config, max_file_bytes=20_000)
    outcome["written"] = sorted(path.name for path in Path(target).iterdir())
    return outcome


def errors_of_tp_sharded_gate_up(folder: str) -> list[str]:
    """Return the errors of saving and loading experts whose fused gate and up tp shards."""
    import transformer_engine.pytorch as te
    import transformers

    import te_fsdp
    from te_fsdp.checkpoint.portable import huggingface as hf
    from te_fsdp.errors import CheckpointError
    from tests.unit.huggingface_models import TeModel

    meshes = te_fsdp.Meshes.build(tp=2, device_type=harness.device_type())
    config, kwargs = transformers.AutoConfig.from_pretrained(folder), meshes.te_kwargs()
    model = TeModel(
        te, hf.read_config(folder), config=config, device="meta", set_parallel_mode=True, **kwargs
    )
    fc1 = te.GroupedLinear(4, 32, 128, bias=False, parallel_mode="column", device="meta", **kwargs)
    model.layers[1].experts.fc1 = fc1
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    texts = []
    calls = [lambda: hf.save_huggingface("nowhere", model, config=folder)]
    for call in (*calls, lambda: hf.load_huggingface(folder, model)):
        try:
            call()
        except CheckpointError as error:
            texts.append(str(error))
    return texts


def _against_transformers(folder: str, whole: nn.Module, tokens: torch.Tensor) -> dict[str, float]:
    import transformers

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    theirs = theirs.to(harness.device())
    theirs.config._experts_implementation = "eager"
    with torch.no_grad():
        rounded, mine = theirs(tokens).logits, whole(tokens)
        exact = theirs.double()(tokens).logits
    return {
        "largest": exact.abs().max().item(),
        "their error": (rounded - exact).abs().max().item(),
        "our error": (mine - exact).abs().max().item(),
    }


def _differing(one: Any, other: Any) -> list[str]:
    return [name for name in one if not torch.equal(one[name].full(), other[name].full())]


def _differing_pieces(model: nn.Module, other: nn.Module) -> list[str]:
    """Return parameters whose bytes on this rank differ between two models."""
    from te_fsdp.checkpoint.model_state import model_state

    pairs = zip(model_state(model).entries.items(), model_state(other).entries.items(), strict=True)
    return [
        key
        for (key, one), (_, two) in pairs
        if not all(torch.equal(p.tensor, q.tensor) for p, q in zip(one.pieces, two.pieces, strict=True))
    ]


def different_shards(model: nn.Module, whole: nn.Module) -> list[str]:
    """Return the parameters of which a local piece differs, in any bit, from the unsharded model at its place."""
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


def load_different_folders(folders: list[str], config: dict[str, Any]) -> tuple[str, bool]:
    """Load another folder on each rank; return the error, and whether the model is unchanged."""
    import te_fsdp
    from te_fsdp.checkpoint.portable import huggingface as hf
    from te_fsdp.errors import CheckpointError

    model = build(config, te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type()))
    before, error = [(p.full_tensor(), p.requires_grad) for p in model.parameters()], ""
    try:
        hf.load_huggingface(folders[dist.get_rank()], model)
    except CheckpointError as raised:
        error = str(raised)
    after = [(p.full_tensor(), p.requires_grad) for p in model.parameters()]
    kept = (torch.equal(x, y) and a == b for (x, a), (y, b) in zip(before, after, strict=True))
    return error, all(kept)


def save_with_different_configs(folders: list[str], config: dict[str, Any], target: str) -> tuple[str, bool]:
    """Save with another description on each rank; return the error, and whether a folder was written."""
    import te_fsdp
    from te_fsdp.checkpoint.portable import huggingface as hf
    from te_fsdp.errors import CheckpointError

    model, error = build(config, te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())), ""
    for parameter in model.parameters():
        parameter.detach().zero_()  # biases that the folder lacks
    try:
        hf.save_huggingface(target, model, config=folders[dist.get_rank()])
    except CheckpointError as raised:
        error = str(raised)
    return error, Path(target).exists()


def load_onto_mesh(
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
    before = different_shards(model, whole)
    refusal = ""
    try:  # all ranks must raise, and change nothing
        hf.load_huggingface(f"{folder}-missing" if dist.get_rank() == 1 else folder, model)
    except CheckpointError as error:
        refusal = str(error)
    assert different_shards(model, whole) == before
    hf.load_huggingface(folder, model)
    direct = different_shards(model, whole)
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
        "through a checkpoint": different_shards(other, whole),
        "logit": expected.abs().max().item(),
        "error": (got - expected).abs().max().item(),
    }
