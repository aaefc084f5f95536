"""Tables of the patches of other libraries."""

# :mod:`te_fsdp.upstream.fsdp2_patches` and the files next to it apply the patches of FSDP2 and torch.
#
# [Note: patched classes] Patched classes belong to the whole process. Each replacement checks its object for
# a te_fsdp attribute (a module's binding, the group name of a quantizer) and otherwise runs TE's code. Models
# without te_fsdp are therefore not affected. Nothing is patched before :func:`apply_patch` is called.
# tests/unit/patches.csv names the test that shows whether a patch is still needed.

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, cast

import torch

from te_fsdp.upstream import te as _te
from te_fsdp.upstream.te_formats import FORMATS


@dataclass(frozen=True)
class Patch:
    """An attribute of another library's class or object that te_fsdp replaces."""

    owner: str  #: Object or class with the attribute
    attribute: str  #: Name of the attribute
    why: str  #: Purpose of the replacement
    versions: str = "all"  #: Supported versions that need it


#: Owner -> attribute, reason, and the versions that need it, if not all do.
_FSDP2: dict[str, tuple[tuple[str, ...], ...]] = {
    "`FSDPParamGroup`": (
        (
            "post_backward",
            "runs te_fsdp's code around a reduction; all gradients as one; those of unused parameters; one dtype",
        ),
        ("pre_backward", "refuses `create_graph=True` before weights are gathered"),
        ("_init_mp_dtypes", "sharded gradients may have their own dtype", "torch 2.11 to 2.14"),
        ("finalize_backward", "no gradient for parameters that no rank used; waits for an unused all-gather"),
        ("_to_unsharded, _to_sharded", "one loop per unit while parameters are unchanged"),
        ("_register_post_backward_hook", "one loop over flat arguments"),
        ("unshard, wait_for_unshard", "all-gathers with the sizes and views of the previous one"),
        ("mesh_info", "te_fsdp's process group for the all-reduce of HSDP"),
        (
            "pre_backward",
            "removes the markers from `.grad` of unsharded parameters that detect cleared gradients",
        ),
    ),
    "DTensor's dispatcher": (
        (
            "_custom_op_handlers, redistribute_local_args",
            "`GradScaler` and torch's clipping over gradients on several meshes; rows of stacked weights",
        ),
    ),
    "module `_ops._tensor_ops`, rule of `aten.t`": (
        (
            "shift_shard_dims_after_insert, shift_shard_dims_after_remove",
            "moves the dim of `_StridedShard`",
            "torch 2.11",
        ),
    ),
    "module `tensor._redistribute`": (
        ("_optimize_transform_infos", "all-gathers shards of different sizes over one axis at a time"),
    ),
    "module `torch.autograd`": (("backward", "`inputs=` of sharded parameters reach the unsharded ones"),),
    "`DTensor`, `torch.utils`": (
        (
            "data.fget, data.fset, detach, to_local, __setitem__, swap_tensors",
            "counts or refuses writes through `.data`, local tensors and rows of te_fsdp's parameters",
        ),
    ),
    "`DTensor`": (
        (
            "full_tensor, __create_write_items__",
            "refuse rows in the order of the ranks, which `torch.load` has read",
        ),
    ),
    "`DeviceMesh`": (("_concatenate", "names the mesh that torch's `fully_shard` needs"),),
    "units of torch's `fully_shard` after `set_device_mesh`": (
        (
            "unshard of `FSDPParamGroup`, _post_forward of `FSDPState`",
            "restores unsharded weights after an evaluation, which shows the shards",
        ),
    ),
    "model, unit": (
        (
            "__deepcopy__, __reduce_ex__, _backward_hooks",
            "refuses copies, pickles and `make_graphed_callables`",
        ),
    ),
    "unit": (("_get_fsdp_state", "returns the state without a search"),),
    "`FSDPParam`": (
        ("to_sharded_dtensor", "specs of these gradients have their dtype", "torch 2.11 to 2.14"),
        ("reset_sharded_param", "no flat, dequantized copy of a quantized shard"),
        ("unsharded_zero_grad_data", "zeros without reading released memory", "torch 2.13 and later"),
        ("shard_mesh", "cached", "torch 2.11 and 2.12"),
        ("init_all_gather_outputs, free_unsharded_param", "no copy over a shard axis of size 1"),
        (
            "init_unsharded_param, to_sharded_dtensor, unsharded_grad_data",
            "one call if nothing is cast, moved, padded or accumulated",
        ),
    ),
    "`FSDPParamGroup`, `FSDPParam`": (
        (
            "unshard, wait_for_unshard, _to_sharded, free_unsharded_param",
            "gathers by copy engines; no release of memory that other ranks read",
        ),
    ),
    "`FSDPState`, `FSDPParamGroup`": (
        (
            "_pre_forward, _post_forward, _pre_backward, pre_forward, post_forward, pre_backward, post_backward",
            "the caller's lists and dicts as arguments; shorter profiler ranges, `_dynamo.disable` and "
            "`_spmd_no_typecheck` (torch 2.14)",
        ),
    ),
    "modules of `torch.distributed.tensor`, `_state_dict_utils`": (
        (
            "redistribute_local_tensor, mesh_scatter, mesh_broadcast, pad_tensor, _broadcast_tensors",
            "communicate dtypes that Gloo and NCCL lack (int16) by their bits",
        ),
    ),
    "unit that stays gathered": (("unshard", "restores gathered weights after an evaluation"),),
    "modules `_state_dict_utils`, `checkpoint.state_dict`": (
        (
            "_distribute_tensors, _distribute_state_dict",
            "rows of stacked tensors with `full_state_dict=True`",
        ),
    ),
    "`HuggingFaceStorageWriter`": (
        ("_split_by_storage_plan", "writes all rectangles of stacked tensors"),
        ("write_data", "writes values of quantized weights"),
    ),
    "modules `checkpoint.state_dict_loader`, `checkpoint.filesystem`, `checkpoint.default_planner`": (
        ("_load_state_dict, narrow_tensor_by_index", "quantizes weights read from a different mesh"),
        ("create_default_local_load_plan", "refuses main weights in another form, and missing shards"),
    ),
    "module `checkpoint.state_dict`": (
        (
            "_init_optim_state, _verify_options, _verify_state_dict",
            "initializes states with gradients in the parameters' dtypes; reshards units; raises on all ranks if some "
            "load no states",
        ),
        (
            "_get_optim_state_dict, _load_model_state_dict",
            "marks optimizer states of experts, and loads experts in either form",
        ),
        (
            "_get_model_state_dict, _get_optim_state_dict, _load_optim_state_dict",
            "exchanges the experts of an expert-parallel mesh, and unpads HFSDP's states, for `full_state_dict=True`",
        ),
    ),
    "`DefaultLoadPlanner`": (("create_local_plan", "reads experts from either form"),),
    "`BasePruningMethod`, `_Orthogonal`, `_SpectralNorm` of `torch.nn.utils`": (
        ("apply, __init__", "names a sharded parameter that torch would compute from others"),
    ),
    "optimizers of `torch.optim`": (
        ("__setstate__", "names a sharded parameter whose loaded states are those of a different class"),
        ("load_state_dict", "rows of stacked states that `distribute_tensor` or `torch.load` has made"),
    ),
    "model": (
        ("_apply", "copies attributes of parameters to their replacements"),
        ("zero_grad", "also recovers from an exception in backward, and clears HFSDP's averaged gradients"),
    ),
    "pipeline stage": (
        ("set_requires_gradient_sync", "microbatches of `no_shard` parameters"),
        ("finalize_backward", "the same, from torch 2.15 on"),
    ),
    "`FSDPState`": (
        ("_root_post_backward_final_callback", "reduces `no_shard` parameters after the last microbatch"),
    ),
    "module `_fsdp_param`, during `te_fsdp.fully_shard`": (
        ("_chunk_with_empty", "makes only the pieces that FSDP2 reads"),
    ),
}
FSDP2 = tuple(Patch(owner, *row) for owner, rows in _FSDP2.items() for row in rows)


