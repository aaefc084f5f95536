"""``ExpertDispatcher``: send tokens to experts in buffers of fixed sizes, without host synchronization."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp.collectives.agreement import gather, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import is_capturing
from te_fsdp.errors import InputError, require_integer, require_kind, require_number, shorten
from te_fsdp.mesh import Meshes


class ExpertRoute(NamedTuple):
    """Result of :meth:`ExpertDispatcher.dispatch`: the row of each copy of a token."""

    rows: torch.Tensor  #: (tokens, top_k): row in the buffer that is sent, or ``unused``
    unused: int  #: Value for dropped copies: the number of rows

    def dropped(self) -> torch.Tensor:
        """Return the number of dropped copies, an integer tensor on the device."""
        return (self.rows == self.unused).sum()


# [Note: fixed sizes] The number of tokens that choose an expert is known on the device only. Sending exactly these rows
# requires the host to read it. Instead each expert has a fixed number of rows (``capacity``) for the tokens of each
# rank. Rows that no token uses are zero. Tokens beyond the capacity are dropped: they get zeros from that expert. All
# shapes and all splits of ``all_to_all`` and ``GroupedLinear`` are constants, so CUDA graphs can record the calls.
#
# [Note: groups of tokens] The capacity applies to a *group* of tokens, those of one rank. Which tokens are dropped
# therefore depends on the tokens of their own group only, and needs no communication. One process that passes the
# tokens of all ranks with ``groups=`` the number of ranks drops the same ones, and gives each expert the same rows in
# the same order.
#
# Alternatives considered:
#
# - A capacity for the tokens of all ranks. Fewer tokens are dropped if ranks prefer different experts, but a rank
#   needs the counts of all others before it can send a row.
# - TE's ``ep_dispatch`` and ``ep_combine`` (TE 2.18 and later). They require NCCL 2.30.4, a TE build with NCCL EP, and
#   BF16 tokens.
class ExpertDispatcher:
    """Send tokens to the experts of an ``ep`` axis and combine the results, without host synchronization.

    ``GroupedLinear`` gets the constant list :attr:`splits` as ``m_splits``.

    Example::

        dispatcher = te_fsdp.ExpertDispatcher(meshes, num_experts=64, capacity=128)
        rows, route = dispatcher.dispatch(tokens, chosen)  # (t, hidden), (t, top_k)
        results = experts.down(act(experts.up(rows, dispatcher.splits)), dispatcher.splits)
        mixed = dispatcher.combine(results, route, weights)  # (t, hidden)

    Args:
        meshes: Meshes of the job. Experts are distributed as by :meth:`te_fsdp.Meshes.experts`.
        num_experts: Number of experts of the layer on all ranks.
        capacity: Rows of each expert for the tokens of each rank. See :meth:`capacity_for`. No token is dropped if it
            is at least the number of tokens of a rank.
        groups: Number of equal groups in the tokens of this rank, with a capacity for each.
    """

    def __init__(self, meshes: Meshes, num_experts: int, capacity: int, *, groups: int = 1) -> None:
        """Compute the constant sizes. Local operation."""
        require_kind("te_fsdp.ExpertDispatcher", "meshes", meshes, Meshes, expected="te_fsdp.Meshes")
        for name, value in (("num_experts", num_experts), ("capacity", capacity), ("groups", groups)):
            require_integer("te_fsdp.ExpertDispatcher", name, value, least=1)
        mine, ranks = len(meshes.experts(num_experts)), meshes.size("ep")
        self.num_experts, self.capacity, self.groups = int(num_experts), int(capacity), int(groups)
        self.group = None if meshes.ep is None else meshes.ep.get_group()
        self._ep, self._is_checked = meshes.ep, False
        step, rows_per_expert = -(-num_experts // ranks), capacity * groups
        #: Rows for each of this rank's experts, to pass as ``m_splits``.
        self.splits: list[int] = [ranks * rows_per_expert] * mine
        self._shape = ranks, mine, rows_per_expert
        # As torch.chunk distributes experts: the last ranks may have fewer of them, or none.
        self._send = [min(step, num_experts - rank * step) * rows_per_expert for rank in range(ranks)]
        self._receive = [mine * rows_per_expert] * ranks

    @staticmethod
    def capacity_for(tokens: int, top_k: int, num_experts: int, factor: float, *, multiple: int = 1) -> int:
        """Return the capacity for a factor over an even load, rounded up to a multiple.

        Args:
            tokens: Largest number of tokens of a rank. The capacity must be the same on all ranks.
            top_k: Experts of each token.
            num_experts: Number of experts.
            factor: Ratio of the capacity to an even load.
            multiple: Number of rows that the recipe's blocks require: 16 for float8, 32 for MXFP8, 128 for NVFP4.

        Raises:
            PlacementError: An argument is out of range, or not a number.
        """
        where = "ExpertDispatcher.capacity_for"
        require_integer(where, "tokens", tokens, least=0)
        for name, value in (("top_k", top_k), ("num_experts", num_experts), ("multiple", multiple)):
            require_integer(where, name, value, least=1)
        require_number(where, "factor", factor, least=0, fix="factor=1.25")
        rows = max(1, math.ceil(tokens * top_k * factor / num_experts))
        return -(-rows // multiple) * multiple

    def dispatch(self, tokens: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ExpertRoute]:
        """Send each token to its experts.

        First choices of all tokens of a group take precedence over second choices, and earlier tokens over later ones.
        Collective over ``ep``: one ``all_to_all_single``, and one in backward. The first call also compares the sizes
        of all ranks, by two small collectives for which the host waits.

        Args:
            tokens: (tokens, hidden).
            chosen: (tokens, top_k), integer indices of different experts.

        Returns:
            The rows of this rank's experts (sum of :attr:`splits`, hidden), ordered by expert, then by rank; and the
            route for :meth:`combine`.

        Raises:
            InputError: The shapes do not fit, ``chosen`` has no integers, or indices on the CPU are out of range. In
                the first call on all ranks of ``ep``, also for sizes that differ between ranks.
        """
        if self._is_checked or is_capturing():
            self._check_shapes(tokens, chosen)
        else:
            self._check_first(tokens, chosen)
        count, top_k = chosen.shape
        buckets = self.num_experts * self.groups
        groups = torch.arange(self.groups, device=chosen.device)[:, None, None]
        # (groups, top_k, tokens of a group): the order of precedence.
        expert_slots = chosen.reshape(self.groups, -1, top_k).transpose(1, 2) * self.groups + groups
        expert_slots = expert_slots.flatten()
        # Stable, so that copies for one expert keep their order of precedence.
        order = expert_slots.argsort(stable=True)
        ordered = expert_slots[order]
        # The first copy of each expert and group in the sorted order.
        begin = torch.searchsorted(ordered, torch.arange(buckets, device=chosen.device, dtype=ordered.dtype))
        rank_in_slot = torch.arange(len(ordered), device=chosen.device) - begin[ordered]
        position = torch.empty_like(rank_in_slot).scatter_(0, order, rank_in_slot)
        unused = buckets * self.capacity
        # Copies beyond the capacity get the unused last row, which `dispatch` cuts off.
        rows = torch.where(position < self.capacity, expert_slots * self.capacity + position, unused)
        route = ExpertRoute(rows.view(self.groups, top_k, -1).transpose(1, 2).reshape(count, top_k), unused)
        copies = tokens[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1)
        # The last row receives the dropped copies.
        buffer = tokens.new_zeros(route.unused + 1, tokens.shape[1])
        buffer = buffer.index_copy(0, route.rows.flatten(), copies)[: route.unused]
        ranks, mine, rows_per_expert = self._shape
        if self.group is None:
            return buffer, route
        arrived = _AllToAll.apply(buffer, self._send, self._receive, self.group)
        return arrived.view(ranks, mine, rows_per_expert, -1).transpose(0, 1).flatten(0, 2), route

    def _check_shapes(self, tokens: torch.Tensor, chosen: torch.Tensor) -> None:
        """Raise InputError for wrong shapes, dtypes or indices. Local operation."""
        if (
            tokens.ndim != 2
            or chosen.ndim != 2
            or len(tokens) != len(chosen)
            or len(tokens) % self.groups
            or chosen.dtype not in (torch.int32, torch.int64)
        ):
            raise InputError(
                "ExpertDispatcher.dispatch: shapes of tokens and chosen experts",
                expected=f"(tokens, hidden), int32 or int64 (tokens, top_k), tokens divisible by groups={self.groups}",
                got=f"{tuple(tokens.shape)} and {chosen.dtype} {tuple(chosen.shape)}",
                fix="flatten the batch dims first, and pass indices of experts, such as those of torch.topk",
            )
        # Indices on a GPU are not read: the host would wait for the device.
        if chosen.device.type == "cpu" and chosen.numel():
            least, most = int(chosen.min()), int(chosen.max())
            if least < 0 or most >= self.num_experts:
                raise InputError(
                    "ExpertDispatcher.dispatch: chosen experts",
                    expected=f"indices from 0 to {self.num_experts - 1}",
                    got=f"indices from {least} to {most}",
                    fix="choose among the num_experts of the dispatcher",
                )

    def _check_first(self, tokens: torch.Tensor, chosen: torch.Tensor) -> None:
        """Raise InputError on all ranks for wrong inputs, or sizes that differ. Collective over ``ep``."""
        with raised_on_all_ranks(self._ep, "ExpertDispatcher.dispatch"):
            self._check_shapes(tokens, chosen)
        mine = {"num_experts": self.num_experts, "capacity": self.capacity, "groups": self.groups}
        mine |= {"hidden": tokens.shape[1], "dtype": str(tokens.dtype)}
        by_rank = [mine] if self._ep is None else gather(mine, self._ep)
        if wrong := [name for name in mine if any(sizes[name] != by_rank[0][name] for sizes in by_rank)]:
            raise InputError(
                f"ExpertDispatcher: {', '.join(wrong)}",
                expected="the same on all ranks of ep",
                got=shorten(
                    [f"ep rank {n}: {[sizes[name] for name in wrong]}" for n, sizes in enumerate(by_rank)], 8
                ),
                fix="pass equal values; compute the capacity from the largest number of tokens of all ranks",
            )
        self._is_checked = True

    def combine(self, results: torch.Tensor, route: ExpertRoute, weights: torch.Tensor) -> torch.Tensor:
        """Return the results of each token's experts, weighted and summed. Collective like :meth:`dispatch`.

        Args:
            results: Rows of this rank's experts, in the order of :meth:`dispatch`.
            route: Its second result.
            weights: (tokens, top_k).

        Returns:
            (tokens, hidden) in the dtype of the product of results and weights.

        Raises:
            InputError: The shapes do not fit.
        """
        ranks, mine, rows_per_expert = self._shape
        if results.ndim != 2 or len(results) != sum(self.splits) or weights.shape != route.rows.shape:
            raise InputError(
                "ExpertDispatcher.combine: shapes of results and weights",
                expected=f"({sum(self.splits)}, hidden) and {tuple(route.rows.shape)}",
                got=f"{tuple(results.shape)} and {tuple(weights.shape)}",
                fix="pass the experts' outputs for all rows of dispatch, and one weight for each chosen expert",
            )
        if self.group is not None:
            back = results.reshape(mine, ranks, rows_per_expert, -1).transpose(0, 1).flatten(0, 2)
            results = _AllToAll.apply(back, self._receive, self._send, self.group)
        padded = torch.cat([results, results.new_zeros(1, results.shape[1])])
        outputs = padded.index_select(0, route.rows.flatten()).unflatten(0, route.rows.shape)
        return (outputs * weights[..., None]).sum(1)


class _AllToAll(torch.autograd.Function):
    """Send ``send[r]`` rows to rank r and receive ``receive[r]`` rows from it. Gradients return the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = receive, send, group
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AllToAll.apply(gradients[0], *ctx.back), None, None, None
