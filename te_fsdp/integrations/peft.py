"""LoRA of Hugging Face PEFT on TransformerEngine's layers.

    add_adapters(model, peft.LoraConfig(r=8, target_modules=["layernorm_qkv", "proj"]))    # before fully_shard
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    with base_of(model):                                               # names as without adapters
        te_fsdp.checkpoint.load("pretrained", model)
    ...                                                                # train
    te_fsdp.checkpoint.save("adapters", adapters_of(model), optimizer)
    merge(model)

Weights without adapters are frozen. They may be quantized. PEFT's own layer for TransformerEngine (0.21) does not
support tp or merging. It passes the input of the norm to the adapter of a ``LayerNormLinear``. It fails if a layer
returns its bias, as in ``te.TransformerLayer``. Layout here:

    layer           A, (r, in)                      B, (out, r)
    column          replicated over tp              rows sharded over tp: te.Linear
    row             columns sharded over tp:        replicated over tp
                    te.Linear
    no mode, tp=1   not sharded by tp               not sharded by tp
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from te_fsdp.errors import OrderError, PlacementError, require_kind, shorten
from te_fsdp.integrations import needs, raising_method
from te_fsdp.quantized.components import drop_derived_state
from te_fsdp.quantized.shards import quantize_with_shared_scale
from te_fsdp.records import binding_of
from te_fsdp.shard_info import shard_info
from te_fsdp.sharded_model import require_sharded_model
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

with needs("peft"):
    import peft
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_target_module_exists

__all__ = ["adapters_of", "add_adapters", "base_of", "merge"]

_LoraLayer: Any = LoraLayer
#: Options of ``LoraConfig`` that need more than two matrices next to a frozen layer -> value without effect.
_PLAIN = {
    "bias": "none",
    "init_lora_weights": True,
    "lora_bias": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
}


def add_adapters(model: nn.Module, config: Any, *, adapter_name: str = "default") -> nn.Module:
    """Add LoRA adapters to a model's layers in place, freeze all other parameters and return the model.

    Local operation. It corresponds to ``peft.inject_adapter_in_model`` for ``te.Linear``, ``te.LayerNormLinear`` and
    ``nn.Linear``. Adapters are fp32 and are not quantized. Meta adapters are initialized by
    :func:`te_fsdp.materialize`: A as in ``nn.Linear``, B with zeros.

    Raises:
        OrderError: The model is bound to meshes or already sharded.
        PlacementError: A layer or an option is not supported. Nothing was changed.
    """
    fix = "peft.LoraConfig(r=8, target_modules=[...])"
    require_kind("add_adapters", "config", config, peft.LoraConfig, expected="a peft.LoraConfig", fix=fix)
    chosen = {n: module for n, module in model.named_modules() if check_target_module_exists(config, n)}
    # Before PEFT, which replaces the layers one by one and cannot undo it.
    _check(model, chosen, config)
    kinds = (_te.module_class("Linear"), _te.module_class("LayerNormLinear"), nn.Linear)
    # PEFT's guide for custom models refers to this method.
    config._register_custom_module(dict.fromkeys(kinds, LoraLinear))  # noqa: SLF001
    return peft.inject_adapter_in_model(config, model, adapter_name)


def _check(model: nn.Module, chosen: dict[str, nn.Module], config: Any) -> None:
    """Check the model and the configuration of :func:`add_adapters`; raise if they are not supported."""
    bound = [name for name, module in model.named_modules() if binding_of(module) is not None]
    if bound or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise OrderError(
            "add_adapters after fully_shard or set_device_mesh",
            why="Adapters are sharded with their layers",
            fix="add them right after building the model",
        )
    values = {name: getattr(config, name, plain) for name, plain in _PLAIN.items()}
    refused = [f"{n}={value!r}" for n, value in values.items() if (value or _PLAIN[n]) != _PLAIN[n]]
    tp_layers = [name for name, module in chosen.items() if getattr(module, "tp_size", 1) > 1]
    refused += [f"lora_dropout={config.lora_dropout} with tp"] if tp_layers and config.lora_dropout else []
    if refused or type(config) is not peft.LoraConfig:
        raise PlacementError(
            f"add_adapters: {', '.join(refused) or type(config).__name__}",
            expected="a LoraConfig with two matrices per frozen layer",
            why="Ranks of tp would draw different dropout masks, or parts of the base would be trained",
            fix=", ".join(f"{name}={plain!r}" for name, plain in (_PLAIN | {"lora_dropout": 0.0}).items()),
        )
    module: Any
    for name, module in chosen.items():
        if _te.kind_of(module) not in ("Linear", "LayerNormLinear") and not isinstance(module, nn.Linear):
            raise PlacementError(
                f"add_adapters: {name}",
                expected="Linear or LayerNormLinear of TransformerEngine, or torch's Linear",
                got=type(module).__name__,
                why="An adapter cannot access the values between the matrices of the module",
                fix="remove it from target_modules, or build the model with te.LayerNormLinear and te.Linear",
            )
        gathered = getattr(module, "return_layernorm_output_gathered", False)
        weights = list(getattr(module, "weight_names", ["weight"]))
        if gathered or len(weights) > 1:
            raise PlacementError(
                f"add_adapters: {name}",
                expected="a layer with one weight whose input is available to the adapter",
                got="return_layernorm_output_gathered=True" if gathered else f"weights {shorten(weights)}",
                fix="fuse_qkv_params=True, and return_layernorm_output_gathered=False",
            )
    attentions: list[Any] = [m for m in model.modules() if _te.kind_of(m) == "MultiheadAttention"]
    stacked = [m for m in attentions if not m.qkv_weight_interleaved]
    fused = {id(child) for m in stacked for child in m.children() if child is not m.proj}
    if fused & set(map(id, chosen.values())):
        raise PlacementError(
            "add_adapters: fused projections with qkv_weight_interleaved=False",
            why="The adapter's rows would not match those of the weight on a different tp size",
            fix="qkv_weight_interleaved=True",
        )


class _Zeros(nn.Linear):
    """A linear layer initialized with zeros."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def _base_property(name: str) -> property:
    """Return a property that forwards an attribute to the base layer."""

    def read(layer: Any) -> Any:
        return getattr(layer.base_layer, name)

    def write(layer: Any, value: Any) -> None:
        setattr(layer.base_layer, name, value)

    return property(read, write)


