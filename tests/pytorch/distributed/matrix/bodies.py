"""Body: train a sharded model, compared in values with stock TE in one process.

Rank 0 trains the reference first and sends what it saw to the others; then every rank compares its own part.
The optimizer is FusedAdam with fp32 main weights and a large eps, which makes its steps proportional to the gradients:
updates may then be compared to the gradients' own tolerance, and noise in tiny gradients stays tiny.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.distributed as dist
from parity.runs import Findings, check_full_precision, shards
from quantization.models import BATCH, SEQUENCE
from torch import nn

from matrix import negative_controls
from matrix.definitions import ACCUMULATION, MESHES
from matrix.models import build, width_of
from matrix.tolerances import PEAK, ROW, bounds, loss_bound

SEED = 11
EPSILON = 64.0
LEARNING_RATE = 4.0
SEQUENCE_DIM, BATCH_DIM = 0, 1


def steps_of(recipe: str) -> int:
    """Return the number of steps: two, or three with delayed scaling, whose first scales come from no data."""
    return 3 if recipe == "delayed" else 2


@dataclass
class Seen:
    """Results of a training: tensors by name, in the order of their computation."""

    tensors: dict[str, torch.Tensor]

    def send(self, source: int = 0) -> None:
        """Give every rank what the source rank has; the others have tensors of the same shapes. Collective."""
        # The oracle may have left tensors on another GPU than this rank's.
        flat = torch.cat(
            [tensor.reshape(-1).float().to(harness.device()) for tensor in self.tensors.values()]
        )
        dist.broadcast(flat, source)
        pieces = flat.split([tensor.numel() for tensor in self.tensors.values()])
        for (name, tensor), piece in zip(list(self.tensors.items()), pieces, strict=True):
            self.tensors[name] = piece.view(tensor.shape)


def training(
    recipe: str,
    weights: str,
    module: str,
    mesh: str,
    sequence_parallel: bool,
    accumulation: str,
    reshard: bool,
    checkpointing: str,
    *,
    broken: str = "",
) -> dict[str, Any]:
    """Run one case of the matrix; `broken` is a negative control, see `matrix.negative_controls`.

    Returns:
        Per kind of value the largest error as a share of its bound, and the number of comparisons.
    """
    if weights == "fp32":
        check_full_precision()
    axes, (micro_batches, reduce_always) = MESHES[mesh], ACCUMULATION[accumulation]
    hidden = width_of(recipe, weights)
    expected, originals = _reference(recipe, weights, module, micro_batches)
    meshes, model = sharded(recipe, weights, module, mesh, sequence_parallel, reshard, checkpointing, broken)
    check = Check(recipe, weights, module, expected, originals)
    check.initial(model)
    negative_controls.break_model(broken, model, meshes)
    cut = Cut(meshes, sequence_parallel)
    before = {name: _dense(parameter).clone() for name, parameter, _ in shards(model)}
    optimizer = _optimizer(model)
    for step in range(steps_of(recipe)):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            model.set_requires_gradient_sync(reduce_always or last)
            place = f"{step}.{micro}"
            x, target = (cut.take(tensor) for tensor in batch(hidden, place))
            output, loss, slope = _pass(model, x, target, micro_batches * cut.tp_parts)
            check.values(f"output {place}", output, cut.take(expected.tensors[f"output {place}"]))
            check.values(
                f"input gradient {place}",
                slope,
                cut.take(expected.tensors[f"input gradient {place}"]) * cut.dp_size,
            )
            check.loss(place, cut.mean(loss), output.numel() * cut.parts)
        for name, parameter, info in shards(model):
            assert parameter.grad is not None, f"{name} has no gradient"
            check.shard(f"gradient {step}", name, parameter.grad, info)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter, info in shards(model):
        check.shard("update", name, _main(optimizer, parameter) - before[name], info)
    return check.settle(axes.ranks)


def expect_error(recipe: str, weights: str, module: str, mesh: str, **options: Any) -> None:
    """Run a combination that must raise before its first step."""
    meshes, model = sharded(recipe, weights, module, mesh, broken="", **options)
    _pass(
        model,
        *(Cut(meshes, options["sequence_parallel"]).take(t) for t in batch(width_of(recipe, weights), "0.0")),
        1,
    )


def shard_only(recipe: str, weights: str) -> None:
    """Shard a linear pair, and do nothing else."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    te_fsdp.fully_shard(build("linear", recipe, weights, "meta"), meshes)


