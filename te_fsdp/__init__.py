"""te_fsdp: train stock TransformerEngine models with PyTorch's FSDP2.

Importing this package runs nothing: no TE, no CUDA, no patching. Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_fsdp.version import VERSION as __version__

if TYPE_CHECKING:
    from te_fsdp import checkpoint as checkpoint, planning as planning
    from te_fsdp.bind_device_mesh import set_device_mesh as set_device_mesh
    from te_fsdp.collectives.rendezvous import set_collective_timeout as set_collective_timeout
    from te_fsdp.errors import (
        CheckpointError as CheckpointError,
        CollectiveError as CollectiveError,
        GradientError as GradientError,
        InitError as InitError,
        InputError as InputError,
        MeshError as MeshError,
        OrderError as OrderError,
        PlacementError as PlacementError,
        PrecisionError as PrecisionError,
        TeFsdpError as TeFsdpError,
    )
    from te_fsdp.features.broadcast_params import broadcast_params as broadcast_params
    from te_fsdp.features.clip_grad_norm import (
        clip_grad_norm_ as clip_grad_norm_,
        scale_gradients as scale_gradients,
    )
    from te_fsdp.features.expert_dispatch import ExpertDispatcher as ExpertDispatcher
    from te_fsdp.features.forward_methods import register_forward_method as register_forward_method
    from te_fsdp.features.gradient_dtypes import grad_comm as grad_comm
    from te_fsdp.features.graphed_step import graphed_step as graphed_step
    from te_fsdp.features.graphed_units import graphed_units as graphed_units
    from te_fsdp.features.main_weights import (
        check_optimizer as check_optimizer,
        main_weights as main_weights,
        shard_optimizer as shard_optimizer,
    )
    from te_fsdp.features.muon import Muon as Muon
    from te_fsdp.features.nan_report import report_nan as report_nan
    from te_fsdp.features.param_gather import (
        finish_param_gather as finish_param_gather,
        release_params as release_params,
        start_param_gather as start_param_gather,
    )
    from te_fsdp.features.reporting import report as report
    from te_fsdp.gradient_sync import (
        finish_grad_reduce as finish_grad_reduce,
        microbatch as microbatch,
        no_sync as no_sync,
        set_auto_sync as set_auto_sync,
        start_grad_reduce as start_grad_reduce,
        sync as sync,
        zero_grad as zero_grad,
    )
    from te_fsdp.materialization import materialize as materialize
    from te_fsdp.mesh import Meshes as Meshes
    from te_fsdp.modules.classes import (
        DotProductAttention as DotProductAttention,
        GroupedLinear as GroupedLinear,
        LayerNorm as LayerNorm,
        LayerNormLinear as LayerNormLinear,
        LayerNormMLP as LayerNormMLP,
        Linear as Linear,
        MultiheadAttention as MultiheadAttention,
        RMSNorm as RMSNorm,
        TransformerLayer as TransformerLayer,
    )
    from te_fsdp.modules.context_parallel import (
        context_parallel_shard as context_parallel_shard,
        set_context_parallel as set_context_parallel,
    )
    from te_fsdp.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from te_fsdp.replicated_params import fsdp_no_shard as fsdp_no_shard
    from te_fsdp.shard_model import fully_shard as fully_shard

#: Module of each public name, by role.
_HOMES = {
    name: f"te_fsdp.{module}"
    for module, names in {
        "mesh": "Meshes",
        # sharding
        "bind_device_mesh": "set_device_mesh",
        "modules.context_parallel": "set_context_parallel context_parallel_shard",
        "shard_model": "fully_shard",
        "replicated_params": "fsdp_no_shard",
        "features.forward_methods": "register_forward_method",
        "materialization": "materialize",
        "features.reporting": "report",
        "features.broadcast_params": "broadcast_params",
        "collectives.rendezvous": "set_collective_timeout",
        # training
        "features.graphed_step": "graphed_step",
        "features.expert_dispatch": "ExpertDispatcher",
        "features.graphed_units": "graphed_units",
        "gradient_sync": "microbatch no_sync sync set_auto_sync zero_grad start_grad_reduce finish_grad_reduce",
        "features.clip_grad_norm": "clip_grad_norm_ scale_gradients",
        "features.param_gather": "start_param_gather finish_param_gather release_params",
        "precision": "MixedPrecisionPolicy",
        "features.gradient_dtypes": "grad_comm",
        "features.nan_report": "report_nan",
        "features.main_weights": "main_weights shard_optimizer check_optimizer",
        "features.muon": "Muon",
        "errors": "TeFsdpError MeshError PlacementError OrderError InitError InputError "
        "CheckpointError CollectiveError PrecisionError GradientError",
    }.items()
    for name in names.split(" ")
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
            value = importlib.import_module("te_fsdp.bind_device_mesh").mesh_class(name)
        elif name in _SUBPACKAGES:
            return importlib.import_module(f"te_fsdp.{name}")
        else:
            raise AttributeError(f"module 'te_fsdp' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
