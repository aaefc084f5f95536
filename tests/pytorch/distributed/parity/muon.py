"""Bodies: `te_fsdp.Muon` against torch's optimizers in one process, bit for bit.

The operations are the same on both sides, in the same order and on tensors of the same shapes: only where they run
differs. Gradients are given, not computed, so that they are equal too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import harness
import torch
from torch import nn

from parity.clipping import fill
from parity.runs import Findings, _local, _value, compare_shards, copy_shards, scramble, shards

HIDDEN, FFN, HEADS, GROUPS, CHANNELS, EXPERTS = 32, 48, 8, 4, 8, 3
STEPS = 3
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
#: torch's optimizers, but for two: LBFGS needs a closure, SparseAdam sparse gradients.
_KINDS = {
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
ALL = [
    *sorted(_KINDS - {"Optimizer", "LBFGS", "SparseAdam", "Muon"}),
    "Muon",
]  # the one that rounds comes last
# Two steps of 0.01 whose directions differ by the rounding of bf16 (2^-8) through five iterations that multiply it by
# up to 3.4 each where singular values are small: some percent of a step of size 0.3, next to weights of about 0.1.
MUON_ROUNDING = 2e-2
WHY_MUON = "Newton-Schulz in bf16, products added in a different order"


class Model(nn.Module):
    """Fused QKV and gated fc1 in a layer, an embedding and a head that no mesh cuts evenly, experts."""

    def __init__(self, meshes: Any, device: Any, *, interleaved: bool, experts: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        tp = {} if meshes is None else meshes.te_kwargs()
        dtype = {"params_dtype": torch.float32, "device": device}
        self.embedding = nn.Embedding(11, HIDDEN, device=device)
        self.layer = te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            num_gqa_groups=GROUPS,
            kv_channels=CHANNELS,  # more rows of queries than columns: a different learning rate than for keys
            activation="swiglu",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            set_parallel_mode=True,
            fuse_qkv_params=True,
            qkv_weight_interleaved=interleaved,
            **dtype,
            **tp,
        )
        self.head = nn.Linear(HIDDEN, 3, device=device)  # 3 rows over 4 ranks: one has none
        if experts:
            own = EXPERTS if meshes is None else len(meshes.experts(EXPERTS))
            self.experts = te.GroupedLinear(own, HIDDEN, FFN, bias=False, **dtype)


def _rows(name: str, interleaved: bool) -> list[list[int]]:
    """Return rows of each matrix in a fused weight, written down by hand; of any other weight none."""
    if name.endswith("fc1_weight"):
        return [list(range(FFN)), list(range(FFN, 2 * FFN))]
    if not name.endswith("layernorm_qkv.weight"):
        return []
    queries, one = HEADS * CHANNELS, GROUPS * CHANNELS
    if not interleaved:
        return [
            list(range(queries)),
            list(range(queries, queries + one)),
            list(range(queries + one, queries + 2 * one)),
        ]
    results: list[list[int]] = [[], [], []]
    each = HEADS // GROUPS * CHANNELS
    for group in range(GROUPS):
        begin = group * (each + 2 * CHANNELS)
        for part, (low, high) in enumerate(
            ((0, each), (each, each + CHANNELS), (each + CHANNELS, each + 2 * CHANNELS))
        ):
            results[part] += range(begin + low, begin + high)
    return results


class OneProcess:
    """torch's own optimizers; each matrix of a fused weight is its own parameter."""

    def __init__(self, model: nn.Module, matrices: list[str], rows: dict[str, list[list[int]]]) -> None:
        self.model, self.parts = model, []
        muon = []
        for name in matrices:
            parameter = model.get_parameter(name)
            if not rows.get(name):
                muon.append(parameter)
            for picked in rows.get(name, []):
                part = nn.Parameter(parameter.detach()[picked].clone())
                self.parts.append((parameter, picked, part))
                muon.append(part)
        others = [p for n, p in model.named_parameters() if n not in matrices]
        self.optimizers = [torch.optim.Muon(muon, **MUON), torch.optim.AdamW(others, **ADAMW)]

    def step(self) -> None:
        """Run one step with gradients of the model."""
        for parameter, picked, part in self.parts:
            part.grad = parameter.grad[picked].clone()
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for parameter, picked, part in self.parts:
                parameter[picked] = part


def _matrices(model: nn.Module) -> list[str]:
    """Return all parameters that Muon takes by default, with an embedding and a head."""
    names = ("qkv.weight", "proj.weight", "fc1_weight", "fc2_weight", "embedding.weight", "head.weight")
    results = [n for n, _ in model.named_parameters() if n.endswith(names) or n.startswith("experts.")]
    assert len(results) >= len(names)
    return results


