"""Bodies of losses over a vocabulary-parallel head."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

import te_fsdp

CLASSES, WIDTH = 64, 32


class Model(nn.Module):
    """Tokens to the logits of this rank's part of the classes."""

    def __init__(self, dtype: torch.dtype, **kwargs: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"params_dtype": dtype, "device": "meta", **kwargs}
        self.embedding = nn.Embedding(CLASSES, WIDTH, dtype=dtype, device="meta")
        self.mlp = te.LayerNormMLP(WIDTH, 2 * WIDTH, set_parallel_mode=True, **options)
        self.head = te.LayerNormLinear(WIDTH, CLASSES, parallel_mode="column", **options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.embedding(tokens)))


def step(
    how: str,
    dtype: torch.dtype,
    checks: str | None = None,
    only_first: bool = False,
    is_bound: bool = False,
) -> list[float]:
    """Return the loss of three backwards, computed according to ``how``, and the loss over all logits.

    ``only_first``: the classes of the second rank have no probability, as bytes that no text contains.
    ``is_bound``: only ``set_device_mesh``, as before torch's own ``fully_shard``.
    """
    import transformer_engine.pytorch as te

    meshes = te_fsdp.Meshes.build(tp=2)
    model = Model(dtype, **meshes.te_kwargs())
    if is_bound:
        options = {"check_inputs": checks != "setup"}
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight, **options)
    else:
        te_fsdp.fully_shard(model, meshes, **({} if checks is None else {"checks": checks}))
    te_fsdp.materialize(model, seed=0)
    if only_first and meshes.tp.get_local_rank() == 1:
        with torch.no_grad():
            model.head.bias.to_local().fill_(-1000)
    torch.manual_seed(1)
    tokens = torch.randint(CLASSES, (16, 2), device=harness.device())
    labels = torch.randint(
        CLASSES // 2, (32,), device=harness.device()
    )  # small: an index of each rank's part
    for _ in range(3):
        logits = model(tokens).flatten(0, 1)
        whole = DTensor.from_local(logits.float(), meshes.tp, [Shard(-1)])
        over_all = cross_entropy(whole.full_tensor(), labels)
        if how == "plain":
            loss = cross_entropy(logits.float(), labels)
            loss.backward()
        elif how == "plain, in the dtype of the logits":
            loss = cross_entropy(logits, labels)
            loss.backward()
        elif how == "loss_parallel":
            with loss_parallel():
                loss = cross_entropy(whole, labels).to_local()
                loss.backward()
        elif how.startswith("TE's"):
            group = None if how == "TE's, without a group" else meshes.tp.get_group()
            loss = te.parallel_cross_entropy(logits.view(16, 2, -1), labels.view(16, 2), 0.0, True, group)
            loss.backward()
        elif how == "gathered":
            loss = over_all
            loss.backward()
        else:
            loss = logits.float().square().mean()
            loss.backward()
    return [loss.item(), over_all.item()]
