"""Bodies: sharded quantized training against stock TE in one process."""

from __future__ import annotations

import math
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from quantization.models import BATCH, SEQUENCE, build, recipe_of

STEPS = 5
SEED = 11
LEARNING_RATE = 2e-3
#: Relative rounding error (rms) of a GEMM with both operands quantized: a uniform error of one unit in the
#: last place (2^-3 of e4m3, 2^-2 of e5m2, 3/4 of it averaged over the mantissa), times sqrt(2) for two
#: operands. One process under the emulation measured 0.037 for e4m3.
E4M3_ERROR = 2**-3 / math.sqrt(12) * 0.75 * math.sqrt(2)
E5M2_ERROR = 2**-2 / math.sqrt(12) * 0.75 * math.sqrt(2)
#: Quantized GEMMs between input and output of the deepest model, a TransformerLayer: qkv, proj, fc1, fc2.
GEMMS = 4


def tolerances(losses: list[float], hidden: int) -> list[float]:
    """Return bounds on the relative difference of two runs of the same quantized training that round differently.

    Forward: losses are means of N squared differences of order one between outputs that carry independent
    relative errors e = sqrt(GEMMS) * E4M3_ERROR each; two such means differ by 2 e sqrt(2 / N), one standard
    deviation; six are allowed. Updates: a gradient with an independent relative error g = sqrt(GEMMS) *
    hypot(E4M3_ERROR, E5M2_ERROR) makes an angle with the true one whose cosine is 1 / sqrt(1 + g^2); that
    share of the progress so far may be missing.
    """
    forward = 6 * 2 * math.sqrt(GEMMS) * E4M3_ERROR * math.sqrt(2 / (SEQUENCE * BATCH * hidden))
    error = math.sqrt(GEMMS) * math.hypot(E4M3_ERROR, E5M2_ERROR)
    missing = 1 - 1 / math.sqrt(1 + error**2)
    return [forward + missing * abs(losses[0] - loss) / loss for loss in losses]


def training(
    kind: str,
    recipe: str,
    quantized: bool,
    dp_replicate: int,
    tp: int,
    *,
    hidden: int = 256,
    sequence_parallel: bool = False,
    reshard_after_forward: bool = True,
    drop_shared_scale: bool = False,
    learning_rate: float = LEARNING_RATE,
) -> dict[str, Any]:
    """Train stock TE in one process, and a sharded model, for :data:`STEPS` FusedAdam steps.

    Returns:
        Losses of both, and what the weights looked like after each step.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, tp=tp, device_type=harness.device_type())
    kwargs = {**meshes.te_kwargs(), "sequence_parallel": sequence_parallel}
    model = _initialised(kind, recipe, quantized, hidden, "meta", **kwargs)
    te_fsdp.fully_shard(model, meshes, reshard_after_forward=reshard_after_forward)
    te_fsdp.materialize(model, seed=SEED)
    if drop_shared_scale:
        _forget_weight_mesh(model)
    torch.manual_seed(SEED)
    reference = _initialised(kind, recipe, quantized, hidden, harness.device())
    outcome: dict[str, Any] = {"losses": [], "quantized": [], "scales_equal": []}
    outcome["bytes_at_init"] = compare_with_reference(model, reference)
    step = Stepper(model, recipe, meshes, sequence_parallel, learning_rate=learning_rate)
    batch = batch_of(hidden)
    outcome["reference"] = losses_of_one_process(reference, recipe, batch)
    for _ in range(STEPS):
        outcome["losses"].append(step(*batch))
        outcome["quantized"].append(len(quantized_weights(model)))
        outcome["scales_equal"].append(scales_agree(model))
    outcome["tolerances"] = tolerances(outcome["reference"], hidden)
    outcome["expected_quantized"] = len(quantized_weights(reference))
    return outcome


def quantized_weights(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return owner, name and parameter of every quantized weight."""
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and _te.is_quantized(_torch.local_of(parameter))
    ]


def scales_agree(model: nn.Module) -> bool | None:
    """Return whether all ranks hold the same per-tensor scales; None for formats without one."""
    from te_fsdp.upstream import torch_dtensor as _torch

    weights = [_torch.local_of(p) for _, _, p in quantized_weights(model)]
    scales = [w._scale_inv.flatten()[0] for w in weights if type(w).__name__ == "Float8Tensor"]
    if not scales:
        return None
    mine = torch.stack(scales)
    extremes = torch.stack([mine, -mine])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return bool(torch.equal(extremes[0], -extremes[1]))


def compare_with_reference(model: nn.Module, reference: nn.Module) -> int:
    """Compare freshly initialised quantized shards with stock TE's quantized weights, bit for bit.

    Returns:
        Number of weights compared; the ranks of an unquantized model compare none.
    """
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    whole = dict(reference.named_parameters())
    checks = harness.Comparisons()
    count = 0
    names = {id(p): n for n, p in model.named_parameters()}
    for module, name, parameter in quantized_weights(model):
        info = shard_info(module, name, parameter)
        values = whole[names[id(parameter)]].dequantize(dtype=torch.float32)
        local = _torch.local_of(parameter).dequantize(dtype=torch.float32)
        for box in info.boxes:
            checks.bitwise_equal(name, local[box.local_slices()], values[box.original_slices()])
        count += 1
    if count:
        checks.require(count)
    return count


