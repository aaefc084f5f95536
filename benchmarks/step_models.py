"""Models of benchmarks/step.py: the same decoder layers, with MLPs or experts, sharded by each library."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from step import REPLICAS, Variant
from step_experts import Layer
from torch import nn
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from transformer_engine.pytorch.optimizers import FusedAdam

import te_fsdp


class Model(nn.Module):
    """Decoder layers; with a vocabulary also an embedding, a norm and a head, as Llama has them, without rotation."""

    def __init__(
        self, options: argparse.Namespace, device: Any, ep: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        if options.experts:
            layers = (Layer(options, ep, device=device, **kwargs) for _ in range(options.layers))
        else:
            layers = (_dense_layer(options, device=device, **kwargs) for _ in range(options.layers))
        self.layers = nn.ModuleList(layers)
        dtype = {"device": device, "dtype": torch.bfloat16}
        self.embedding = self.norm = self.head = None
        if options.vocabulary:
            self.embedding = nn.Embedding(options.vocabulary, options.hidden, **dtype)
            self.norm = nn.RMSNorm(options.hidden, **dtype)
            self.head = nn.Linear(options.hidden, options.vocabulary, bias=False, **dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens (sequence x batch), or of activations (sequence x batch x hidden)."""
        tokens = x
        if self.embedding is not None:
            x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.norm is None or self.head is None:
            return x.float().square().mean()
        scores = self.head(self.norm(x))
        # torch's cross_entropy needs a copy of the scores in float32: 4 GiB of Llama-3-8B's.
        return parallel_cross_entropy(scores, tokens, reduce_loss=True, overwrite_input=True)

    def units(self) -> Iterator[nn.Module]:
        """Yield the FSDP2 units."""
        yield from self.layers
        if self.head is not None:
            yield self.head


def _dense_layer(options: argparse.Namespace, **kwargs: Any) -> nn.Module:
    common = {
        "num_gqa_groups": options.groups,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attn_input_format": "sbhd",
        "params_dtype": torch.bfloat16,
        "fuse_qkv_params": True,
    }
    return te.TransformerLayer(options.hidden, options.ffn, options.heads, **common, **kwargs)


@dataclass
class Trained:
    """A model, its optimizer, the context of a microbatch (is it the last one?), and the optimizer's name."""

    model: Any
    optimizer: torch.optim.Optimizer
    microbatch: Callable[[bool], Any]
    #: Whether gradients of the limit are dropped for parameters that other ranks would update.
    updated: set[nn.Parameter] | None = None
    graphed: Any = None  #: Recorded units (``te_fsdp.graphed_units``)


def _model(variant: Variant, options: argparse.Namespace, device: Any, **kwargs: Any) -> Any:
    """Build the model, with FP8 weights if the row has them."""
    keeps = {"preserve_high_precision_init_val": True} if kwargs.pop("keeps_values", False) else {}
    with te.quantized_model_init(enabled=variant.weights == "fp8", recipe=Float8CurrentScaling(), **keeps):
        return Model(options, device, **kwargs)


def build_te_fsdp(variant: Variant, options: argparse.Namespace, device: torch.device) -> Trained:
    """Build with te_fsdp."""
    asked = variant.asked
    outer = asked.outer
    sizes = {"dp_replicate": REPLICAS if outer else 1, "tp": asked.tp, "ep": asked.ep}
    meshes = te_fsdp.Meshes.build(**sizes, device_type=device.type)
    cut = _cut(meshes.te_kwargs()) if asked.tp > 1 else {}
    ep = meshes.ep.get_group() if meshes.ep is not None else None
    model = _model(variant, options, "meta", ep=ep, **cut)
    precision = te_fsdp.MixedPrecisionPolicy() if options.gradients == "fp32" else None
    units = [f"layers.{n}" for n in range(options.layers)] + (["head"] if options.vocabulary else [])
    if asked.ep > 1:  # as in the rows of FSDP2
        units += [f"layers.{n}.experts" for n in range(options.layers)]
    te_fsdp.fully_shard(
        model,
        meshes,
        units=units,
        strategy=asked.strategy,
        outer_strategy=outer or "no_shard",
        precision=precision,
        transport=asked.transport,
        zero_copy_gradients=asked.zero_copy,
    )
    te_fsdp.materialize(model, seed=0)
    graphed = te_fsdp.graphed_units(model) if variant.library == "te_fsdp units" else None
    recorded = variant.library == "te_fsdp graph"
    optimizer: torch.optim.Optimizer
    if recorded and variant.weights == "fp8":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    else:
        optimizer = FusedAdam(model.parameters(), lr=1e-4, master_weights=True, capturable=recorded)
    te_fsdp.main_weights(model, optimizer)
    if outer == "optim":
        te_fsdp.shard_optimizer(optimizer)
    if outer == "optim" and not asked.overlaps:
        return Trained(model, optimizer, lambda is_last: nullcontext(), graphed=graphed)

    def microbatch(is_last: bool) -> Any:
        if variant.library == "te_fsdp":  # as in the rows of FSDP2: reductions run on into the next forward
            model.set_is_last_backward(is_last)
        return te_fsdp.microbatch(model, is_last=is_last)

    return Trained(model, optimizer, microbatch, graphed=graphed)


def _cut(tp: dict[str, Any]) -> dict[str, Any]:
    """Return the tp options of TE's layers."""
    return {**tp, "set_parallel_mode": True, "sequence_parallel": True}


