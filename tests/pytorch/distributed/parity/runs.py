"""Train a sharded model next to the stock single-process one; every rank compares its own shards.

Every rank holds the whole reference model and the full batch. It compares the rectangles of each original tensor that
its local shard consists of (`shard_info`), so that nothing is gathered for a comparison and every rank must be right.

Tolerance, fp32. Each value of either model is a chain of about ten sums of at most n = 256 products; the two models add
in different orders (tp and dp split the sums). Each sum differs by about sqrt(n) * 2^-24 = 1e-6 of the size of its
terms, and ten independent ones by about 3e-6: RTOL = 1e-5. It holds for the norm of each shard, and for each of its
elements relative to the larger of the shard's maximum and the unsharded parameter's root mean square.

Adam divides gradients by their own size, so that where |g| is near rounding noise it would make noise a full step:
an error d of a gradient moves the update by at most lr * d / eps. EPSILON is chosen near the size of the gradients here
(0.01 to 1), which bounds the amplification by LEARNING_RATE / EPSILON = 1 and changes nothing in what is tested.

On GPUs TE computes fp32 GEMMs in TF32 (CUBLAS_COMPUTE_32F_FAST_TF32, common/gemm/cublaslt_gemm.cu), with
10 bits of mantissa. conftest.py switches TF32 off in cuBLAS; `check_full_precision` measures that it did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parity.models import BATCH_DIM, KINDS, Build, Subject

STEPS = 2  # the second with weights and moments that the first has changed; more would repeat it
RTOL = 1e-5
WHY = "fp32: ten chained sums of up to 256 products, added in a different order"
LEARNING_RATE = EPSILON = 1e-2


def parity(
    kind: str,
    options: dict[str, Any],
    axes: dict[str, int],
    *,
    sequence_parallel: bool = False,
    wrap: str = "te_fsdp",
    units: str | None = None,
    origin: str = "meta",
    drop: str = "",
) -> dict[str, Any]:
    """Train two AdamW steps; gradients of every step and the final parameters equal the reference's by value.

    Args:
        kind: which of `KINDS`.
        options: its options.
        axes: mesh sizes, as `te_fsdp.Meshes.build` takes them.
        sequence_parallel: for the sharded model.
        wrap: "te_fsdp" for its fully_shard; "torch" for set_device_mesh and then torch's fully_shard on each child and
            the root; "tp" for set_device_mesh alone.
        units: name of a TE class whose instances become FSDP2 units; by default te_fsdp's choice.
        origin: "meta" (then `materialize`) or "device".
        drop: negative controls, see `_spoiled`.
    """
    import te_fsdp

    check_full_precision()
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    torch.manual_seed(5)
    reference = KINDS[kind](Build(harness.device()), **options)
    build = Build(
        harness.device() if origin == "device" else "meta",
        **meshes.te_kwargs(),
        sequence_parallel=sequence_parallel,
    )
    torch.manual_seed(5)
    subject = KINDS[kind](build, **options)
    with _spoiled(drop):
        _wrap(subject.module, meshes, wrap, units, check_inputs=not drop)  # which would refuse to step
    checks = Findings()
    if origin == "meta":
        torch.manual_seed(5)
        te_fsdp.materialize(subject.module)
        compare_shards(
            checks,
            "initial",
            subject.module,
            reference.module,
            _value,
            bits=True,
            skip=tied(reference.module),
        )
    scramble(reference.module)
    copy_shards(reference.module, subject.module)
    train(checks, subject, reference, Cut.of(meshes))
    return checks.settle(minimum=4)


def _wrap(module: nn.Module, meshes: Any, wrap: str, units: str | None, *, check_inputs: bool) -> None:
    """Shard the subject in one of the three ways that `parity` names."""
    import transformer_engine.pytorch as te

    import te_fsdp

    if wrap == "te_fsdp":
        more = {} if units is None else {"units": getattr(te, units)}
        te_fsdp.fully_shard(module, meshes, check_inputs=check_inputs, **more)
        return
    te_fsdp.set_device_mesh(module, tp_mesh=meshes.tp, weight_mesh=meshes.weight, check_inputs=check_inputs)
    if wrap == "torch":
        for unit in (*module.children(), module):
            if not isinstance(unit, nn.ModuleList):
                fully_shard(unit, mesh=meshes.fsdp_with_size_one)


class Findings(harness.Comparisons):
    """Comparisons that raise at the end, on all ranks together, so that no rank waits for one that has left."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def attempt(self, compare: Callable[..., None], name: str, *args: Any, **kwargs: Any) -> None:
        """Make one comparison and keep its failure for later."""
        try:
            compare(name, *args, **kwargs)
        except AssertionError as error:
            self.failures.append(str(error))

    def settle(self, minimum: int) -> dict[str, object]:
        """Raise on all ranks if any rank found a difference. Collective over the world."""
        result = torch.tensor([len(self.failures)], device=harness.device())
        dist.all_reduce(result)
        if int(result):
            shown = "\n".join(self.failures[:6])
            raise AssertionError(
                f"{int(result)} differences over all ranks, {len(self.failures)} here:\n{shown}"
            )
        return self.require(minimum)