def _models(axes: dict[str, int], how: dict[str, Any], **kind: bool) -> tuple[Any, Any]:
    """Return the model of one process and the sharded one, of equal values."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    torch.manual_seed(3)
    reference, subject = Model(None, harness.device(), **kind), Model(meshes, "meta", **kind)
    te_fsdp.fully_shard(subject, meshes, **how)
    te_fsdp.materialize(subject)
    scramble(reference)
    copy_shards(reference, subject)
    return reference, subject


def bitwise_equal(
    axes: dict[str, int],
    *,
    interleaved: bool = False,
    experts: bool = False,
    split: bool = True,
    frozen: bool = False,
    spoil: str = "",
    save: str = "",
    load: str = "",
    **how: Any,
) -> dict[str, Any]:
    """Train three steps. `how`: further arguments of fully_shard; `spoil`: a negative control.

    Args:
        axes: mesh sizes.
        interleaved: layout of the fused QKV.
        experts: whether the model has some.
        split: of Muon.
        frozen: whether one matrix is.
        spoil: "fused": Muon gets the opposite of `split`.
        save: folder of a checkpoint that is written after the first step.
        load: folder of one that is read instead of a first step.
        how: further arguments of fully_shard.
    """
    import te_fsdp

    reference, subject = _models(axes, how, interleaved=interleaved, experts=experts)
    if frozen:
        for model in (reference, subject):
            model.layer.self_attention.proj.weight.requires_grad_(False)
    names = _matrices(reference)
    rows = {name: _rows(name, interleaved) for name in names if split}
    params = [p for n, p in subject.named_parameters() if n in names]
    optimizer = te_fsdp.Muon(subject, params, adamw=ADAMW, split_fused=split != (spoil == "fused"), **MUON)
    if how.get("outer_strategy"):
        te_fsdp.shard_optimizer(optimizer)
    oracle = OneProcess(reference, names, rows)
    checks = Findings()
    for step in range(STEPS):
        draw(reference, subject, step)
        if load and step == 0:
            oracle.step()
            te_fsdp.checkpoint.load(load, subject, optimizer)
            compare(checks, "loaded", subject, reference)
            continue
        if frozen:
            for model in (reference, subject):
                model.layer.self_attention.proj.weight.grad = None
        oracle.step()
        optimizer.step()
        compare(checks, f"step {step}", subject, reference)
        if save and step == 0:
            te_fsdp.checkpoint.save(save, subject, optimizer)
    states = [state for state in optimizer.state.values() if "momentum_buffer" in state]
    assert len(states) == len(params) - frozen
    return checks.settle(minimum=STEPS * 4)


def draw(reference: nn.Module, subject: nn.Module, step: int) -> None:
    """Draw other gradients in every step, the same on both sides."""
    fill(reference, subject, lacking=False)
    for parameter in (*reference.parameters(), *subject.parameters()):
        if parameter.grad is not None:
            parameter.grad.mul_(1.0 + step).add_(0.25 * step)


def compare(checks: Findings, what: str, subject: nn.Module, reference: nn.Module) -> None:
    """Check that every own shard is bitwise equal to the reference; other ranks' experts are theirs."""
    own = {name for name, _ in subject.named_parameters(remove_duplicate=False)}
    view = nn.Module()
    view._parameters = {n: p for n, p in reference.named_parameters() if n in own}
    compare_shards(checks, what, subject, view, _value, bits=True)


def quantized(recipe: str, hidden: int) -> dict[str, Any]:
    """Compare main weights of quantized weights, with gradients of a backward, with those of one process."""
    from quantization.bodies import Stepper, batch_of
    from quantization.weight_bytes import stock

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = stock("mlp_swiglu", recipe, "meta", hidden=hidden)
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model)
    train = Stepper(model, recipe, meshes, False)
    train.optimizer = te_fsdp.Muon(model, adamw=ADAMW, **MUON)
    te_fsdp.main_weights(model, train.optimizer)
    weights = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    taken = {id(p) for p in train.optimizer.param_groups[0]["params"]}
    assert taken == {id(p) for p in weights.values()} and len(weights) == 2, "fc1 and fc2"
    parts = {}
    for name, parameter in weights.items():
        # On the device: its products round otherwise than the host's.
        main = harness.full(train.optimizer.state[parameter]["master_param"]).to(harness.device())
        parts[name] = [nn.Parameter(part.clone()) for part in main.chunk(1 + name.endswith("fc1_weight"))]
    oracle = torch.optim.Muon([part for several in parts.values() for part in several], **MUON)

    def same_gradients(*unused: Any) -> None:
        for name, parameter in weights.items():
            gradient = harness.full(parameter.grad).float().to(harness.device())
            for part, own in zip(parts[name], gradient.chunk(len(parts[name])), strict=True):
                part.grad = own.clone()

    # The first of the optimizer's hooks: after it main weights take the parameters' places.
    train.optimizer._optimizer_step_pre_hooks[-1] = same_gradients
    train.optimizer._optimizer_step_pre_hooks.move_to_end(-1, last=False)
    checks = Findings()
    for step in range(STEPS):
        train(*batch_of(hidden))
        oracle.step()
        for name, parameter in weights.items():
            main = train.optimizer.state[parameter]["master_param"]
            expected = torch.cat([part.detach() for part in parts[name]]).cpu()
            checks.attempt(checks.bitwise_equal, f"step {step} {name}", main, expected)
            error = (harness.full(parameter) - expected).abs().max() / expected.abs().max()
            assert error <= 2**-4, f"{name}: {error}"  # half a step of e4m3 near its largest value
    return checks.settle(minimum=STEPS * 2)


