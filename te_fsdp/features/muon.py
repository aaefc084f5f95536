"""``Muon``: torch's Muon on the unsharded matrices of a sharded model.

Muon orthogonalizes the update of an unsharded matrix. Among the ranks that shard a matrix, one rank (the owner)
computes it. Owners are assigned so that all ranks compute about the same amount:

    every rank       momentum and update of its shards, elementwise; the update in bf16, as in the first operation of
                     the orthogonalization
    all-to-all       shards to their owners
    owner            assembles the original matrix from boxes; splits fused ones (QKV, gated fc1) into their
                     matrices; orthogonalizes each
    all-to-all       parts of the result back
    every rank       weight decay and update of its shards, elementwise
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from te_fsdp.collectives.agreement import gather
from te_fsdp.errors import MeshError, OrderError, PlacementError, require_flags, require_kind
from te_fsdp.features.main_params import rows_of_state
from te_fsdp.features.main_weights import check_optimizer
from te_fsdp.layout import GATED_ACTIVATIONS, Box, cut_boxes
from te_fsdp.modules.plan import fused_projection
from te_fsdp.records import (
    KEEPS_MAIN_WEIGHTS,
    ParamOwner,
    binding_of,
    first_owners,
    param_owners,
    require_model,
)
from te_fsdp.shard_info import shard_info
from te_fsdp.sharded_model import shard_of
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

#: Number of interleaved groups along the rows of a fused weight, and relative heights of its matrices.
_Fused = tuple[int, tuple[int, ...]]
_WHOLE: _Fused = (1, (1,))


class Muon(Optimizer):
    """Muon for the matrices of a model, AdamW for its other parameters; exact on every mesh.

    The arithmetic is that of ``torch.optim.Muon`` and ``torch.optim.AdamW``. It supports every strategy, tensor and
    expert parallelism, quantized and bf16 weights (after :func:`te_fsdp.main_weights`) and
    :func:`te_fsdp.shard_optimizer`. Call these as for other optimizers. State (``momentum_buffer``, ``exp_avg``,
    ``exp_avg_sq``) has the parameters' placements, and ``te_fsdp.checkpoint`` loads it on any mesh.

    Each ``step`` is collective over the ranks that shard a weight: two all-to-alls of 2 bytes per element of a rank's
    shards. The first step also exchanges the ranks' layouts. Memory during ``step``: 4 bytes per element of a rank's
    shards, 2 per element of the matrices that it owns, and the memory to orthogonalize one matrix.

    Args:
        model: A sharded and materialized model, or an unsharded model.
        params: Matrices for Muon: parameters, or groups of them with their own options. ``None``: all weights of
            TransformerEngine's linear layers, without embeddings and heads of other classes.
        adamw: Options of AdamW for the model's other trainable parameters (``lr``, ``betas``, ``eps``,
            ``weight_decay``); ``None``: a different optimizer updates these.
        split_fused: Whether the matrices in a fused weight (query, key and value; gate and up) are orthogonalized
            separately. ``False``: as one matrix, like ``torch.optim.Muon``.
        **options: Options of ``torch.optim.Muon`` with its defaults: ``lr``, ``weight_decay``, ``momentum``,
            ``nesterov``, ``ns_coefficients``, ``eps``, ``ns_steps``, ``adjust_lr_fn``.

    Raises:
        PlacementError: A parameter for Muon is not a real matrix, such as one weight of all experts.
        OrderError: A parameter is not the model's.
        ValueError: torch's optimizers reject the options, or AdamW does not use them here (a PlacementError).
    """

    # Defaults for copies and unpickled optimizers, to which torch passes groups and state only.
    _model: nn.Module | None = None
    _plan: _ExchangePlan | None = None

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        split_fused: bool = True,
        **options: Any,
    ) -> None:
        require_model(model, "Muon(model, params)")
        require_flags("Muon", split_fused=split_fused)
        # torch's constructors check the options and define the defaults.
        placeholder = [torch.nn.Parameter(torch.empty(1, 1, device="cpu"))]
        defaults = torch.optim.Muon(placeholder, **options).defaults
        defaults |= {"algorithm": "muon", "betas": (0.9, 0.999)}
        supported = ("lr", "betas", "eps", "weight_decay")
        is_dict = isinstance(adamw or {}, Mapping)
        unknown = sorted(set(adamw or ()) - set(supported)) if is_dict else [repr(adamw)]
        if unknown:
            raise PlacementError(
                "Muon(adamw=...)",
                expected=f"options among {', '.join(supported)}",
                got=", ".join(unknown),
                fix="omit it, or pass adamw=None and use your own optimizer for the other parameters",
            )
        adamw_defaults = torch.optim.AdamW(placeholder, **(adamw or {})).defaults
        others = {key: adamw_defaults[key] for key in supported}
        if params is None:
            # TransformerEngine's linear layers, including single weights of all experts.
            weights = {
                id(owner.parameter): owner.parameter
                for owner in param_owners(model)
                if owner.parameter.requires_grad
                and owner.parameter.ndim > 1
                and not (owner.parameter.ndim == 2 and "bias" in owner.name)  # single bias of all experts
                and _te.kind_of(owner.module) not in (None, "unknown")
            }
            params = list(weights.values())
        matrices = _groups(params)
        for parameter in (p for group in matrices for p in group["params"]):
            if parameter.ndim == 2 and not parameter.is_complex():
                continue
            names = [owner.label for owner in param_owners(model) if owner.parameter is parameter]
            raise PlacementError(
                f"Muon: {names[0] if names else 'a parameter'} of shape {tuple(parameter.shape)}, {parameter.dtype}",
                expected="a real matrix",
                why="Muon orthogonalizes matrices",
                fix="use GroupedLinear(single_grouped_weight=False), which has one weight per expert"
                if parameter.ndim == 3
                else "omit it from params; adamw={...} updates all other parameters",
            )
        groups = [group for group in matrices if group["params"]]
        taken = {id(p) for group in groups for p in group["params"]}
        others_trained = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
        if adamw is not None and others_trained:
            # One optimizer for both, so that schedulers, checkpoints and main weights see one object.
            groups.append({"params": others_trained, "algorithm": "adamw", **others})
        self._model, self._split_fused = model, split_fused
        super().__init__(groups, defaults)
        check_optimizer(model, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[bad-override]
        """Step all parameters with a gradient. Collective over the ranks that shard a weight.

        Returns the result of ``closure``, which is rejected if ``AdamW.step(closure)`` is.

        Raises:
            OrderError: This is a copy of a different Muon, without a model.
        """
        if self._model is None:
            raise OrderError(
                "Muon.step of a copied or unpickled optimizer",
                expected="te_fsdp.Muon(model, ...)",
                got="an optimizer without a model",
                why="The matrices in its parameters are determined by the model",
                fix="build a new one, and load its state with load_state_dict or te_fsdp.checkpoint.load",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                parameters = [p for p in group["params"] if p.grad is not None]
                states = [self.state[p] for p in parameters]
                for state, parameter in zip(states, parameters, strict=True):
                    if "step" not in state:
                        # On the CPU, as in torch's AdamW, which reads the number without waiting for the device.
                        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if parameters:
                    adamw(
                        parameters,
                        [p.grad for p in parameters],  # type: ignore[bad-argument-type]
                        [state["exp_avg"] for state in states],
                        [state["exp_avg_sq"] for state in states],
                        [],
                        [state["step"] for state in states],
                        amsgrad=False,
                        beta1=group["betas"][0],
                        beta2=group["betas"][1],
                        lr=group["lr"],
                        weight_decay=group["weight_decay"],
                        eps=group["eps"],
                        maximize=False,
                    )
        self._muon(self._model)
        return loss

    def _muon(self, model: nn.Module) -> None:
        """Step as ``torch.optim.Muon``, with matrices distributed over ranks."""
        main_parameters = getattr(self, KEEPS_MAIN_WEIGHTS, None)
        pairs = [] if main_parameters is None else main_parameters.pairs
        originals: dict[int, torch.Tensor] = {id(pair.main): pair.parameter for pair in pairs}
        # Main weights are identified by their parameters, which are constant.
        trained = [
            (parameter, original, group)
            for group in self.param_groups
            for parameter in group["params"]
            if group["algorithm"] == "muon"
            and (original := originals.get(id(parameter), parameter)).requires_grad
        ]
        # Freezing, adding groups or loading may change the set of parameters and their shards, which needs a new plan.
        key = tuple((id(original), tuple(_torch.local_of(sharded).shape)) for sharded, original, _ in trained)
        plan = self._plan
        if plan is None or plan.key != key:
            made = _make_exchange_plan(model, [row[:2] for row in trained], self._split_fused)
            plan = self._plan = _ExchangePlan(key, *made)
        updates: dict[int, torch.Tensor] = {}
        for index, (parameter, _, group) in enumerate(trained):
            if parameter.grad is not None:
                updates[index] = self._update(parameter, parameter.grad, group)
        newton_schulz, adjusted = _torch.muon_arithmetic()

        def orthogonalized(weight: _MuonWeight, full: torch.Tensor) -> torch.Tensor:
            group = trained[weight.index][2]
            options = group["ns_coefficients"], group["ns_steps"], group["eps"]
            return weight.joined([newton_schulz(matrix, *options) for matrix in weight.matrices(full)])

        with torch.profiler.record_function("te_fsdp::muon"):
            for ranks, weights in plan.exchanges:
                updates |= _exchange(ranks, weights, updates, orthogonalized)
        for index, flat in updates.items():
            parameter, _, group = trained[index]
            local, rate, weight = _torch.local_of(parameter), float(group["lr"]), plan.weights[index]
            update = flat.view(local.shape)
            local.mul_(1 - rate * group["weight_decay"])
            # The adjusted rate depends on the shape of a matrix, so parts of a fused weight may differ.
            rates = [adjusted(rate, group["adjust_lr_fn"], torch.Size(shape)) for shape in weight.shapes]
            if len(set(rates)) == 1:
                local.add_(update, alpha=-rates[0])
                continue
            for rows, rate_of_part in zip(weight.rows(), rates, strict=True):
                rows = rows.to(local.device)
                local[rows] = local[rows].add(update[rows], alpha=-rate_of_part)

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return this rank's part of the tensor to orthogonalize: 1-D, bf16, in its own memory."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        gradient, buffer = _torch.local_of(grad), _torch.local_of(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        # Always copy: torch before 2.15 overwrites a bf16 tensor, here the momentum.
        return update.to(torch.bfloat16, copy=True).flatten()


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups of parameters for any input that torch's optimizers accept."""
    require_kind("Muon", "params", params, Iterable, expected="parameters, or groups of them")
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    # With or without names, as from named_parameters().
    return [{**g, "params": [p[1] if isinstance(p, tuple) else p for p in g["params"]]} for g in groups]