@dataclasses.dataclass(frozen=True)
class Cut:
    """This rank's part of the global batch."""

    dp_size: int
    dp_rank: int
    tp_size: int
    tp_rank: int
    tp_group: Any

    @staticmethod
    def of(meshes: Any) -> Cut:
        """Return the sizes of the job's meshes: data parallelism is dp_replicate x dp_shard."""
        mesh, shards = meshes.device_mesh, meshes.size("dp_shard")
        rank = mesh.get_local_rank("dp_replicate") * shards + mesh.get_local_rank("dp_shard")
        tp = mesh.get_local_rank("tp"), mesh.get_group("tp")
        return Cut(meshes.size("dp_replicate") * shards, rank, meshes.size("tp"), *tp)

    def take(self, tensor: torch.Tensor, tp_dim: int | None) -> torch.Tensor:
        """Return this rank's part of a global input or output."""
        tensor = tensor.chunk(self.dp_size, BATCH_DIM)[self.dp_rank]
        if tp_dim is not None:
            tensor = tensor.chunk(self.tp_size, tp_dim)[self.tp_rank]
        return tensor.contiguous()


def train(checks: Findings, subject: Subject, reference: Subject, cut: Cut) -> None:
    """Step both models; compare losses, gradients and, at the end, parameters."""
    options = {"lr": LEARNING_RATE, "eps": EPSILON}
    optimizers = [torch.optim.AdamW(s.module.parameters(), **options) for s in (subject, reference)]
    generator = torch.Generator().manual_seed(3)
    quiet_scales: dict[str, float] = {}
    for step in range(STEPS):
        inputs = {name: _draw(item, generator) for name, item in subject.inputs.items()}
        output = reference.call(reference.module, **inputs)
        target = torch.randn(output.shape, generator=generator).to(output.device)
        loss = _loss(output, target, output)
        loss.backward()
        mine = {name: cut.take(tensor, subject.inputs[name].tp_dim) for name, tensor in inputs.items()}
        local_output = subject.call(subject.module, **mine)
        local_target = cut.take(target, subject.output_tp_dim)
        whole = cut.take(target, None)
        local_loss = _loss(local_output, local_target, whole)
        local_loss.backward()
        checks.attempt(
            checks.close, f"loss {step}", _global_loss(local_loss, subject, cut), loss.detach(), RTOL, WHY
        )
        quiet = quiet_parameters(reference)
        for name, sibling in quiet.items():
            scale = _rms(reference.module.get_parameter(sibling).grad)
            quiet_scales[name] = max(scale, quiet_scales.get(name, 0.0))
        compare_shards(
            checks, f"gradient {step}", subject.module, reference.module, _gradient, floors=quiet_scales
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # The gradient's error, RTOL of its scale, times the amplification of the module's docstring, once per step.
    floors = {name: STEPS * scale * LEARNING_RATE / EPSILON for name, scale in quiet_scales.items()}
    compare_shards(checks, "parameter", subject.module, reference.module, _value, floors=floors)


def _draw(item: Any, generator: torch.Generator) -> torch.Tensor:
    if item.classes:
        return torch.randint(item.classes, item.shape, generator=generator).to(harness.device())
    return torch.randn(item.shape, generator=generator).to(harness.device())


def _loss(output: torch.Tensor, target: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the squared error per token; for a rank with a part of the output, its part of the whole's sum.

    FSDP2 averages gradients over data-parallel ranks, which hold equally many tokens: the mean of their losses is the
    global loss. Tensor-parallel parts add up: no rank counts another's part, and a replicated output counts once, since
    TE's backward takes the output's gradient to be the whole one on each tp rank.
    """
    return (output - target).square().sum() / (whole.numel() / whole.shape[-1])


def _global_loss(local: torch.Tensor, subject: Subject, cut: Cut) -> torch.Tensor:
    value = local.detach().clone()
    dist.all_reduce(value)
    copies = 1 if subject.output_tp_dim is not None else cut.tp_size
    return value / (cut.dp_size * copies)


def compare_shards(
    checks: Findings,
    what: str,
    model: nn.Module,
    reference: nn.Module,
    get: Callable[[torch.Tensor], torch.Tensor],
    *,
    floors: dict[str, float] | None = None,
    bits: bool = False,
    skip: Collection[str] = (),
) -> None:
    """Compare every own shard of `model` with its boxes of the reference. Local operation."""
    originals = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for name, parameter, info in shards(model):
        seen.add(name)
        if name in skip:
            continue
        full, local = get(originals[name]), _local(get(parameter))
        floor = max(_rms(full), (floors or {}).get(name, 0.0))
        label = f"{what} {name}"
        for box in info.boxes:
            pair = local[box.local_slices()], full[box.original_slices()]
            if bits:
                checks.attempt(checks.bitwise_equal, label, *pair)
            else:
                checks.attempt(checks.close, label, *pair, RTOL, WHY, floor=floor)
    assert seen == set(originals), f"names differ: {seen ^ set(originals)}"


def shards(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Name, parameter and `ShardInfo` of every parameter, tied ones at each of their places."""
    from te_fsdp.shard_info import shard_info

    for prefix, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{own}" if prefix else own
                yield name, parameter, shard_info(module, own, parameter, label=name)


def tied(model: nn.Module) -> set[str]:
    """Return names of parameters with several owners: their initialization depends on how they were tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}


def scramble(reference: nn.Module) -> None:
    """Move every parameter off its initial value: biases of 0 and norm weights of 1 would hide exchanged rows."""
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.device)


def copy_shards(reference: nn.Module, model: nn.Module) -> None:
    """Give the sharded model the reference's values, box by box. Local operation."""
    originals = dict(reference.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter, info in shards(model):
            for box in info.boxes:
                _local(parameter)[box.local_slices()] = originals[name][box.original_slices()]


def quiet_parameters(subject: Subject) -> dict[str, str]:
    """Return full names of the parameters without gradient, with their siblings'."""
    results = {}
    for name, _ in subject.module.named_parameters():
        for suffix, sibling in subject.no_gradient.items():
            if name.endswith(suffix):
                results[name] = _sibling(name, suffix, sibling, subject.module)
    return results


def _sibling(name: str, suffix: str, sibling: str, module: nn.Module) -> str:
    """Return the query projection of a cross attention, a module next to the key-value projection."""
    stem = name.removesuffix(suffix)
    names = dict(module.named_parameters())
    other = stem.removesuffix("key_value.")
    candidates = [stem + sibling]
    candidates += [
        f"{other}{query}{s}" for query in ("query_layer.", "layernorm_query.") for s in (sibling, "bias")
    ]
    return next(candidate for candidate in candidates if candidate in names)


@contextmanager
def _spoiled(drop: str) -> Iterator[None]:
    """Leave out one rule while the model is bound: "partial_grad", or "layout" (stacked declared plain)."""
    if not drop:
        yield
        return
    from te_fsdp.layout import ParameterRule
    from te_fsdp.modules import plan

    change = {drop: getattr(ParameterRule(None), drop)}
    stock = plan.plan_tree

    def spoiled(*args: Any, **kwargs: Any) -> list[Any]:
        planned = stock(*args, **kwargs)
        for item in planned:
            item.rules.update({n: dataclasses.replace(rule, **change) for n, rule in item.rules.items()})
        return planned

    plan.plan_tree = spoiled
    try:
        yield
    finally:
        plan.plan_tree = stock


def check_full_precision() -> None:
    """Fail on a GPU whose fp32 GEMMs in TE are rounded to TF32: no tolerance of this file would then make sense."""
    if harness.device_type() == "cpu":
        return
    import transformer_engine.pytorch as te

    generator = torch.Generator().manual_seed(0)
    module = te.Linear(256, 64, bias=False, params_dtype=torch.float32, device=harness.device())
    x = torch.randn(32, 256, generator=generator).to(harness.device())
    with torch.no_grad():
        exact = x.double() @ module.weight.double().t()
        harness.assert_close(
            "fp32 GEMM of TE", module(x), exact, 2e-6, "fp32: 256 products; TF32 would give 3e-4"
        )


def _value(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, f"no gradient on a parameter of shape {tuple(parameter.shape)}"
    if isinstance(parameter, DTensor):
        assert parameter.grad.placements == parameter.placements, (
            parameter.grad.placements,
            parameter.placements,
        )
    return parameter.grad.detach()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())