def errors_of_muon(case: str) -> None:
    """Return the expected errors on all ranks."""
    import transformer_engine.pytorch as te

    import te_fsdp

    device = harness.device()
    model = nn.Sequential(te.Linear(HIDDEN, FFN, device=device), te.LayerNorm(FFN, device=device))
    early = list(model.parameters())
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type=harness.device_type()))
    if case == "no matrix":
        te_fsdp.Muon(model, model.parameters())
    elif case == "early":
        te_fsdp.Muon(model, [p for p in early if p.ndim == 2])
    elif case == "copy":
        copy.copy(te_fsdp.Muon(model, adamw=ADAMW)).step()
    elif case == "option":
        te_fsdp.Muon(model, adamw={"amsgrad": True})


def torch_optimizers(axes: dict[str, int], only: Sequence[str] = (), **how: Any) -> dict[str, str]:
    """Return the result of each torch optimizer for sharded parameters: "same bits", "to rounding", or an error's name.

    The parameters' updates are compared with one process' after two steps of given gradients.
    """
    import te_fsdp

    outcomes: dict[str, str] = {}
    models = _models(axes, how, interleaved=False, experts=False)
    for name in only or ALL:
        # One optimizer after the other goes on with the same weights; those of HFSDP stay with their model.
        if how.get("outer_strategy") and outcomes:
            models = _models(axes, how, interleaved=False, experts=False)
        reference, subject = models
        matrices = [n for n, p in reference.named_parameters() if p.ndim == 2 or name != "Muon"]
        made = []
        # The same formula on both sides: by default torch uses foreach kernels for the parameters of one process, but
        # not for subclasses of DTensor, and ASGD's foreach kernels multiply and add in a different order than its loop.
        options = {} if name == "Muon" else {"foreach": False}
        for model in (subject, reference):
            chosen = [p for n, p in model.named_parameters() if n in matrices]
            made.append(getattr(torch.optim, name)(chosen, lr=0.01, **options))
        try:
            te_fsdp.check_optimizer(subject, made[0])
            if how.get("outer_strategy"):
                te_fsdp.shard_optimizer(made[0])
            for step in range(2):
                draw(reference, subject, step)
                for optimizer in made:
                    optimizer.step()
        except te_fsdp.TeFsdpError as error:
            assert f"{name}" in str(error), error
            outcomes[name] = "refused"
            continue
        exact, rounded = Findings(), Findings()
        compare(exact, name, subject, reference)
        outcomes[name] = "same bits" if not exact.failures else "to rounding"
        for own, parameter, info in shards(subject) if exact.failures else ():
            full, local = reference.get_parameter(own).detach(), _local(parameter.detach())
            for box in info.boxes:
                pair = local[box.local_slices()], full[box.original_slices()]
                rounded.attempt(rounded.close, f"{name} {own}", *pair, MUON_ROUNDING, WHY_MUON, floor=0.1)
        rounded.settle(minimum=0)
    return outcomes


def momentum(dtype: str, nesterov: bool, strategy: str, steps: int = 2) -> int:
    """Compare momentum buffers with the sums of gradients by torch's formula, bit for bit.

    Args:
        dtype: Of weights, gradients and momentum; "bfloat16" is what the iteration runs in.
        nesterov: Of Muon.
        strategy: Of the model. With "no_shard" a rank has whole matrices, and nothing is sent that would be a copy.
        steps: How many.

    Returns:
        Comparisons. The negative control is that the update, which is orthogonal, has other values.
    """
    import te_fsdp

    kind = getattr(torch, dtype)
    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Linear(16, 8 * n, bias=False, dtype=kind) for n in (1, 2))).to(
        harness.device()
    )
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    optimizer = te_fsdp.Muon(model, list(model.parameters()), nesterov=nesterov, adamw=ADAMW, **MUON)
    checks, expected = harness.Comparisons(), {}
    for step in range(steps):
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(step)
            local = torch.randn(_local(parameter).shape, generator=generator).to(harness.device(), kind)
            parameter.grad = torch.zeros_like(parameter)
            _local(parameter.grad).copy_(local)
            buffer = expected.setdefault(name, torch.zeros_like(local))
            buffer.lerp_(local, 1 - MUON["momentum"])
        optimizer.step()
        for name, parameter in model.named_parameters():
            result = _local(optimizer.state[parameter]["momentum_buffer"])
            checks.bitwise_equal(f"step {step} {name}", result, expected[name])
    return checks.require(2 * steps)