# ---------------------------------------------------------------------------------------------------- TransformerEngine


#: Owner -> patch name -> attribute, reason, and the versions that need it, if not all do.
_TE: dict[str, dict[str, tuple[str, ...]]] = {
    "tensors with all-gather hooks": {
        "gather": ("fsdp_pre_all_gather", "reduces the amax over `tp` too; buffers that FSDP2 can gather"),
        "gathered": ("fsdp_post_all_gather", "fills the tensor that kernels read; no scrambled transpose"),
    },
    "modules `linear`, `layernorm_linear`, `layernorm_mlp`": {
        "columnwise": (
            "clear_columnwise_cache",
            "keeps columnwise data that TE cannot recompute",
            "those that have it",
        )
    },
    "quantizers": {"copy": ("copy", "copies the name of the amax group")},
    "quantizers of current scaling and NVFP4": {
        "deepcopy": ("__deepcopy__", "the same, without the process group")
    },
    "tensors of current scaling and NVFP4, and their storages": {
        "group": ("amax_reduction_group", "returns the group of that name")
    },
    "quantized tensors": {
        "clone": ("clone", "copies the scales"),
        "count": ("quantize_", "counts writes that `_version` does not count"),
    },
    "`MXFP8Tensor`, `NVFP4Tensor`, `Float8BlockwiseQTensor`": {
        "copy blocks": (
            "__torch_dispatch__",
            "`copy_` quantizes between different blocks, and accepts itself",
        )
    },
    "`Float8Quantizer`": {
        "delayed": ("update_quantized", "reduces the newest amax at once, over the weight mesh")
    },
    "`Float8CurrentScalingQuantizer`": {
        "quantize empty": ("quantize_impl", "empty shards take part in the amax reduction"),
        "update empty": ("update_quantized", "the same for writes"),
    },
    "MXFP8 weight on the device": {"new zeros": ("new_zeros", "padded scales, for FSDP2's copy of a shard")},
    "`DType`": {
        "element type": (
            "__reduce_ex__",
            "pickles members by value: `torch.load` refuses pickles through `getattr`",
            "Python 3.11.0 to 3.11.4",
        )
    },
    "`FusedAdam`": {
        "states": (
            "_initialize_state",
            "optimizer states have the class of their parameters, which DCP needs",
        ),
        "states of dicts": (
            "state_dict",
            "the same in state dicts, and current main weights of FP32 weights",
        ),
        "loads of dicts": ("load_state_dict", "changes a copy of the state dict, not the caller's"),
    },
    "`FusedAdam` with te_fsdp's main weights": {
        "save": ("state_dict", "keeps main weights in the groups until the call ends"),
        "load": ("load_state_dict", "the same"),
    },
}
#: Patch name -> row.
PATCHES = {name: Patch(owner, *row) for owner, rows in _TE.items() for name, row in rows.items()}