def _plain_mesh(variant: Variant, device: torch.device) -> Any:
    """Return the mesh of other libraries, with the axes "dp" and "tp"."""
    tp = variant.asked.tp
    return dist.init_device_mesh(device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def _with_tp(variant: Variant, mesh: Any) -> dict[str, Any]:
    """Return the options of TE's layers sharded over the mesh's tp."""
    tp = variant.asked.tp
    return _cut({"tp_group": mesh["tp"].get_group(), "tp_size": tp}) if tp > 1 else {}


def build_fsdp2(variant: Variant, options: argparse.Namespace, device: torch.device) -> Trained:
    """Build with torch: FSDP2 with the closest setting, DDP if nothing is sharded."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    strategy, outer, ep = variant.asked.strategy, variant.asked.outer, variant.asked.ep
    ranks, plain = dist.get_world_size(), _plain_mesh(variant, device)
    experts = dist.init_device_mesh(device.type, (ranks // ep, ep), mesh_dim_names=("shard", "ep"))
    group = experts["ep"].get_group() if ep > 1 else None
    model = _model(variant, options, device, ep=group, **_with_tp(variant, plain))
    if strategy == "no_shard":
        ddp = DistributedDataParallel(model)
        optimizer = FusedAdam(ddp.parameters(), lr=1e-4, master_weights=True)
        return Trained(ddp, optimizer, lambda is_last: nullcontext() if is_last else ddp.no_sync())
    mesh = plain["dp"]
    if outer is not None:
        shape, names = (REPLICAS, ranks // REPLICAS), ("replicate", "shard")
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if options.gradients == "fp32" else None)
    whole = strategy == "optim_grads_params"
    for layer in model.layers if ep > 1 else ():
        fully_shard(layer.experts, mesh=experts["shard"], mp_policy=policy, reshard_after_forward=whole)
    for unit in [*model.units(), model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=whole)

    def microbatch(is_last: bool) -> Any:
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        if not whole:
            model.set_reshard_after_backward(is_last)
        return nullcontext()

    return Trained(model, FusedAdam(model.parameters(), lr=1e-4, master_weights=True), microbatch)


def build_megatron(variant: Variant, options: argparse.Namespace, device: torch.device) -> Trained:
    """Build with megatron-fsdp, which keeps the main weights itself."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    asked, ranks = variant.asked, dist.get_world_size()
    outer, ep = asked.outer, asked.ep
    shape = (REPLICAS if outer else 1, ranks // (REPLICAS if outer else 1) // asked.tp, asked.tp)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("outer", "shard", "tp"))
    extra: dict[str, Any] = {}
    if outer:
        extra = {
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": mesh["outer", "shard"]._flatten("hybrid").get_group(),
            "outer_dp_sharding_strategy": outer,
        }
    experts = dist.init_device_mesh(
        device.type,
        (shape[0], ranks // shape[0] // ep, ep, 1),
        mesh_dim_names=("outer", "shard", "ep", "tp"),
    )
    group = experts["ep"].get_group() if ep > 1 else None
    keeps = variant.weights == "fp8"
    model = _model(variant, options, device, keeps_values=keeps, ep=group, **_with_tp(variant, mesh))
    if options.experts:
        # It finds experts by their names (".experts."), also without ep, and then reduces over this mesh.
        extra["expt_device_mesh"] = experts
        if outer:
            extra["hybrid_fsdp_expt_group"] = experts["outer", "shard"]._flatten("expert_hybrid").get_group()
        for parameter in (p for layer in model.layers for p in layer.experts.parameters()):
            parameter.allreduce = False
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=[Layer if options.experts else te.TransformerLayer],
        zero_dp_strategy=asked.strategy,
        mixed_precision_policy=MixedPrecisionPolicy(
            torch.float32, torch.float32 if options.gradients == "fp32" else None
        ),
        sync_model_each_microbatch=False,
        **extra,
    )

    def microbatch(is_last: bool) -> Any:
        model.set_model_auto_sync(is_last)
        return nullcontext()

    return Trained(model, optimizer, microbatch)


def build_limit(variant: Variant, options: argparse.Namespace, device: torch.device) -> Trained:
    """Build the limit: the same compute, and the update of one rank's share. Only tp and ep communicate."""
    asked, ranks = variant.asked, dist.get_world_size()
    shards = 1 if asked.strategy == "no_shard" else ranks // asked.tp
    if asked.outer == "no_shard":
        shards //= REPLICAS
    experts = dist.init_device_mesh(
        device.type, (ranks // asked.ep, asked.ep), mesh_dim_names=("shard", "ep")
    )
    group = experts["ep"].get_group() if asked.ep > 1 else None
    model = _model(variant, options, device, ep=group, **_with_tp(variant, _plain_mesh(variant, device)))
    every, chosen = list(model.parameters()), list[nn.Parameter]()
    owners = {
        name: shards // (asked.ep if ".experts." in name else 1) for name, _ in model.named_parameters()
    }
    share = sum(p.numel() / owners[name] for name, p in model.named_parameters())
    for parameter in every:
        if sum(p.numel() for p in chosen) < share:
            chosen.append(parameter)
    optimizer = FusedAdam(chosen, lr=1e-4, master_weights=True)
    return Trained(model, optimizer, lambda is_last: nullcontext(), set(chosen))


BUILDERS: dict[str, Callable[[Variant, argparse.Namespace, torch.device], Trained]] = {
    "te_fsdp": build_te_fsdp,
    "te_fsdp graph": build_te_fsdp,
    "te_fsdp units": build_te_fsdp,
    "FSDP2": build_fsdp2,
    "megatron-fsdp": build_megatron,
    "limit": build_limit,
}
