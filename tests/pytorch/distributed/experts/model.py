"""A small mixture of experts with given routes, for one process or for any mesh.

Tokens travel by all-to-all over ep. Within tp every rank has the same
tokens; the sums that GroupedLinear leaves to its caller are the model's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.tensor_parallel import SumGradientOverTp, SumOverTp
from matrix.models import autocast, recipe_of
from torch import nn

#: Rows of one expert must be a multiple of this: the gradient of its weight is a sum over them, in the recipe's format.
ROWS = {"none": 1, "mxfp8": 32, "block": 128}
TOKENS = 256
#: How tokens choose experts: uniformly, only the first half of the experts, or the first one most often.
ROUTES = ("every", "some", "uneven")
#: As "uneven", but the experts get no token of the second half of the batch, and two thirds of the others.
DROPPED = "dropped"


def routes(name: str, experts: int, step: int) -> torch.Tensor:
    """Return the expert of each token of the global batch."""
    generator = torch.Generator().manual_seed(step)
    if name == "every":
        return torch.randint(experts, (TOKENS,), generator=generator)
    if name == "some":
        return torch.randint(max(1, experts // 2), (TOKENS,), generator=generator)
    share = torch.rand(TOKENS, generator=generator) ** 3  # most of them small
    chosen = (share * experts).long().clamp(max=experts - 1)
    if name == DROPPED:
        chosen[TOKENS // 2 :] = chosen[::3] = -1
    return chosen


class _AllToAll(torch.autograd.Function):
    """Rows (n, hidden): `send[r]` of them go to rank r, `receive[r]` come from it; gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any
    ) -> torch.Tensor:
        ctx.back = receive, send, group
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _AllToAll.apply(gradient, *ctx.back), None, None, None


