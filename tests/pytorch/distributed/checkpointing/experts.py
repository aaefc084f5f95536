"""Bodies: checkpoints of layers of experts between meshes or forms, compared by logical value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from experts.bodies import _part, batch
from experts.model import build
from harness import wire
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from checkpointing.bodies import _bytes, differing, first_steps
from checkpointing.mistakes import error_of


@dataclass(frozen=True)
class Case:
    """The saved model.

    Attributes:
        weights: "fp32" (with AdamW), "bf16" or "quantized" (with FusedAdam and main weights).
        recipe: TE's quantization recipe.
        experts: how many; distributed unevenly over ranks that do not divide them.
        bias: whether the experts have biases, which TE refuses under tensor parallelism.
        missing: whether expert 1 never gets a gradient, so that it has no optimizer state.
        apart: whether the experts are in a separate group of the optimizer.
    """

    weights: str = "fp32"
    recipe: str = "none"
    experts: int = 4
    bias: bool = False
    missing: bool = False
    apart: bool = True


@dataclass(frozen=True)
class Setup:
    """The mesh and strategy.

    Attributes:
        axes: mesh axes; empty for one process, ``None`` for stock TE without te_fsdp.
        single: whether a layer has one parameter for all experts.
    """

    axes: tuple[tuple[str, int], ...] | None = ()
    single: bool = False

    @property
    def name(self) -> str:
        mesh = "stock" if self.axes is None else "".join(f"{a}{n}" for a, n in self.axes) or "one"
        return mesh + ("-single" if self.single else "")


class Run:
    """A mixture of experts on a mesh with its optimizer."""

    def __init__(self, case: Case, place: Setup, seed: int) -> None:
        import te_fsdp

        self.case, self.place = case, place
        options = {"bias": case.bias, "single": place.single}
        if place.axes is None:
            self.meshes = None
            torch.manual_seed(seed)
            self.model = build(case.recipe, case.weights, case.experts, None, harness.device(), **options)
        else:
            self.meshes = te_fsdp.Meshes.build(**dict(place.axes), device_type=harness.device_type())
            self.model = build(case.recipe, case.weights, case.experts, self.meshes, "meta", **options)
            te_fsdp.fully_shard(self.model, self.meshes)
            te_fsdp.materialize(self.model, seed=seed)
        first = [n for n, _ in self.model.named_parameters() if ("mixture" if case.apart else "weight") in n]
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if n in first], "lr": 3e-3},
            {"params": [p for n, p in self.model.named_parameters() if n not in first], "weight_decay": 0.2},
        ]
        if case.weights == "fp32":
            self.optimizer: Any = torch.optim.AdamW(groups, lr=2e-3)
        else:
            from transformer_engine.pytorch.optimizers import FusedAdam

            self.optimizer = FusedAdam(groups, lr=2e-3, master_weights=True)

    def train(self) -> list[float]:
        """Return losses of the steps before a save; the same ones every time."""
        return [self._step(step) for step in range(first_steps(self.case.recipe))]

    def _step(self, step: int) -> float:
        data = batch(self.case.recipe, self.case.weights, self.case.experts, "uneven", step)
        x, target, chosen = (t if self.meshes is None else _part(t, self.meshes) for t in data)
        output = self.model(x.to(next(self.model.parameters()).dtype), chosen)
        loss = (output.float() - target.float()).square().mean()
        loss.backward()
        if self.case.missing:
            for name, parameter in self.model.named_parameters():
                if name.endswith(("weight1", "bias1")):
                    parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def logical(run: Run) -> dict[str, torch.Tensor]:
    """Return original tensors of each expert, by global names, put together from all ranks. Collective."""
    from te_fsdp.quantized.grouped_weight import as_plain_parameter
    from te_fsdp.upstream import torch_dtensor as _torch

    mine: dict[str, tuple[tuple[int, ...], list[tuple[Any, torch.Tensor]]]] = {}
    for prefix, module in run.model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            local = as_plain_parameter(_torch.local_of(parameter)).dequantize().detach()
            values = {"": local}
            for key, state in run.optimizer.state.get(parameter, {}).items():
                values[f".{key}"] = as_plain_parameter(_torch.local_of(state)).detach()
            for end, value in values.items():
                for label, shape, piece in _pieces(module, own, parameter, value):
                    mine.setdefault(f"{prefix}.{label}{end}", (shape, []))[1].append(piece)
        _add_delayed(mine, prefix, module)
    everyone = wire.gather(mine)
    names = sorted({name for result in everyone for name in result})
    return {name: _assemble(name, [result[name] for result in everyone if name in result]) for name in names}


def _pieces(
    module: Any, own: str, parameter: torch.Tensor, value: torch.Tensor
) -> list[tuple[str, Any, Any]]:
    """Return name, shape and rectangles of the original tensors that a local tensor contains parts of."""
    from te_fsdp.records import binding_of
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import te as _te

    info = shard_info(module, own, parameter)
    binding = binding_of(module)
    experts = binding.experts if binding is not None else None
    grouped = _te.kind_of(module) == "GroupedLinear" and own in ("weight", "bias")
    if tuple(value.shape) != info.local_shape:  # a number
        first = experts.first if experts is not None else 0
        count = module.num_gemms if grouped else 1
        labels = [f"{own}{first + i}" for i in range(count)] if grouped else [own]
        return [(label, tuple(value.shape), ((...,), value.cpu().clone())) for label in labels]
    results = []
    for box in info.boxes:
        part = value[box.local_slices()].cpu().clone()
        if not grouped:
            results.append((own, info.original_shape, (box.original_slices(), part)))
            continue
        for index, expert in enumerate(part, box.original[0]):
            results.append((f"{own}{index}", info.original_shape[1:], (box.original_slices()[1:], expert)))
    return results


def _add_delayed(mine: dict[str, Any], prefix: str, module: Any) -> None:
    """Add delayed scaling's state by expert, without the newest row, which each rank has alone until a forward."""
    from te_fsdp.records import binding_of
    from te_fsdp.upstream import te as _te

    binding = binding_of(module)
    first = binding.experts.first if binding is not None and binding.experts is not None else 0
    count = module.num_gemms if _te.kind_of(module) == "GroupedLinear" else 1
    for key, state in (_te.delayed_states(module) or {}).items():
        for name, tensor in (("scale", state.scale), ("amax_history", state.amax_history[1:])):
            for index, part in enumerate(tensor.cpu().clone().chunk(count, dim=-1), first):
                mine[f"{prefix}:{key}.{name}.{index}"] = (tuple(part.shape), [((...,), part)])