def _tensors() -> list[type[torch.Tensor]]:
    """Return the quantized tensor classes of this TE version."""
    module = importlib.import_module("transformer_engine.pytorch.tensor")
    classes = [getattr(module, row.tensor, None) for row in FORMATS.values()]
    return [cls for cls in classes if cls is not None]


def gathering_tensors() -> list[type[torch.Tensor]]:
    """Return the quantized tensor classes with FSDP2's all-gather hooks in this TE version."""
    return [cls for cls in _tensors() if hasattr(cls, "fsdp_pre_all_gather")]


def _amax_tensors() -> list[type]:
    """Return the classes whose ``amax_reduction_group`` a quantizer reads when it writes to a tensor."""
    rows = [row for row in FORMATS.values() if "amax" in row.quantizers.values()]
    names = [(row.module, row.tensor) for row in rows]
    names += [(f"storage.{row.module}_storage", f"{row.tensor}Storage") for row in rows]
    return [_te.tensor_attribute(module, name) for module, name in names]


def _modules_with(name: str) -> list[ModuleType]:
    """Return TE's Python modules of linear layers that define or import ``name``."""
    files = ("linear", "layernorm_linear", "layernorm_mlp")
    modules = [importlib.import_module(f"transformer_engine.pytorch.module.{file}") for file in files]
    return [module for module in modules if hasattr(module, name)]


