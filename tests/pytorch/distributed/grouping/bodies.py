"""Bodies: both forms of ``GroupedLinear`` side by side on the same meshes, from the same values, on the same tokens."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.tensor_parallel import SumOverTp
from torch import nn

SEED = 21
STEPS = 2
HIDDEN = 128
ROWS = 128  # tokens of an expert come in multiples of it: the grouped MXFP8 kernels insist


def recipe_of(name: str) -> Any:
    """Return TE's recipe object of a name, ``None`` for bf16."""
    from quantization.models import recipe_of as quantized

    return None if name == "none" else quantized(name)


class Block(nn.Module):
    """Column-parallel then row-parallel grouped linear, as an expert MLP has them."""

    def __init__(self, experts: int, device: Any, *, single: bool, bias: bool, **te_kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": torch.bfloat16, "device": device, "bias": bias}
        options |= {"single_grouped_weight": single, "single_grouped_bias": single and bias, **te_kwargs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental according to TE
            self.fc1 = te.GroupedLinear(experts, HIDDEN, 2 * HIDDEN, parallel_mode="column", **options)
            self.fc2 = te.GroupedLinear(experts, 2 * HIDDEN, HIDDEN, parallel_mode="row", **options)

    def forward(self, x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x, splits)), splits)


@contextlib.contextmanager
def single_parameters() -> Any:
    """Set the environment switch of TE's single parameter in the context."""
    os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
    try:
        yield
    finally:
        del os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"]


def build(
    experts: int, device: Any, *, recipe: str, quantized: bool, single: bool, bias: bool, **te_kwargs: Any
) -> Block:
    """Build one of the two forms with bf16 or quantized weights."""
    import transformer_engine.pytorch as te

    init = (
        te.quantized_model_init(enabled=True, recipe=recipe_of(recipe))
        if quantized
        else contextlib.nullcontext()
    )
    with single_parameters(), init:
        return Block(experts, device, single=single, bias=bias, **te_kwargs)


def meshes_of(mesh: dict[str, int]) -> Any:
    import te_fsdp

    return te_fsdp.Meshes.build(**mesh, device_type=harness.device_type())


def sharded(
    meshes: Any, experts: int, *, meta: bool = True, fsdp: dict[str, Any] | None = None, **form: Any
) -> Block:
    """Return a model on meshes; with ``ep``, this rank's part of ``experts``."""
    import te_fsdp

    bias = form.pop("bias", False) and meshes.size("tp") == 1
    if meshes.size("tp") > 1:
        form |= {"tp_size": meshes.tp.size(), "tp_group": meshes.tp.get_group()}
    local = len(meshes.experts(experts))
    device = "meta" if meta else harness.device()
    if not meta:
        torch.manual_seed(SEED)
    model = build(local, device, bias=bias, **form)
    te_fsdp.fully_shard(model, meshes, units=type(model.fc1).__mro__[0], **(fsdp or {}))
    if meta:
        te_fsdp.materialize(model, seed=SEED)
    return model