def _assemble(name: str, held: list[tuple[tuple[int, ...], list[tuple[Any, torch.Tensor]]]]) -> torch.Tensor:
    shape = held[0][0]
    whole = torch.empty(shape, dtype=held[0][1][0][1].dtype)
    written = torch.zeros(shape, dtype=torch.bool)
    for slices, values in (piece for _, pieces in held for piece in pieces):
        if written[slices].any():
            assert torch.equal(_bytes(whole[slices]), _bytes(values)), f"{name}: replicas differ"
        whole[slices], written[slices] = values, True
    assert written.all(), f"{name}: holes"
    return whole


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def save_on(case: Case, places: list[Setup], directory: str, *, optimizer: bool = True) -> None:
    """Train on each of the meshes, save, write down the logical state."""
    import te_fsdp

    for place in places:
        run = Run(case, place, seed=0)
        run.train()
        te_fsdp.checkpoint.save(f"{directory}/{place.name}", run.model, run.optimizer if optimizer else None)
        expected = logical(run)
        if is_first():
            torch.save(expected, f"{directory}/{place.name}.pt")


def load_on(case: Case, pairs: list[tuple[Setup, Setup]], directory: str) -> dict[str, Any]:
    """Load the checkpoint of a different mesh. Compare logical values bit for bit.

    Returns:
        By pair: what is wrong, how many tensors were compared and how many differed before, the groups' options.
    """
    import te_fsdp

    results = {}
    for source, target in pairs:
        expected = torch.load(f"{directory}/{source.name}.pt", weights_only=True)
        run = Run(case, target, seed=1)
        fresh = differing(expected, logical(run))
        loaded = te_fsdp.checkpoint.load(f"{directory}/{source.name}", run.model, run.optimizer)
        assert loaded.is_complete and not loaded.converted, (loaded.left, loaded.converted)
        outcome = {"wrong": differing(expected, logical(run)), "tensors": len(expected), "fresh": len(fresh)}
        outcome["lr"] = [group["lr"] for group in run.optimizer.param_groups]
        results[f"{source.name} -> {target.name}"] = outcome
    return results


def convert_on(
    case: Case, places: list[Setup], source: str, optimizer: bool, directory: str
) -> dict[str, Any]:
    """Load a checkpoint of a different format, compared with the first setup in one process."""
    import te_fsdp

    results = {}
    for place in places:
        run = Run(case, place, seed=1)
        fresh = logical(run)
        given = run.optimizer if optimizer else None
        loaded = te_fsdp.checkpoint.load(f"{directory}/{source}", run.model, given)
        values = logical(run)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            torch.save(values, f"{directory}/converted.pt")
        expected = torch.load(f"{directory}/converted.pt", weights_only=True)
        outcome = {"wrong": differing(expected, values), "fresh": len(differing(fresh, values))}
        results[place.name] = {**outcome, "converted": sorted(loaded.converted)}
    return results


def plain_dcp(case: Case, place: Setup, others: list[Setup], directory: str) -> dict[str, Any]:
    """Save by DCP with global names. Load by te_fsdp.checkpoint.load, and by DCP where it can."""
    import te_fsdp

    run = Run(case, place, seed=0)
    run.train()
    expected = logical(run)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{directory}/dcp")
    results = {}
    for target in others:
        other = Run(case, target, seed=1)
        loaded = te_fsdp.checkpoint.load(f"{directory}/dcp", other.model, other.optimizer)
        results[target.name] = {"wrong": differing(expected, logical(other)), "left": loaded.left}
        results[target.name]["lr"] = [group["lr"] for group in other.optimizer.param_groups]
        if case.apart:
            continue
        other = Run(case, target, seed=1)
        model, optimizer = get_state_dict(other.model, other.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=f"{directory}/dcp")
        set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        results[f"{target.name} by DCP"] = {
            "wrong": differing(expected, logical(other)),
            "lr": [group["lr"] for group in other.optimizer.param_groups],
        }
    return results


def local_names(case: Case, directory: str) -> dict[str, Any]:
    """Count experts from 0 on every rank. DCP loses the experts of one rank, and te_fsdp.checkpoint raises."""
    import transformer_engine.pytorch as te

    import te_fsdp

    rank = dist.get_rank()
    torch.manual_seed(rank)  # other experts on each rank
    layer = te.GroupedLinear(2, 64, 64, bias=False, params_dtype=torch.float32, device=harness.device())
    mine = layer.weight0.detach().clone()
    dcp.save(layer.state_dict(), checkpoint_id=f"{directory}/dcp")
    state = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    dcp.load(state, checkpoint_id=f"{directory}/dcp")
    lost = not torch.equal(state["weight0"], mine)
    refused = error_of(lambda: te_fsdp.checkpoint.save(f"{directory}/ours", layer))
    return {"lost": lost, "refused": refused, "left": Path(directory, "ours").exists()}
