"""Trainings with weights gathered by copies, compared with NCCL (Gloo)."""

from __future__ import annotations

import time
from typing import Any

import harness
import torch

import te_fsdp
from te_fsdp.upstream import torch_dtensor as _torch

HIDDEN, TOKENS = 128, 32
OPTIONS = {"params_dtype": torch.bfloat16, "device": "meta", "set_parallel_mode": True}


class Model(torch.nn.Module):
    """Two units, and a root with five rows and a parameter without elements on most ranks."""

    def __init__(self, te_kwargs: dict[str, Any], hidden: int = HIDDEN) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.hidden = hidden
        self.layers = torch.nn.ModuleList(
            te.LayerNormMLP(hidden, 2 * hidden, **OPTIONS, **te_kwargs) for _ in range(3)
        )
        self.head = torch.nn.Linear(hidden, 5, dtype=torch.bfloat16, device="meta")
        self.last = torch.nn.Linear(5, 1, dtype=torch.bfloat16, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(self.head(x))


def _build(
    made: Any,
    axes: dict[str, int],
    strategy: str,
    precision: dict[str, Any],
    prefetch: int,
    transport: str,
    outer: str = "no_shard",
    hidden: int = HIDDEN,
) -> tuple[Any, Any]:
    import transformer_engine.pytorch as te

    meshes = te_fsdp.Meshes.build(**axes)
    with te.quantized_model_init(enabled=made is not None, recipe=made):
        model = Model(meshes.te_kwargs(), hidden)
    te_fsdp.fully_shard(
        model,
        meshes,
        units=[te.LayerNormMLP],
        strategy=strategy,
        outer_strategy=outer,
        precision=te_fsdp.MixedPrecisionPolicy(**precision) if precision else None,
        transport=transport,
    )
    te_fsdp.materialize(model, seed=0)
    for number, layer in enumerate(model.layers):
        if prefetch:
            layer.set_modules_to_forward_prefetch(list(model.layers[number + 1 : number + 1 + prefetch]))
            layer.set_modules_to_backward_prefetch(list(model.layers[:number][::-1][:prefetch]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if outer == "no_shard":
        te_fsdp.main_weights(model, optimizer)
    else:
        te_fsdp.shard_optimizer(optimizer)
    return model, optimizer


def _values(parameter: torch.Tensor) -> list[torch.Tensor]:
    from te_fsdp.upstream import te as _te

    local = _torch.local_of(parameter)
    return [b.cpu() for b in (_te.value_buffers_of(local) if _te.is_quantized(local) else [local.detach()])]


def _steps(model: Any, optimizer: Any, made: Any, seen: dict[str, Any], steps: int, by_hand: bool) -> None:
    """Train with microbatches, evaluation, writes to shards, moved shards and an old state."""
    import transformer_engine.pytorch as te

    def loss_of() -> torch.Tensor:
        with te.autocast(enabled=made is not None, recipe=made):
            x = torch.randn(TOKENS, model.hidden, dtype=torch.bfloat16, device=harness.device())
            return model(x).float().square().mean()

    first = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    for step in range(steps):
        for number in range(2):
            with te_fsdp.microbatch(model, is_last=number == 1):
                loss = loss_of()
                loss.backward()
            seen["losses"].append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen["losses"].append(loss_of().cpu())
        if not by_hand:
            continue
        with torch.no_grad():
            te_fsdp.release_params(model)
            for parameter in model.head.parameters():
                parameter.mul_(1.25)
        seen["staged"].append(_staged(model))
        if step == 1 and made is None:
            model._apply(torch.clone)
            model.load_state_dict(first, strict=False)
        for state in optimizer.state.values():  # the next step makes main weights of what was written
            state.pop("master_param", None)
        if step == 0:
            te_fsdp.start_param_gather(model)
            te_fsdp.finish_param_gather(model)
            te_fsdp.release_params(model)


def _staged(model: Any) -> int:
    """Return the bytes of shards that all-gathers have copied since the last call."""
    from te_fsdp.features.transports import transports_of
    from te_fsdp.sharded_model import require_sharded_model

    results = {
        id(t.gathers): t.gathers
        for t in transports_of(require_sharded_model(model, "")).by_unit.values()
        if t.gathers
    }
    staged = sum(gathers.staged for gathers in results.values())
    for gathers in results.values():
        gathers.staged = 0
    return staged


def training(
    recipe: str,
    axes: dict[str, int],
    strategy: str = "optim_grads_params",
    prefetch: int = 0,
    models: int = 1,
    breaks: str = "",
    steps: int = 3,
    by_hand: bool = True,
    outer: str = "no_shard",
    hidden: int = HIDDEN,
    **precision: Any,
) -> dict[str, Any]:
    """Compare steps by both transports, of ``models`` models in turn.

    Returns:
        By transport what all came to; of the copies the names of the units that they gather.
    """
    from quantization.models import recipe_of

    from te_fsdp.features.transports import transports_of
    from te_fsdp.upstream import fsdp2_copy_engine as _fsdp2_copies

    made = None if recipe == "none" else recipe_of(recipe)
    stock = _fsdp2_copies.CopyEngineGathers._stage
    results: dict[str, Any] = {}
    for transport in ("nccl", "copy_engine"):
        how = (made, axes, strategy, precision, prefetch, transport, outer, hidden)
        built = [_build(*how) for _ in range(models)]
        if breaks and transport == "copy_engine":
            BREAKS[breaks](built[0][0])
        seen: dict[str, Any] = {"losses": [], "staged": [], "values": []}
        for model, optimizer in built:
            torch.manual_seed(0)
            _steps(model, optimizer, made, seen, steps, by_hand)
            for name, parameter in model.named_parameters():
                seen["values"] += [(name, value) for value in _values(parameter)]
        state = te_fsdp.sharded_model.require_sharded_model(built[0][0], "")
        seen["transports"] = {name: tuple(t[:2]) for name, t in transports_of(state).by_unit.items()}
        results[transport] = seen
    _fsdp2_copies.CopyEngineGathers._stage = stock  # the worker goes on with other tests
    return results


def _stale(model: Any) -> None:
    """Read a moved shard at its previous address."""
    from te_fsdp.upstream import fsdp2_copy_engine as _fsdp2_copies

    _fsdp2_copies.CopyEngineGathers._stage = lambda self, targets, sources: None


def _early(model: Any) -> None:
    """Reuse the memory of a gathered weight before its reader has started."""
    from te_fsdp.features.transports import transports_of
    from te_fsdp.sharded_model import require_sharded_model

    for transport in transports_of(require_sharded_model(model, "")).by_unit.values():
        gathers = transport.gathers
        if gathers is not None:
            copy = gathers._copy

            def copy_and_reuse(gather: Any, is_first: bool, copy: Any = copy) -> None:
                copy(gather, is_first)
                gather.small[0][-1].zero_()

            gathers._copy = copy_and_reuse


BREAKS = {"stale": _stale, "early": _early}


def gathered(recipe: str) -> dict[str, list[str]]:
    """Return the units that are all-gathered in a backward, also after a step, and when gathers wait ("waits")."""
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    from te_fsdp.upstream import fsdp2_copy_engine as _fsdp2_copies

    made = None if recipe == "none" else recipe_of(recipe)
    model, optimizer = _build(made, DP2, *_PLAIN, "copy_engine")
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=harness.device())
    kind, names = _fsdp2_copies.CopyEngineGathers, list[str]()
    stock, release = kind._plan_copies, kind._release

    def lay_out(self: Any, group: Any) -> Any:
        names.append(group._module_fqn or "root")
        return stock(self, group)

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        names.append("waits")
        release(self, *arguments, **options)

    kind._plan_copies, kind._release = lay_out, noted
    results = {}
    try:
        for when in ("first", "settled", "stepped"):
            with te.autocast(enabled=made is not None, recipe=made):
                loss = model(x).float().square().mean()
            if when == "stepped":
                optimizer.step()
            names.clear()
            loss.backward()
            results[when] = list(names)
            optimizer.zero_grad()
    finally:
        kind._plan_copies, kind._release = stock, release
    return results


def traced(recipe: str) -> list[str]:
    """Return the names of what a GPU does in a step whose weights are gathered by copies: kernels and copies.

    Weights are wide enough for copies of their own; smaller pieces are copied together by a kernel.
    """
    from quantization.models import recipe_of

    made, hidden = None if recipe == "none" else recipe_of(recipe), 512
    model, optimizer = _build(made, DP2, "optim_grads_params", {}, 0, "copy_engine", hidden=hidden)
    x = torch.randn(TOKENS, hidden, dtype=torch.bfloat16, device=harness.device())

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return sorted({event.name for event in profile.events() if event.device_type.name == "CUDA"})


DP2 = {"dp_shard": 2}
_PLAIN: tuple[Any, ...] = ("optim_grads_params", {}, 0)


def error_of_absent_rank() -> tuple[str, float]:
    """Run a forward without one on the other rank; return rank 0's error, and its seconds."""
    from te_fsdp.collectives.rendezvous import DEFAULT_TIMEOUT

    model, _ = _build(None, DP2, "optim_grads_params", {}, 0, "copy_engine")
    # First-forward checks use collectives, too: here the all-gathers themselves must time out.
    model(torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16))
    store = torch.distributed.PrefixStore("deserted", _torch.default_store())
    if torch.distributed.get_rank() != 0:
        store.wait(["told"])
        return "", 0.0
    te_fsdp.set_collective_timeout(1.0)
    began = time.monotonic()
    try:
        model(torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16))
        return "went on", 0.0
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        te_fsdp.set_collective_timeout(DEFAULT_TIMEOUT)
        store.set("told", "")


def losses_with_late_rank(when: str) -> dict[str, Any]:
    """Return losses of forwards with writes to shards between them, while a rank is late with its copies or writes."""
    from te_fsdp.upstream import fsdp2_copy_engine as _fsdp2_copies

    stock = _fsdp2_copies.CopyEngineGathers._copy
    me, losses = torch.distributed.get_rank(), {}

    def copy(self: Any, gather: Any, is_first: bool) -> None:
        if when == "behind" and me == 0:
            time.sleep(0.1)
        stock(self, gather, is_first)

    for transport in ("nccl", "copy_engine"):
        model, _ = _build(None, DP2, "optim_grads_params", {}, 0, transport)
        torch.manual_seed(0)
        _fsdp2_copies.CopyEngineGathers._copy = copy
        try:
            with torch.no_grad():
                for _ in range(2):
                    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=harness.device())
                    losses.setdefault(transport, []).append(model(x).float().square().mean().cpu())
                    if when == "before" and me == 0:
                        time.sleep(0.1)
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
        finally:
            _fsdp2_copies.CopyEngineGathers._copy = stock
    return losses