class Stepper:
    """One training step with FusedAdam and fp32 main weights: batch in, mean loss over the world out.

    ``recipe`` is a recipe or the name of one; over ``group`` TE reduces delayed scaling's amaxes, by default the world.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Any,
        meshes: Any,
        sequence_parallel: bool,
        *,
        learning_rate: float = LEARNING_RATE,
        group: Any = None,
    ) -> None:
        from transformer_engine.pytorch.optimizers import FusedAdam

        self.model, self.recipe, self.meshes, self.group = model, recipe, meshes, group
        self.sequence_parallel = sequence_parallel
        self.optimizer = FusedAdam(
            model.parameters(), lr=learning_rate, master_weights=True, master_weight_dtype=torch.float32
        )

    def evaluate(self, x: torch.Tensor) -> None:
        """Run a forward without gradients."""
        import transformer_engine.pytorch as te

        with torch.no_grad(), te.autocast(enabled=True, recipe=recipe_of(self.recipe)):
            self.model(self._mine(x))

    def __call__(self, x: torch.Tensor, target: torch.Tensor) -> float:
        import transformer_engine.pytorch as te

        if self.meshes is not None:
            x, target = self._mine(x), self._mine(target)
        recipe = recipe_of(self.recipe) if isinstance(self.recipe, str) else self.recipe
        with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=self.group):
            output = self.model(x)
        output = output[0] if isinstance(output, tuple) else output
        loss = (output.float() - target.float()).square().mean()
        tp = self.meshes.size("tp") if self.meshes is not None and self.sequence_parallel else 1
        # Each tp rank's mean covers its part of the sequence: their sum over tp must be the mean of the
        # whole.
        (loss / tp).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        if self.meshes is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return float(total)

    def _mine(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a global batch: samples over data parallel, tokens with sequence parallel."""
        mesh, sizes = self.meshes.device_mesh, self.meshes.size
        rank = mesh.get_local_rank("dp_replicate") * sizes("dp_shard") + mesh.get_local_rank("dp_shard")
        x = x.chunk(sizes("dp_replicate") * sizes("dp_shard"), dim=1)[rank]
        if self.sequence_parallel:
            x = x.chunk(sizes("tp"), dim=0)[mesh.get_local_rank("tp")]
        return x.contiguous()


def losses_of_one_process(
    reference: nn.Module, recipe: Any, batch: tuple[torch.Tensor, torch.Tensor], steps: int = STEPS
) -> list[float]:
    """Return losses of stock TE on the full batch, computed by rank 0. Collective over the world."""
    alone, told = dist.new_group([0]), [[]]
    if dist.get_rank() == 0:
        step = Stepper(reference, recipe, None, False, group=alone)
        told = [[step(*batch) for _ in range(steps)]]
    dist.broadcast_object_list(told)
    return told[0]


def batch_of(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same global batch on every rank, to be fitted: input and target."""
    generator = torch.Generator().manual_seed(5)
    data = torch.randn((2, SEQUENCE, BATCH, hidden), generator=generator).bfloat16().to(harness.device())
    return data[0], data[1]


def _initialised(
    kind: str, recipe: str, quantized: bool, hidden: int, device: Any, **kwargs: Any
) -> nn.Module:
    import transformer_engine.pytorch as te

    with te.quantized_model_init(enabled=quantized, recipe=recipe_of(recipe)):
        return build(kind, hidden, device, **kwargs)


def _forget_weight_mesh(model: nn.Module) -> None:
    """Negative control: every shard would be quantized with its own scale from now on."""
    from te_fsdp.records import binding_of

    for module in model.modules():
        binding = binding_of(module)
        if binding is not None:
            binding.weight_mesh, binding.amax.agreed = None, False


def meshes_sliced_in_a_step(mended: bool) -> int:
    """Return how often a later step slices a mesh, for HSDP with quantized weights.

    Args:
        mended: With te_fsdp; else FSDP2 alone, which does it for each weight and gather up to torch 2.12.
    """
    import transformer_engine.pytorch as te
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    kind, recipe = harness.device_type(), recipe_of("current")
    with te.quantized_model_init(recipe=recipe):
        model = te.Linear(64, 64, device=harness.device() if not mended else "meta")
    if mended:
        meshes = te_fsdp.Meshes.build(dp_replicate=2, device_type=kind)
        te_fsdp.materialize(te_fsdp.fully_shard(model, meshes), seed=0)
    else:
        fully_shard(model, mesh=init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard")))
    sliced, stock = [], DeviceMesh.__getitem__

    def counted(mesh: DeviceMesh, names: Any) -> DeviceMesh:
        sliced.append(names)
        return stock(mesh, names)

    x = torch.ones(32, 64, device=harness.device(), dtype=torch.float32)
    for step in range(2):
        if step:
            DeviceMesh.__getitem__ = counted
        try:
            with te.autocast(enabled=True, recipe=recipe):
                model(x).sum().backward()
        finally:
            DeviceMesh.__getitem__ = stock
    return len(sliced)