class LoraLinear(nn.Module, _LoraLayer):
    """A ``te.Linear``, ``te.LayerNormLinear`` or ``nn.Linear`` with its adapters. It replaces the layer."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: Any,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.returns_norm = getattr(base_layer, "return_layernorm_output", None)
        if self.returns_norm is False:
            base_layer.return_layernorm_output = True  # type: ignore[assignment]  # the adapter's input
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    # Attributes that attention reads from or sets on its projections.
    parallel_mode = _base_property("parallel_mode")
    name = _base_property("name")
    output_quantizer_role = _base_property("output_quantizer_role")
    grad_input_quantizer_role = _base_property("grad_input_quantizer_role")

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Create an adapter, as PEFT's layers do."""
        base: Any = self.base_layer
        mode = base.parallel_mode if getattr(base, "tp_size", 1) > 1 else None
        split = bool(getattr(base if mode else base.weight, "sequence_parallel", False))
        common = {"bias": False, "device": base.weight.device}
        full = {**common, "dtype": torch.float32}
        a: Any = nn.Linear(base.in_features, r, **full) if mode != "row" else None
        b: Any = _Zeros(r, base.out_features, **full) if mode != "column" else None
        for half in filter(None, (a, b)):
            if split:  # its input is sequence parallel: te_fsdp sums its gradient over tp
                half.weight.sequence_parallel = True
        if mode is not None:
            parallel = {**common, "params_dtype": torch.float32, "parallel_mode": mode}
            parallel |= {"sequence_parallel": split, "tp_group": base.tp_group, "tp_size": base.tp_size}
            linear: Any = _te.module_class("Linear")
            # TE divides the given size by tp, so pass the global one.
            uniform = functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))  # as nn.Linear and LoRA do
            with _te.te().quantized_model_init(enabled=False):  # the base may be built under it
                a = a or linear(base.in_features * base.tp_size, r, init_method=uniform, **parallel)
                b = b or linear(r, base.out_features * base.tp_size, init_method=nn.init.zeros_, **parallel)
        self.lora_A[adapter_name], self.lora_B[adapter_name] = a, b
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, False
        self.lora_bias[adapter_name] = False
        dropout = config.lora_dropout
        self.lora_dropout[adapter_name] = nn.Dropout(dropout) if dropout else nn.Identity()
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer plus those of the active adapters."""
        result = self.base_layer(x, *args, **kwargs)
        if self.returns_norm is not None:
            *result, x = result
            result = result[0] if len(result) == 1 else tuple(result)
        output, *extra_outputs = result if isinstance(result, tuple) else (result,)
        if not self.disable_adapters:
            # Adapters stay in fp32 under the recipe of the model.
            with _te.te().autocast(enabled=False):
                for name in (name for name in self.active_adapters if name in self.lora_A):
                    hidden = self.lora_A[name](self.lora_dropout[name](x.float()))
                    output = output + (self.lora_B[name](hidden) * self.scaling[name]).to(output.dtype)
        extra_outputs += [x] if self.returns_norm else []
        return (output, *extra_outputs) if extra_outputs else output

    merge = raising_method(OrderError, "LoraLinear.merge", fix="te_fsdp.integrations.peft.merge(model)")
    # Rounding by quantization cannot be undone.
    unmerge = raising_method(
        OrderError, "LoraLinear.unmerge", fix="reload the base: te_fsdp.checkpoint.load in base_of(model)"
    )


def _layers(model: nn.Module) -> list[tuple[str, LoraLinear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear)]


def adapters_of(model: nn.Module) -> nn.Module:
    """Return the adapters as a module tree for :func:`te_fsdp.checkpoint.save` and ``load``. Local operation.

    Modules and parameters have the FQNs of the model. The tree has no forward. An optimizer over the parameters
    that require gradients can be saved with it.

    Raises:
        OrderError: The model has no adapters.
    """
    tree = nn.Module()
    for name, layer in _layers(model):
        parent = tree
        for word in name.split(".") if name else ():
            # A tree with the names of the layers, so that a checkpoint of adapters fits any model with these
            # layers.
            if word not in parent._modules:
                parent.add_module(word, nn.Module())
            parent = parent.get_submodule(word)
        parent.add_module("lora_A", layer.lora_A)
        parent.add_module("lora_B", layer.lora_B)
    if not tree._modules:
        fix = "add_adapters(model, config)"
        raise OrderError("adapters_of(model)", expected="a model with adapters", got="none", fix=fix)
    return tree


@contextlib.contextmanager
def base_of(model: nn.Module) -> Iterator[nn.Module]:
    """Return a context in which a model has its FQNs and its forward from before :func:`add_adapters`.

    Use it for :func:`te_fsdp.checkpoint.load` and ``save`` of the base, ``load_huggingface`` and
    ``save_huggingface``. Local operation.
    """
    layers = _layers(model)

    def put(adapted: bool) -> None:
        for name, layer in layers:
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._modules[last] = layer if adapted else layer.base_layer
            # The adapter reads the output of the norm, which TE returns only with this option. Without the
            # adapter the model expects one output.
            if layer.returns_norm is False:
                layer.base_layer.return_layernorm_output = adapted

    put(adapted=False)
    try:
        yield model
    finally:
        put(adapted=True)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the active adapters to the weights of their layers and set them to zero. The output stays the same.

    Each weight is rounded or quantized once, with the scale of the unsharded weight. Save the adapters first if
    they are still needed. Collective over the model's mesh: adapters are all-gathered layer by layer.

    Raises:
        OrderError: The model is not sharded, has no adapters, or trains such a weight. Nothing was changed.
    """
    state = require_sharded_model(model, "merge")
    layers = _layers(model)
    trained = [name for name, layer in layers if layer.base_layer.weight.requires_grad]
    if trained or not layers:
        raise OrderError(
            f"merge: {shorten(trained) or 'no adapters'}",
            expected="adapters on frozen layers",
            why="An optimizer's main weight of this layer would overwrite the result",
            fix="use add_adapters(model, config), which freezes the layers",
        )
    # The shards are changed, so kept unsharded weights would be stale.
    for _, unit in state.gathered():
        FSDPModule.reshard(unit)  # type: ignore[bad-argument-type]  # not a call of the user
    # In the order of the model, which all ranks share: each layer is collective.
    for _, layer in layers:
        base: Any = layer.base_layer
        local: Any = _torch.local_of(base.weight)
        boxes = shard_info(base, "weight", base.weight).boxes
        quantized = _te.is_quantized(local)
        value = local.dequantize(dtype=torch.float32) if quantized else local.to(torch.float32, copy=True)
        for name in (name for name in layer.active_adapters if name in layer.lora_A):
            # Every rank gathers the adapters, whatever its boxes. The rows of one half are contiguous.
            halves = layer.lora_A[name].weight, layer.lora_B[name].weight
            a, b = ((half.full_tensor() if isinstance(half, DTensor) else half).float() for half in halves)
            for box in boxes:
                rows, columns = box.original_slices()
                value[box.local_slices()] += b[rows] @ a[:, columns] * layer.scaling[name]
            # Zeros in one half make the product zero, as in a new adapter, which can be trained again.
            _torch.local_of(layer.lora_B[name].weight).zero_()
        if quantized:
            quantize_with_shared_scale(base, "weight", local, value)
            drop_derived_state(local)
        else:
            local.copy_(value)