@dataclass
class _MuonWeight:
    index: int  #: Index among all weights that Muon updates
    label: str  #: FQN
    shape: tuple[int, ...]  #: Original shape
    fused: _Fused  #: Its fused matrices
    boxes: tuple[Box, ...]  #: Boxes of the original that form this rank's local tensor
    boxes_of: Sequence[tuple[Box, ...]] = ()  #: Boxes of each rank that shards it
    owner: int = 0  #: Index of the owner among these ranks

    @property
    def heights(self) -> list[int]:
        """Return the number of rows per group of each matrix."""
        turns, parts = self.fused
        return [self.shape[0] // (turns * sum(parts)) * part for part in parts]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(self.fused[0] * height, self.shape[1]) for height in self.heights]

    def matrices(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Split an unsharded weight into its matrices."""
        turns, columns = self.fused[0], self.shape[1]
        parts = full.view(turns, -1, columns).split(self.heights, 1)
        return [part.reshape(-1, columns) for part in parts]

    def joined(self, matrices: list[torch.Tensor]) -> torch.Tensor:
        """Merge matrices into a weight (inverse of :meth:`matrices`)."""
        if len(matrices) == 1:
            return matrices[0]
        turns, columns = self.fused[0], self.shape[1]
        return torch.cat([m.reshape(turns, -1, columns) for m in matrices], 1).view(-1, columns)

    def rows(self) -> list[torch.Tensor]:
        """Return the rows of the local tensor that belong to each matrix."""
        owners = torch.arange(len(self.heights)).repeat_interleave(torch.tensor(self.heights))
        owners = owners.repeat(self.fused[0])
        local_rows = max((box.local[0] + box.sizes[0] for box in self.boxes), default=0)
        local = torch.empty(local_rows, dtype=torch.long)
        for box in self.boxes:
            local[box.local_slices()[0]] = owners[box.original_slices()[0]]
        return [(local == index).nonzero().flatten() for index in range(len(self.heights))]


#: (group of the ranks that shard some weights, or ``None`` if this rank has them unsharded; the weights)
_Exchange = tuple["dist.ProcessGroup | None", list[_MuonWeight]]


class _ExchangePlan(NamedTuple):
    """Owners of all matrices, for the parameters identified by ``key`` and in their order."""

    key: tuple[Any, ...]
    weights: list[_MuonWeight]
    exchanges: list[_Exchange]


def fused_matrices(root: nn.Module) -> dict[tuple[int, str], _Fused]:
    """Return the TE weights that consist of several matrices: fused QKV or KV, gated fc1. Local operation.

    Maps (``id`` of a module, name of a weight) to the number of interleaved groups along the rows and the relative
    heights of the matrices in a group. ``(1, (1, 1))`` is gate above up. ``(2, (4, 1, 1))`` is an interleaved QKV of
    two groups with four query heads each.
    """
    matrices = {}
    modules: list[Any] = list(root.modules())
    for module in modules:
        kind = _te.kind_of(module)
        fused = fused_projection(module) if kind == "MultiheadAttention" else None
        if fused is not None:
            (projection, blocks), groups = fused, 1
            if module.qkv_weight_interleaved:
                # Interleaved weights repeat the blocks of query, key and value for each group of heads.
                groups = int(module.num_gqa_groups)
                blocks = (blocks[0] // groups, 1, 1) if len(blocks) == 3 else blocks
            matrices[id(projection), projection.weight_names[0]] = groups, blocks
        # A gated activation has two matrices in one weight, which Muon must orthogonalize separately.
        if kind == "LayerNormMLP" and module.activation in GATED_ACTIVATIONS:
            matrices[id(module), "fc1_weight"] = 1, (1, 1)
    return matrices


def _make_exchange_plan(
    model: nn.Module, pairs: list[tuple[torch.Tensor, torch.Tensor]], split_fused: bool
) -> tuple[list[_MuonWeight], list[_Exchange]]:
    """Return the weights of parameters, and the exchanges between ranks. Collective over the ranks that shard them."""
    fused = fused_matrices(model) if split_fused else {}
    owners = {id(shard_of(owner.parameter)): owner for owner in first_owners(model).values()}
    muon_weights: list[_MuonWeight] = []
    exchanges: dict[tuple[int, ...], _Exchange] = {}
    for parameter, original in pairs:
        owner = owners.get(id(original))
        if owner is None:
            raise OrderError(
                f"Muon.step: a parameter of shape {tuple(original.shape)}",
                expected="parameters of the model that Muon was built with",
                fix="build Muon after te_fsdp.fully_shard and te_fsdp.materialize",
            )
        info = shard_info(owner.module, owner.name, original, label=owner.label)
        cut = rows_of_state(parameter, original)
        # shard_optimizer may have sharded it further.
        boxes = info.boxes if cut is None else cut_boxes(info.boxes, *cut)
        matrices = fused.get((id(owner.module), owner.name), _WHOLE)
        weight = _MuonWeight(len(muon_weights), owner.label, info.original_shape, matrices, boxes)
        muon_weights.append(weight)
        group = _group_of(parameter, owner)
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        # One exchange for all weights over the same ranks.
        exchanges.setdefault(ranks, (group, []))[1].append(weight)
    for group, weights in exchanges.values():
        if group is not None:
            layouts = gather([(weight.label, weight.shape, weight.boxes) for weight in weights], group)
            if any([row[:2] for row in other] != [(w.label, w.shape) for w in weights] for other in layouts):
                raise MeshError(
                    "Muon.step: ranks that shard the same weights",
                    expected="the same parameters in the same order on all ranks",
                    got=f"{[len(other) for other in layouts]} matrices, here "
                    f"{', '.join(w.label for w in weights[:3])}, ...",
                    fix="build Muon from the same params on all ranks",
                )
            for weight, ranks in zip(weights, zip(*layouts, strict=True), strict=True):
                weight.boxes_of = [boxes for _, _, boxes in ranks]
            # Balance the load: assign large matrices first, each to the rank with the smallest load.
            loads = [0] * len(layouts)
            costs = {weight.index: math.prod(weight.shape) * min(weight.shape) for weight in weights}
            for weight in sorted(weights, key=lambda w: -costs[w.index]):
                weight.owner = min(range(len(layouts)), key=loads.__getitem__)
                loads[weight.owner] += costs[weight.index]
    return muon_weights, list(exchanges.values())


def _group_of(parameter: torch.Tensor, owner: ParamOwner) -> dist.ProcessGroup | None:
    """Return the group of ranks that shard one replica of a weight; ``None`` if this rank has it unsharded.

    Collective over the world if the group must be created (state sharded over replicas).
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    axes = [i for i, p in enumerate(parameter.placements) if not p.is_replicate() and mesh.size(i) > 1]
    if not axes:
        return None
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    assert mesh.mesh_dim_names is not None
    names = tuple(mesh.mesh_dim_names[axis] for axis in axes)
    cutting, binding = mesh[names], binding_of(owner.module)
    weight_mesh = None if binding is None else binding.weight_mesh
    # The weight mesh may have the same ranks, so that no further process group is created.
    ranks = set(cutting.mesh.flatten().tolist())
    if weight_mesh is not None and set(weight_mesh.mesh.flatten().tolist()) == ranks:
        return weight_mesh.get_group()
    return _torch.flatten_mesh(cutting, f"muon_{'_'.join(names)}").get_group()


# [Note: same bits as one process] Operations, order and shapes are those of a single process, so equal
# gradients give bitwise equal results. If a matrix is not sharded (one process, ``no_shard``), each rank
# computes it itself without communication. Replicas (``dp_replicate``, or ``tp`` for a weight that tp does
# not shard) each compute their own.
def _exchange(
    group: dist.ProcessGroup | None,
    weights: list[_MuonWeight],
    updates: Mapping[int, torch.Tensor],
    orthogonalized: Callable[[_MuonWeight, torch.Tensor], torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Orthogonalize the updates, indexed by ``_MuonWeight.index``: this rank's parts, 1-D, bf16. Frees their memory.

    Missing weights have no gradient on any rank. Collective over the ranks: two all-to-alls.
    """
    weights = [weight for weight in weights if weight.index in updates]
    if group is None or not weights:
        return {w.index: orthogonalized(w, updates[w.index].view(w.shape)).flatten() for w in weights}
    by_owner = [[w for w in weights if w.owner == rank] for rank in range(group.size())]
    mine, order = by_owner[group.rank()], list(chain(*by_owner))
    sent = torch.cat([updates[weight.index] for weight in order])
    outgoing = [sum(updates[weight.index].numel() for weight in owned) for owned in by_owner]
    sizes = [
        [sum(math.prod(box.sizes) for box in weight.boxes_of[rank]) for weight in mine]
        for rank in range(group.size())
    ]
    incoming = list(map(sum, sizes))
    received = sent.new_empty(sum(incoming))
    dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
    parts = [part.split(size) for part, size in zip(received.split(incoming), sizes, strict=True)]
    for weight, shards in zip(mine, zip(*parts, strict=True), strict=True):
        full = sent.new_empty(weight.shape)
        views = []
        for boxes, piece in zip(weight.boxes_of, shards, strict=True):
            # The boxes of a local tensor are contiguous, because stacked blocks are sharded along rows only.
            for box, values in zip(boxes, piece.split([math.prod(box.sizes) for box in boxes]), strict=True):
                views.append((box.original_slices(), values.view(box.sizes)))
        for where, values in views:
            full[where] = values
        result = orthogonalized(weight, full)
        for where, values in views:
            values.copy_(result[where])  # the memory of the received parts is sent back
    dist.all_to_all_single(sent, received, outgoing, incoming, group=group)
    back = sent.split([updates[weight.index].numel() for weight in order])
    return {weight.index: piece for weight, piece in zip(order, back, strict=True)}
