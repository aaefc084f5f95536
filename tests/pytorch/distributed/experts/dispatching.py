"""Bodies: experts that get tokens in buffers of fixed sizes."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from graphed.tapes import recording
from torch import nn
from torch.nn import functional as F

EXPERTS, HIDDEN, WIDE, TOP_K = 3, 16, 32, 2
TOKENS = 24
"""Tokens of a rank."""
STEPS = 6


class Block(nn.Module):
    """Router, experts and the dispatcher between them."""

    def __init__(self, meshes: Any, capacity: int, groups: int) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        import te_fsdp

        num_local = len(meshes.experts(EXPERTS))
        options = {"bias": False, "params_dtype": torch.float32, "device": "meta", **meshes.te_kwargs()}
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, device="meta")
        self.up = te.GroupedLinear(num_local, HIDDEN, WIDE, **options)
        self.down = te.GroupedLinear(num_local, WIDE, HIDDEN, **options)
        self.dispatcher = te_fsdp.ExpertDispatcher(meshes, EXPERTS, capacity, groups=groups)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mixed results and the number of dropped copies."""
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K)
        rows, route = self.dispatcher.dispatch(tokens, chosen)
        results = self.down(F.gelu(self.up(rows, self.dispatcher.splits)), self.dispatcher.splits)
        return self.dispatcher.combine(results, route, weights), route.dropped()


def step(axes: dict[str, int], capacity: int, *, groups: int = 1, dense: bool = False) -> dict[str, Any]:
    """Run forward and backward on this rank's tokens.

    Args:
        axes: The mesh.
        capacity: Of each expert, for the tokens of a rank.
        groups: Number of ranks whose tokens this one has.
        dense: Compute all experts for all tokens instead, as plain products.

    Returns:
        Outputs, gradients of the tokens, unsharded gradients of the parameters, and the number of dropped copies.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = Block(meshes, capacity, groups)
    te_fsdp.fully_shard(model, meshes, average_gradients=False)
    te_fsdp.materialize(model, seed=2)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(2 * TOKENS, HIDDEN, generator=generator).split(TOKENS * groups)[meshes.data_rank]
    tokens = tokens.to(harness.device(), copy=True).requires_grad_()
    if dense:
        return {"outputs": _dense(model, tokens)}
    outputs, dropped = model(tokens)
    outputs.square().sum().backward()
    gradients = {name: harness.full(parameter.grad) for name, parameter in model.named_parameters()}
    return {
        "outputs": outputs.detach(),
        "tokens": tokens.grad,
        "gradients": gradients,
        "dropped": int(dropped),
        "splits": model.dispatcher.splits,
    }


def training(
    axes: dict[str, int], capacity: int, *, groups: int = 1, recorded: bool = False
) -> dict[str, Any]:
    """Train on new tokens in each step, with a plain loop or a step that replays a recording.

    Arguments are those of :func:`step`.

    Returns:
        By step the loss and the number of dropped copies; unsharded parameters; recordings and replays, and why steps
        ran eagerly.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = Block(meshes, capacity, groups)
    te_fsdp.fully_shard(model, meshes, average_gradients=False)
    te_fsdp.materialize(model, seed=2)
    rate = torch.tensor(1e-2, device=harness.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-3, fused=True, capturable=True)

    def forward_backward(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with te_fsdp.microbatch(model, is_last=True):
            outputs, dropped = model(tokens)
            loss = outputs.square().sum()
            loss.backward()
        return loss, dropped

    with recording():
        replayed = te_fsdp.graphed_step(model, optimizer, forward_backward, warmup=2)
    results: dict[str, Any] = {"losses": [], "dropped": []}
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randn(2 * TOKENS, HIDDEN, generator=generator).split(TOKENS * groups)[meshes.data_rank]
        tokens = tokens.to(harness.device(), copy=True)
        if recorded:
            loss, dropped = replayed(tokens).output
        else:
            loss, dropped = forward_backward(tokens)
            optimizer.step()
            optimizer.zero_grad()
        results["losses"].append(loss.item())
        results["dropped"].append(int(dropped))
    results["parameters"] = {n: harness.full(p.detach()) for n, p in model.named_parameters()}
    results["graphs"] = replayed.recordings, replayed.replays, replayed.why_eager, replayed.why_step_eager
    return results


@torch.no_grad()
def _dense(model: Block, tokens: torch.Tensor) -> torch.Tensor:
    full, tokens = {name: harness.full(p) for name, p in model.named_parameters()}, tokens.cpu()
    weights, chosen = (tokens @ full["router.weight"].T).softmax(-1).topk(TOP_K)
    share = torch.zeros(len(tokens), EXPERTS).scatter_(1, chosen, weights)
    results = [F.gelu(tokens @ full[f"up.weight{n}"].T) @ full[f"down.weight{n}"].T for n in range(EXPERTS)]
    return (torch.stack(results, 1) * share[..., None]).sum(1)


def wrong_on_rank_1(wrong: str) -> None:
    """Dispatch once, with a different size or a wrong input on rank 1."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, ep=2, device_type=harness.device_type())
    is_wrong = {
        name: name == wrong and dist.get_rank() == 1 for name in ("capacity", "hidden", "shape", "index")
    }
    dispatcher = te_fsdp.ExpertDispatcher(meshes, 4, 8 + is_wrong["capacity"])
    tokens = torch.ones(3, 5 + is_wrong["hidden"], device=harness.device())
    chosen = torch.arange(2, device=harness.device()).expand(3 + is_wrong["shape"], 2)
    dispatcher.dispatch(tokens, chosen + 4 * is_wrong["index"])