def tokens(rank: int, splits: tuple[int, ...], experts: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of a data-parallel rank for its experts, and their numbers; unlike on each rank."""
    turn = rank % len(splits)
    counts = [ROWS * n for n in (*splits[turn:], *splits[:turn])][:experts]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(sum(counts), HIDDEN, generator=generator).bfloat16()
    # With an input gradient both paths quantize output gradients both ways, with the same random numbers.
    return x.to(harness.device()).requires_grad_(), torch.tensor(counts, device=harness.device())


def loss_of(model: Block, meshes: Any, recipe: str, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    import transformer_engine.pytorch as te

    context = (
        te.autocast(enabled=True, recipe=recipe_of(recipe)) if recipe != "none" else contextlib.nullcontext()
    )
    with context:
        y = model(*batch)
    if meshes is not None and meshes.size("tp") > 1:
        y = SumOverTp.apply(y, meshes.tp.get_group())
    return y.float().square().mean()


def by_expert(model: Block, what: str = "value") -> dict[str, torch.Tensor]:
    """Return unsharded values or gradients of this rank's experts for both forms: ``fc1.weight`` (experts, out, in)."""
    from te_fsdp.records import binding_of

    binding = binding_of(model.fc1)
    experts = binding.experts if binding is not None else None
    results: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter if what == "value" else parameter.grad
        assert tensor is not None, f"{name} has no gradient"
        full = harness.full(tensor)
        stem = name.rstrip("0123456789")
        if stem == name and experts is not None:  # the one parameter has the experts of all ranks
            assert len(full) == experts.total, name
            full = full[experts.first : experts.first + experts.count]
        results.setdefault(stem, []).append(full)
        assert (full.dim() == (3 if "weight" in name else 2)) == (stem == name), name
    return {
        stem: parts[0] if parts[0].dim() > 1 + ("weight" in stem) else torch.stack(parts)
        for stem, parts in results.items()
    }


def both_forms(
    mesh: dict[str, int],
    experts: int,
    splits: tuple[int, ...],
    *,
    recipe: str = "none",
    quantized: bool = False,
    bias: bool = True,
    optimizer: str = "adamw",
    meta: bool = True,
    fsdp: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train three steps of both forms: every loss, gradient and value is bitwise equal."""
    import te_fsdp

    meshes = meshes_of(mesh)
    checks = harness.Comparisons()
    # With quantized weights, one for each expert, TE's grouped path wants both directions at once, which FSDP2 does not
    # gather. The other path adds biases before it rounds.
    bias = bias and not quantized
    options = {"recipe": recipe, "quantized": quantized, "bias": bias, "fsdp": fsdp, "meta": meta}
    models = [
        sharded(meshes, experts, single=single, use_grouped_tensor=single or not quantized, **options)
        for single in (True, False)
    ]
    optimizers = []
    for model in models:
        if optimizer == "fused":
            import transformer_engine.pytorch as te

            optimizers.append(te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True))
        else:
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2))
        if quantized:
            te_fsdp.main_weights(model, optimizers[-1])
    placements = {n: [str(p) for p in parameter.placements] for n, parameter in models[0].named_parameters()}
    _compare(checks, "initial", *(by_expert(model) for model in models))
    rank = 0 if meshes.fsdp is None else meshes.fsdp.get_local_rank("dp_shard")
    for step in range(STEPS):
        batch = tokens(rank, splits, len(meshes.experts(experts)), step)
        losses = []
        for model in models:
            torch.manual_seed(step)  # stochastic rounding of NVFP4's gradients
            losses.append(loss_of(model, meshes, recipe, batch))
            losses[-1].backward()
        checks.bitwise_equal(f"loss {step}", losses[0].detach(), losses[1].detach())
        _compare(checks, f"gradient {step}", *(by_expert(model, "gradient") for model in models))
        norms = [te_fsdp.clip_grad_norm_(model.parameters(), 1e9) for model in models]  # scales nothing
        # fp32 sums of at most 2^17 squares, in at least 64 lanes: 2^11 roundings of 2^-24 each, halved by the root.
        checks.close(f"norm {step}", *norms, rtol=2**-14, why="fp32 sums in a different order")
        for item in optimizers:
            item.step()
            item.zero_grad()
        _compare(checks, f"value {step}", *(by_expert(model) for model in models))
    return {"checked": checks.require(3 * STEPS), "placements": placements}


def _compare(checks: Any, when: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    for name, value in one.items():
        checks.bitwise_equal(f"{name}, {when}", value, other[name])


def one_process(
    mesh: dict[str, int], experts: int, splits: tuple[int, ...], *, recipe: str = "none"
) -> dict[str, Any]:
    """Compare the single form on meshes with stock TE, one parameter per expert, in one process on all tokens.

    Returns:
        Comparisons; gradients of bf16 sums over two ranks round once more than the sum of one process does.
    """
    meshes = meshes_of(mesh)
    checks = harness.Comparisons()
    model = sharded(
        meshes, experts, single=True, use_grouped_tensor=True, recipe=recipe, quantized=False, bias=True
    )
    torch.manual_seed(SEED)
    options = {"recipe": recipe, "quantized": False, "single": False, "bias": meshes.size("tp") == 1}
    reference = build(experts, harness.device(), use_grouped_tensor=True, **options)
    _compare(checks, "initial", by_expert(model), by_expert(reference))
    ranks = meshes.size("dp_shard")
    own = 0 if meshes.fsdp is None else meshes.fsdp.get_local_rank("dp_shard")
    batches = [tokens(rank, splits, experts, 0) for rank in range(ranks)]
    loss_of(model, meshes, recipe, batches[own]).backward()
    for batch in batches:
        (loss_of(reference, None, recipe, batch) / ranks).backward()
    expected = by_expert(reference, "gradient")
    for name, value in by_expert(model, "gradient").items():
        # bf16: each rank's part is rounded, and so is their mean: 2^-8 of the largest value, for both runs.
        checks.close(
            f"gradient of {name}", value, expected[name], rtol=2 * 2**-8, why="bf16 sums rounded twice"
        )
        unused = [i for i in range(experts) if all(int(counts[i]) == 0 for _, counts in batches)]
        assert all(not value[i].any() for i in unused), "no tokens, no gradient"
    return {"checked": checks.require(4), "unused": len(unused)}


def bytes_per_rank(mesh: dict[str, int], experts: int, *, single: bool) -> list[float]:
    """Return bytes of this rank's expert weights and AdamW states over logical bytes / (ep x dp_shard x tp)."""
    meshes = meshes_of(mesh)
    model = sharded(
        meshes, experts, single=single, use_grouped_tensor=True, recipe="none", quantized=False, bias=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    splits = (1,) * experts
    rank = 0 if meshes.expert_fsdp is None else meshes.expert_fsdp.get_local_rank()
    loss_of(model, meshes, "none", tokens(rank, splits, len(meshes.experts(experts)), 0)).backward()
    optimizer.step()
    from te_fsdp.upstream import torch_dtensor as _torch

    logical = experts * 2 * (2 * HIDDEN * HIDDEN)  # values of fc1 and fc2
    cuts = dist.get_world_size() // mesh.get("dp_replicate", 1)
    held = [0, 0]
    for parameter in model.parameters():
        held[0] += _torch.local_of(parameter).numel()
        moments = [v for v in optimizer.state[parameter].values() if v.dim() == parameter.dim()]
        assert len(moments) == 2
        held[1] += sum(_torch.local_of(moment).numel() for moment in moments)
    return [held[0] * cuts / logical, held[1] * cuts / (2 * logical)]


def placed(*, flat: bool) -> int:
    """Bind device tensors, and check that the DTensors describe where the values are.

    Args:
        flat: Reuse the placements of a 2-D weight on the stack of all experts, as if the leading dim were not there.
    """
    import te_fsdp
    from te_fsdp import layout as table
    from te_fsdp.layout import GROUPED, ParameterRule
    from te_fsdp.modules import plan

    meshes = meshes_of({"dp_shard": 1, "tp": 2})
    stock = table.single_grouped_rules
    form = {"single": True, "use_grouped_tensor": True, "recipe": "none", "quantized": False, "bias": False}
    model = build(2, harness.device(), **form, tp_size=2, tp_group=meshes.tp.get_group())
    local = {}
    for name, parameter in model.named_parameters():
        parameter.rowwise_data.data.add_(dist.get_rank())
        local[name] = parameter.rowwise_data.detach().clone().view(parameter.shape)
    if flat:
        plan.table.single_grouped_rules = lambda names, mode: {
            name: ParameterRule({"column": 0, "row": 1}[mode], GROUPED, quantizable=True) for name in names
        }
    try:
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp)
    finally:
        table.single_grouped_rules = stock
    parameters = dict(model.named_parameters())
    for name, cut in (("fc1.weight", 1), ("fc2.weight", 2)):
        parts = [torch.empty_like(local[name]) for _ in range(2)]
        dist.all_gather(parts, local[name], group=meshes.tp.get_group())
        harness.assert_bitwise_equal(name, harness.full(parameters[name]), torch.cat(parts, dim=cut))
    return len(parameters)


def torchs_fully_shard(experts: int, *, quantized: bool) -> dict[str, Any]:
    """Call FSDP2 on meta and ``reset_parameters``, as a user does, with uneven experts."""
    from torch.distributed.fsdp import fully_shard

    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    meshes = meshes_of({"dp_shard": 2})
    checks = harness.Comparisons()
    recipe = "mxfp8" if quantized else "none"
    form = {
        "single": True,
        "use_grouped_tensor": True,
        "recipe": recipe,
        "quantized": quantized,
        "bias": False,
    }
    ours = sharded(meshes, experts, **form)
    theirs = build(experts, "meta", **form)
    te_fsdp.set_device_mesh(theirs, weight_mesh=meshes.weight)
    for module in (theirs.fc1, theirs.fc2, theirs):
        fully_shard(module, mesh=meshes.fsdp)
    torch.manual_seed(SEED)
    for module in (theirs.fc1, theirs.fc2):
        module.reset_parameters()
    batch = tokens(dist.get_rank(), (1, 0, 2)[:experts], experts, 0)
    for model in (ours, theirs):
        loss_of(model, meshes, recipe, batch).backward()
    _compare(checks, "initial", by_expert(theirs), by_expert(ours))
    _compare(checks, "gradient", by_expert(theirs, "gradient"), by_expert(ours, "gradient"))
    return {**checks.require(4), "held": len(_torch.local_of(theirs.fc1.weight))}