def _enums_pickled_by_name() -> list[type]:
    """Return TE's class of element types if this Python pickles its members by name, else nothing."""
    members = list(getattr(importlib.import_module("transformer_engine.pytorch.constants"), "DType", ()))
    return [type(members[0])] if members and members[0].__reduce_ex__(2)[0] is getattr else []


#: The classes, or modules, that a patch belongs to. Each imports TE when it is called.
_OWNERS: dict[str, Callable[[], Iterable[Any]]] = {
    "gather": gathering_tensors,
    "gathered": gathering_tensors,
    "columnwise": functools.partial(_modules_with, "clear_columnwise_cache"),
    "copy": functools.partial(_te.quantizer_classes, "amax", "history", "blocks", "parts"),
    "deepcopy": functools.partial(_te.quantizer_classes, "amax"),
    "group": _amax_tensors,
    "clone": lambda: [cls for cls in _tensors() if "clone" in cls.__dict__],
    "copy blocks": lambda: [c for c in _tensors() if c.__name__ != "Float8Tensor"],
    "count": _tensors,
    # Delayed quantizers refer to tensors of the module, which deepcopy would copy.
    "delayed": functools.partial(_te.quantizer_classes, "history"),
    # Shards of NVFP4 consist of complete blocks, so none is empty.
    "quantize empty": functools.partial(_te.quantizer_classes, "amax", blocks=False),
    "update empty": functools.partial(_te.quantizer_classes, "amax", blocks=False),
    "element type": _enums_pickled_by_name,
    "states": lambda: [_te.te().optimizers.FusedAdam],
    "states of dicts": lambda: [_te.te().optimizers.FusedAdam],
    "loads of dicts": lambda: [_te.te().optimizers.FusedAdam],
}


def wrapping(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what makes a replacement of a function with the keyword ``stock``, the replaced one. A decorator."""
    return functools.partial(_with_stock, cast("FunctionType", function))


def _with_stock(function: FunctionType, stock: Any) -> Any:
    # A copy with a default, because a call of a closure or of ``functools.partial`` would cost each call more.
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "stock": stock}
    if isinstance(stock, FunctionType):
        # FSDP2 inspects its hooks in every all-gather, and would parse the replaced function each time.
        copy.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    return functools.wraps(stock)(copy)


#: Rows of patches: what has the attribute, or ``None`` for a key of :data:`PATCHES`; attribute or key; what makes the
#: replacement of the present attribute.
Replacements: TypeAlias = tuple[tuple[Any, str, Callable[[Any], Any]], ...]
#: Let pickles of quantized tensors load with ``torch.load(weights_only=True)`` on each release of Python.
PICKLES: Replacements = (
    (None, "element type", lambda _: lambda member, protocol: (type(member), (int(member),))),
)
#: The classes and modules that :func:`replace_once` has changed in this process, and the attributes.
patched_attributes: set[tuple[Any, str]] = set()


def apply_patch(name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of each owner unless it has been replaced already.

    ``name`` is a key of :data:`PATCHES`. ``make`` maps the present attribute, or ``None``, to its replacement.
    """
    for owner in _OWNERS[name]():
        replace_once(owner, PATCHES[name].attribute, make)


def apply_patches(rows: Replacements) -> None:
    """Apply rows in their order, each once per process, if this version has the attribute. Local operation."""
    for owner, name, make in rows:
        if owner is None:
            apply_patch(name, make)
        elif hasattr(owner, name):
            replace_once(owner, name, make)


def replace_once(owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of a class or a module, as :func:`apply_patch` does."""
    if (owner, attribute) not in patched_attributes:
        setattr(owner, attribute, make(getattr(owner, attribute, None)))
        patched_attributes.add((owner, attribute))


def apply_patch_to(owner: Any, name: str, replacement: Any) -> None:
    """Replace the attribute of one object that a row of :data:`PATCHES` names."""
    setattr(owner, PATCHES[name].attribute, replacement)
