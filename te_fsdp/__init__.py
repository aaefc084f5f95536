"""te_fsdp: train stock TransformerEngine models with PyTorch's FSDP2, DTensor and distributed checkpoints.

Importing this package runs nothing: no TE, no CUDA, no patching. Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from te_fsdp import checkpoint as checkpoint
    from te_fsdp import planning as planning
    from te_fsdp.all_ranks import set_collective_timeout as set_collective_timeout
    from te_fsdp.errors import CheckpointError as CheckpointError
    from te_fsdp.errors import CollectiveError as CollectiveError
    from te_fsdp.errors import GradientError as GradientError
    from te_fsdp.errors import InitError as InitError
    from te_fsdp.errors import InputError as InputError
    from te_fsdp.errors import MeshError as MeshError
    from te_fsdp.errors import OrderError as OrderError
    from te_fsdp.errors import PlacementError as PlacementError
    from te_fsdp.errors import PrecisionError as PrecisionError
    from te_fsdp.errors import TeFsdpError as TeFsdpError
    from te_fsdp.mesh import Meshes as Meshes
    from te_fsdp.modules.apply import set_device_mesh as set_device_mesh
    from te_fsdp.modules.classes import DotProductAttention as DotProductAttention
    from te_fsdp.modules.classes import GroupedLinear as GroupedLinear
    from te_fsdp.modules.classes import LayerNorm as LayerNorm
    from te_fsdp.modules.classes import LayerNormLinear as LayerNormLinear
    from te_fsdp.modules.classes import LayerNormMLP as LayerNormMLP
    from te_fsdp.modules.classes import Linear as Linear
    from te_fsdp.modules.classes import MultiheadAttention as MultiheadAttention
    from te_fsdp.modules.classes import RMSNorm as RMSNorm
    from te_fsdp.modules.classes import TransformerLayer as TransformerLayer
    from te_fsdp.modules.context_parallel import context_parallel_shard as context_parallel_shard
    from te_fsdp.modules.context_parallel import set_context_parallel as set_context_parallel
    from te_fsdp.move.start import grad_comm as grad_comm
    from te_fsdp.sharding.forward import register_forward_method as register_forward_method
    from te_fsdp.sharding.fully_shard import fully_shard as fully_shard
    from te_fsdp.sharding.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from te_fsdp.sharding.grad_norm import report_nan as report_nan
    from te_fsdp.sharding.graphed import graphed_step as graphed_step
    from te_fsdp.sharding.main_weights import check_optimizer as check_optimizer
    from te_fsdp.sharding.main_weights import main_weights as main_weights
    from te_fsdp.sharding.main_weights import shard_optimizer as shard_optimizer
    from te_fsdp.sharding.materialize import broadcast_params as broadcast_params
    from te_fsdp.sharding.materialize import materialize as materialize
    from te_fsdp.sharding.muon import Muon as Muon
    from te_fsdp.sharding.no_shard import fsdp_no_shard as fsdp_no_shard
    from te_fsdp.sharding.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from te_fsdp.sharding.reductions import finish_grad_reduce as finish_grad_reduce
    from te_fsdp.sharding.reductions import finish_param_gather as finish_param_gather
    from te_fsdp.sharding.reductions import microbatch as microbatch
    from te_fsdp.sharding.reductions import no_sync as no_sync
    from te_fsdp.sharding.reductions import release_params as release_params
    from te_fsdp.sharding.reductions import scale_gradients as scale_gradients
    from te_fsdp.sharding.reductions import set_auto_sync as set_auto_sync
    from te_fsdp.sharding.reductions import start_grad_reduce as start_grad_reduce
    from te_fsdp.sharding.reductions import start_param_gather as start_param_gather
    from te_fsdp.sharding.reductions import sync as sync
    from te_fsdp.sharding.reductions import zero_grad as zero_grad
    from te_fsdp.sharding.report import report as report

# Where each public name lives, by role.
_HOMES = {
    # meshes
    "Meshes": "te_fsdp.mesh",
    # sharding
    "set_device_mesh": "te_fsdp.modules.apply",
    "set_context_parallel": "te_fsdp.modules.context_parallel",
    "context_parallel_shard": "te_fsdp.modules.context_parallel",
    "fully_shard": "te_fsdp.sharding.fully_shard",
    "fsdp_no_shard": "te_fsdp.sharding.no_shard",
    "register_forward_method": "te_fsdp.sharding.forward",
    "materialize": "te_fsdp.sharding.materialize",
    "report": "te_fsdp.sharding.report",
    "clip_grad_norm_": "te_fsdp.sharding.grad_norm",
    "broadcast_params": "te_fsdp.sharding.materialize",
    "check_optimizer": "te_fsdp.sharding.main_weights",
    "set_collective_timeout": "te_fsdp.all_ranks",
    # training
    "graphed_step": "te_fsdp.sharding.graphed",
    "microbatch": "te_fsdp.sharding.reductions",
    "no_sync": "te_fsdp.sharding.reductions",
    "sync": "te_fsdp.sharding.reductions",
    "set_auto_sync": "te_fsdp.sharding.reductions",
    "start_grad_reduce": "te_fsdp.sharding.reductions",
    "finish_grad_reduce": "te_fsdp.sharding.reductions",
    "scale_gradients": "te_fsdp.sharding.reductions",
    "zero_grad": "te_fsdp.sharding.reductions",
    "start_param_gather": "te_fsdp.sharding.reductions",
    "finish_param_gather": "te_fsdp.sharding.reductions",
    "release_params": "te_fsdp.sharding.reductions",
    "MixedPrecisionPolicy": "te_fsdp.sharding.precision",
    "grad_comm": "te_fsdp.move.start",
    "report_nan": "te_fsdp.sharding.grad_norm",
    "main_weights": "te_fsdp.sharding.main_weights",
    "shard_optimizer": "te_fsdp.sharding.main_weights",
    "Muon": "te_fsdp.sharding.muon",
    # errors
    "TeFsdpError": "te_fsdp.errors",
    "MeshError": "te_fsdp.errors",
    "PlacementError": "te_fsdp.errors",
    "OrderError": "te_fsdp.errors",
    "InitError": "te_fsdp.errors",
    "InputError": "te_fsdp.errors",
    "CheckpointError": "te_fsdp.errors",
    "CollectiveError": "te_fsdp.errors",
    "PrecisionError": "te_fsdp.errors",
    "GradientError": "te_fsdp.errors",
}
_MODULES = (
    "Linear",
    "LayerNormLinear",
    "LayerNormMLP",
    "GroupedLinear",
    "LayerNorm",
    "RMSNorm",
    "DotProductAttention",
    "MultiheadAttention",
    "TransformerLayer",
)
_SUBPACKAGES = ("checkpoint", "planning")

__all__ = ["__version__", *_HOMES, *_MODULES, *_SUBPACKAGES]


# Hidden from type checkers, which would take any name for a public one.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif name in _MODULES:
            value = importlib.import_module("te_fsdp.modules.apply").mesh_class(name)
        elif name in _SUBPACKAGES:
            return importlib.import_module(f"te_fsdp.{name}")
        else:
            raise AttributeError(f"module 'te_fsdp' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