def sequence_parallel_without_mode(kind: str) -> None:
    """Build a module without parallel mode with sequence_parallel=True."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2, device_type=harness.device_type())
    sizes = (2, 64, 64) if kind == "GroupedLinear" else (64, 64)
    options = {"sequence_parallel": True, "bias": False, "device": "meta", **meshes.te_kwargs()}
    te_fsdp.set_device_mesh(getattr(te, kind)(*sizes, **options), tp_mesh=meshes.tp)


def sharded(
    recipe: str,
    weights: str,
    module: str,
    mesh: str,
    sequence_parallel: bool,
    reshard: bool,
    checkpointing: str,
    broken: str = "",
    accumulation: str = "1",
) -> tuple[Any, nn.Module]:
    """Return meshes and a sharded, initialised model; accumulation makes no difference to it."""
    import te_fsdp

    sizes = MESHES[mesh]._asdict()
    meshes = te_fsdp.Meshes.build(**sizes, device_type=harness.device_type())
    model = build(
        module,
        recipe,
        weights,
        "meta",
        checkpointing=checkpointing,
        **meshes.te_kwargs(),
        sequence_parallel=sequence_parallel,
    )
    with negative_controls.break_rule(broken):
        te_fsdp.fully_shard(model, meshes, reshard_after_forward=reshard, check_inputs=not broken)
    te_fsdp.materialize(model, seed=SEED)
    return meshes, model


def batch(hidden: int, place: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same global micro-batch on every rank, to be fitted: input and target."""
    generator = torch.Generator().manual_seed(sum(place.encode()))
    data = torch.randn((2, SEQUENCE, BATCH, hidden), generator=generator).bfloat16()
    return tuple(data.to(harness.device()))


def _reference(
    recipe: str, weights: str, module: str, micro_batches: int
) -> tuple[Seen, dict[str, torch.Tensor]]:
    """Return the results of one process with stock TE, and the initial parameters. Collective over the world."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from te_fsdp.upstream import te as _te

    hidden = width_of(recipe, weights)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.manual_seed(SEED)
    model = build(module, recipe, weights, harness.device(), group=alone)
    before = {name: _dense(parameter).clone() for name, parameter in model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    optimizer = _optimizer(model)
    trains = dist.get_rank() == 0
    for step in range(steps_of(recipe)):
        for micro in range(micro_batches):
            place = f"{step}.{micro}"
            x, target = batch(hidden, place)
            output = loss = slope = None
            if trains:
                output, loss, slope = _pass(model, x, target, micro_batches)
            seen[f"output {place}"] = output if trains else x
            seen[f"input gradient {place}"] = slope if trains else x
            seen[f"loss {place}"] = loss if trains else x.new_zeros(())
        for name, parameter in model.named_parameters():
            seen[f"gradient {step} {name}"] = parameter.grad if trains else before[name]
        if trains:
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                # On Hopper FusedAdam leaves a stale transpose in weights with delayed scaling (TE 2.18 to 2.20).
                _te.drop_transpose(parameter)
    for name, parameter in model.named_parameters():
        seen[f"update {name}"] = _main(optimizer, parameter) - before[name] if trains else before[name]
    result = Seen({name: tensor.detach().float().clone() for name, tensor in seen.items()})
    result.send()
    FP8GlobalStateManager.reset()  # else each of the two models would roll the other's amax histories
    return result, before


def _pass(
    model: nn.Module, x: torch.Tensor, target: torch.Tensor, divisor: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run forward and backward: output, loss per token, gradient of the input.

    A loss per token, since one per element would make gradients that underflow at delayed scaling's first scale of 1.
    """
    dtype = next(model.parameters()).dtype
    x = x.detach().to(dtype).requires_grad_()
    output = model(x)
    loss = (output.float() - target.float()).square().mean() * output.shape[-1]
    (loss / divisor).backward()
    return output.detach(), loss.detach(), x.grad


def _optimizer(model: nn.Module) -> Any:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(
        model.parameters(),
        lr=LEARNING_RATE,
        eps=EPSILON,
        master_weights=True,
        master_weight_dtype=torch.float32,
    )