class Mixture(nn.Module):
    """(tokens, hidden) -> the same: each token through its expert."""

    def __init__(
        self, hidden: int, experts: int, rows: int, meshes: Any, *, bias: bool, single: bool, **kwargs: Any
    ) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.experts, self.rows, self.single = experts, rows, single
        self.ep = None if meshes is None or meshes.ep is None else meshes.ep
        own = experts if meshes is None else len(meshes.experts(experts))
        if single:
            kwargs |= {"single_grouped_weight": True, "single_grouped_bias": bias, "use_grouped_tensor": True}
        self.up = te.GroupedLinear(own, hidden, 2 * hidden, parallel_mode="column", bias=bias, **kwargs)
        self.down = te.GroupedLinear(own, 2 * hidden, hidden, parallel_mode="row", bias=bias, **kwargs)
        # TE passes over the option, with a warning alone, unless NVTE_GROUPED_LINEAR_SINGLE_PARAM=1.
        assert not single or self.up.single_grouped_weight, "one parameter for each expert"

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Run the experts.

        `chosen` has each token's expert, in any order; -1 for a dropped token, whose result is zero.
        """
        order = chosen.argsort(stable=True)[int((chosen < 0).sum()) :]
        counts = torch.bincount(chosen[chosen >= 0], minlength=self.experts)
        rows = x[order]
        if self.ep is None:
            out = self._own(rows, [counts.tolist()])
        else:
            out = self._elsewhere(rows, counts)
        return torch.zeros_like(x, dtype=out.dtype).index_copy(0, order, out)

    def _elsewhere(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send each token to the rank of its expert, and its result back."""
        group, size = self.ep.get_group(), self.ep.size()
        step = -(-self.experts // size)
        dealt = [part.tolist() for part in counts.split(step)]
        mine: list[Any] = [None] * size
        dist.all_gather_object(mine, dealt, group=group)
        arriving = [every[self.ep.get_local_rank()] for every in mine]
        send, receive = [sum(part) for part in dealt], [sum(part) for part in arriving]
        arrived = _AllToAll.apply(rows, send, receive, group)
        return _AllToAll.apply(self._own(arrived, arriving), receive, send, group)

    def _own(self, rows: torch.Tensor, arriving: list[list[int]]) -> torch.Tensor:
        """Run this rank's experts on rows of several ranks, ordered by expert: `arriving[rank][expert]` of them."""
        ends = torch.tensor(arriving).flatten().cumsum(0).tolist()
        pieces = rows.tensor_split(ends[:-1])
        experts = len(arriving[0])
        order = [source * experts + expert for expert in range(experts) for source in range(len(arriving))]
        counts = torch.tensor(arriving).sum(0).tolist()
        padded = [-(-count // self.rows) * self.rows for count in counts]
        parts = []
        for expert in range(experts):
            parts += [pieces[source * experts + expert] for source in range(len(arriving))]
            parts.append(rows.new_zeros(padded[expert] - counts[expert], rows.shape[1]))
        out = self._experts(torch.cat(parts), padded)
        kept = [part[:count] for part, count in zip(out.split(padded), counts, strict=True)]
        split = torch.cat(kept).split(
            [arriving[i % len(arriving)][i // len(arriving)] for i in range(len(order))]
        )
        back = dict(zip(order, split, strict=True))
        return torch.cat([back[i] for i in range(len(order))])

    def _experts(self, rows: torch.Tensor, splits: list[int]) -> torch.Tensor:
        given: Any = torch.tensor(splits, device=rows.device) if self.single else splits
        parted = self.up.tp_size > 1
        if parted:
            rows = SumGradientOverTp.apply(rows, self.up.tp_group)
        out = self.down(nn.functional.gelu(self.up(rows, given)), given)
        return SumOverTp.apply(out, self.up.tp_group) if parted else out


class Model(nn.Module):
    """A dense layer, experts, a dense layer; residuals let every token through."""

    def __init__(self, recipe: Any, hidden: int, experts: int, meshes: Any, **options: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        kwargs = {key: options[key] for key in ("params_dtype", "device")}
        self.recipe = recipe
        self.first = te.Linear(hidden, hidden, **kwargs)
        self.mixture = Mixture(hidden, experts, meshes=meshes, **options)
        self.last = te.LayerNormLinear(hidden, hidden, **kwargs)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Map (tokens, hidden) to the same shape."""
        with autocast(self.recipe):
            y = self.first(x)
            return self.last(y + self.mixture(y, chosen))


def build(
    recipe_name: str,
    weights: str,
    experts: int,
    meshes: Any,
    device: Any,
    *,
    bias: bool,
    single: bool = False,
    own: bool = True,
) -> Model:
    """Return the model for one process (`meshes` None) or for a mesh; `weights` as in the matrix.

    On the device experts of other ranks are others, and parts over tp other parts, unless `own` is False.
    """
    import transformer_engine.pytorch as te

    recipe, quantized = recipe_of(recipe_name), weights == "quantized"
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(weights, torch.bfloat16)
    kwargs = {} if meshes is None else meshes.te_kwargs()
    with te.quantized_model_init(enabled=True, recipe=recipe) if quantized else nullcontext():
        model = Model(
            recipe,
            width_of(recipe_name, weights),
            experts,
            meshes,
            # TE's grouped kernels cut the rows of MXFP8 by 128.
            rows=128 if single and recipe_name == "mxfp8" else ROWS.get(recipe_name, 16),
            bias=bias,
            single=single,
            params_dtype=dtype,
            device=device,
            **kwargs,
        )
    if meshes is not None and own:
        harness.shift_rows_by_rank(model, kwargs["tp_group"])
        harness.shift_rows_by_rank(
            model.mixture, None if meshes.ep is None else meshes.ep.get_group(), experts=True
        )
    return model


def width_of(recipe_name: str, weights: str) -> int:
    """Return the hidden size of which every format finds full blocks in a shard of the tests' meshes."""
    if weights != "quantized":
        return 128
    return 256 if recipe_name == "block" else 128