def _main(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the local main weight. FusedAdam makes one of an fp32 parameter too, but updates the parameter itself."""
    main = parameter if parameter.dtype == torch.float32 else optimizer.state[parameter]["master_param"]
    return _dense(main)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part in fp32."""
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    local = _torch.local_of(tensor.detach())
    return local.dequantize(dtype=torch.float32) if _te.is_quantized(local) else local.float()


class Cut:
    """This rank's part of a global batch."""

    def __init__(self, meshes: Any, sequence_parallel: bool) -> None:
        mesh, sizes = meshes.device_mesh, meshes.size
        self.dp_size = sizes("dp_replicate") * sizes("dp_shard")
        self.dp_rank = mesh.get_local_rank("dp_replicate") * sizes("dp_shard") + mesh.get_local_rank(
            "dp_shard"
        )
        self.tp_parts, self.tp_rank = (sizes("tp") if sequence_parallel else 1), mesh.get_local_rank("tp")
        self.parts = self.dp_size * self.tp_parts

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part: data parallelism shards samples, sequence parallelism tokens."""
        tensor = tensor.chunk(self.dp_size, BATCH_DIM)[self.dp_rank]
        if self.tp_parts > 1:
            tensor = tensor.chunk(self.tp_parts, SEQUENCE_DIM)[self.tp_rank]
        return tensor.contiguous()

    def mean(self, loss: torch.Tensor) -> float:
        """Return mean over the world, whose parts are equally large. Collective."""
        total = loss.clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


class Check:
    """The comparisons of one case, with the largest error of each kind as a share of its bound."""

    def __init__(
        self,
        recipe: str,
        weights: str,
        module: str,
        expected: Seen,
        originals: dict[str, torch.Tensor],
        *,
        gemms: int = 0,
    ) -> None:
        self.expected, self.originals = expected.tensors, originals
        self.output_bound, self.gradient_bound = bounds(recipe, weights, module, gemms)
        self.quantized, self.steps = weights == "quantized", steps_of(recipe)
        self.findings = Findings()
        self.shares: dict[str, float] = {}

    def initial(self, model: nn.Module) -> None:
        """Compare initial weights bit for bit with those of one process, quantized if they are to be."""
        from te_fsdp.upstream import te as _te, torch_dtensor as _torch

        result = 0
        for name, parameter, info in shards(model):
            local, original = _dense(parameter), self.originals[name]
            for box in info.boxes:
                pair = local[box.local_slices()], original[box.original_slices()]
                self.findings.attempt(self.findings.bitwise_equal, f"initial {name}", *pair)
            result += _te.is_quantized(_torch.local_of(parameter))
        assert bool(result) == self.quantized, f"{result} weights are quantized"

    def values(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare activations and their gradients."""
        bound = self.output_bound if name.startswith("output") else self.gradient_bound
        self._close(name, actual, expected, bound, _rms(expected))

    def shard(self, what: str, name: str, actual: torch.Tensor, info: Any) -> None:
        """Compare a parameter's gradient or update, box by box; errors relative to the root mean square of the whole.

        Each update rounds the fp32 weight once, in both runs.
        """
        expected, local = self.expected[f"{what} {name}"], _dense(actual)
        scale = _rms(expected)
        largest = float(self.originals[name].abs().max()) if what == "update" else 0.0
        rounding = 2 * self.steps * largest * 2.0**-24 / scale
        for box in info.boxes:
            pair = local[box.local_slices()], expected[box.original_slices()]
            self._close(f"{what} {name}", *pair, self.gradient_bound + rounding, scale)

    def absent(self, name: str, actual: torch.Tensor | None) -> None:
        """Check a gradient that one process does not have."""
        if actual is not None:
            self.findings.failures.append(f"{name}: a gradient, where one process has None")

    def loss(self, place: str, actual: float, elements: int) -> None:
        """Compare the mean over the full micro-batch."""
        expected, first = float(self.expected[f"loss {place}"]), float(self.expected[f"loss 0.{place[-1]}"])
        bound = loss_bound(self.output_bound, self.gradient_bound, first, expected, elements)
        self._share(f"loss {place}", abs(actual - expected), bound)

    def settle(self, ranks: int) -> dict[str, Any]:
        """Raise on all ranks if any found a difference."""
        done = self.findings.settle(minimum=4)
        return {"comparisons": done["real"], "shares": self.shares, "ranks": ranks}

    def _close(
        self, name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float, scale: float
    ) -> None:
        """Compare the whole, each row and each element; a row relative to the larger of its size and `scale`, one to
        the larger of its own size and its row's.
        """
        assert scale > 0, f"{name}: nothing to compare with"
        if not actual.numel():
            return
        error, expected = (actual.double() - expected.double()).square(), expected.double().square()
        self._share(name, float(error.mean().sqrt()) / scale, bound)
        for what, error_part, size, factor in (
            ("row", error.mean(-1), expected.mean(-1), ROW),
            ("element", error, expected.maximum(expected.mean(-1, keepdim=True)), PEAK),
        ):
            relative = (error_part / size.clamp(min=scale**2)).max().sqrt()
            self._share(f"{name} ({what})", float(relative), bound * (factor if error.ndim > 1 else PEAK))

    def _share(self, name: str, difference: float, bound: float) -> None:
        kind = name.split(" ")[0] + name[name.find(" (") :] if "(" in name else name.split(" ")[0]
        self.shares[kind] = max(self.shares.get(kind, 0.0), difference / bound)
        self.findings.real += 1
        if not difference <= bound:  # NaN fails too
            self.findings.failures.append(f"{name}: difference {difference:.3g} exceeds {bound:.3g}")


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
