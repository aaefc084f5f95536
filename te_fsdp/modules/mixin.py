"""Mixins that ``set_device_mesh`` adds in front of TE's module classes.

During a forward, DTensor parameters are replaced by the local tensors that TE's kernels read:

    forward    DTensor parameter --(same local object, not a copy, not a view)--> TE kernel
    backward   local gradient    --(wrapped as DTensor: its placement, or Partial)--> FSDP2 / the parameter
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from te_fsdp.errors import InitError, OrderError, PrecisionError
from te_fsdp.initialize import check_initialized, check_written, fill_with_nan, initialize_by_reset
from te_fsdp.lifecycle import mark_replaced, track_replaced_parameters
from te_fsdp.modules.extra_state import decode_extra_state, encode_extra_state
from te_fsdp.modules.parameter_reads import check_unsharded, is_read_as_local, replace_returned_parameters
from te_fsdp.modules.torch_units import reshard_after_evaluations
from te_fsdp.quantized.boxed import describe_shards
from te_fsdp.quantized.fsdp_hooks import (
    check_shard_fits,
    gather_missing_direction,
    mark_unsharded,
    release_function_of,
)
from te_fsdp.quantized.shards import register_shard, sync_quantizers_with_history
from te_fsdp.records import (
    BINDING,
    PARAMETER,
    WEIGHT,
    ModuleBinding,
    binding_of,
    copy_param_attrs,
    inherit,
    param_attrs_to_copy,
    share_record,
)
from te_fsdp.upstream import (
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te as _te,
    te_modules as _te_modules,
    torch_autograd as _autograd,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.fsdp2_units import ShardedUnshardedPair
from te_fsdp.upstream.torch_autograd import refuse_hooks


def record_forward(binding: ModuleBinding, node: Any) -> None:
    """Record the autograd node of a module's forward. Local operation.

    A node with ``assigns`` sets gradients itself. Autograd must add them instead if one backward runs several nodes of
    the module. So ``assigns`` becomes false on all nodes that wait at the same time. ``waits`` is true until the
    backward of the node runs.
    """
    for reference in tuple(binding.fsdp.forwards):
        if (earlier := reference()) is not None and earlier.waits:
            earlier.assigns = node.assigns = False
    binding.fsdp.forwards.append(weakref.ref(node, binding.fsdp.forwards.remove))


# [Note: the same local tensor] The object identity matters. FSDP2 refills the buffers of one local tensor
# object for the backward pass. TE swaps attributes of this object (rowwise data for forward, columnwise data
# for backward). A view would keep stale data. Modules outside of TE get a different object over the same
# memory, because torch functions save their inputs and the autograd node is removed from the object itself at
# the end of forward.
class _ToLocal(torch.autograd.Function):
    """Convert DTensor parameters to their local tensors, with one autograd node per module."""

    @staticmethod
    def forward(
        ctx: Any, binding: ModuleBinding, names: Sequence[str], is_foreign: bool, *parameters: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Save specs instead of parameters: parameters would form a reference cycle through their local tensors.
        ctx.binding, ctx.names = binding, names
        ctx.waits = ctx.assigns = binding.fsdp.is_managed and not torch.compiler.is_compiling()
        if ctx.waits and _torch.backward_id() == -1:
            record_forward(binding, ctx)
        local, specs = _torch.locals_and_specs(parameters)
        ctx.specs = specs
        local = tuple([t.detach() for t in local]) if is_foreign else local
        frozen = [index for index, parameter in enumerate(parameters) if not parameter.requires_grad]
        for index in frozen:
            specs[index] = None
        if frozen:
            ctx.mark_non_differentiable(*[local[index] for index in frozen])
        return local

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        binding, grads, specs, ctx.waits = ctx.binding, list(gradients), list(ctx.specs), False
        # A DTensor hides from autograd that a gradient is expanded, or returned for two parameters. Autograd would then
        # add to it in place. Clipping scales it in place too.
        storages: set[int] = set()  # torch 2.11 cannot trace `set[int]()`
        for index, gradient in enumerate(grads):
            if gradient is None:
                continue
            # Compare addresses, which tensors that torch.compile traces do not have.
            key = gradient.data_ptr() if type(gradient) is torch.Tensor else id(gradient)
            if key in storages or (not gradient.is_contiguous() and 0 in gradient.stride()):
                grads[index] = gradient.clone(memory_format=torch.contiguous_format)
            elif gradient.numel():
                storages.add(key)
        if binding.is_tp_sharded:
            for index, name in enumerate(ctx.names):
                spec, gradient = specs[index], grads[index]
                if spec is None or not binding.rules[name].partial_grad:
                    continue
                assert binding.tp_mesh is not None
                if binding.grad_checks and gradient is not None and name in binding.grad_checks:
                    binding.grad_checks[name](gradient)
                if binding.fsdp.is_managed:
                    # Each tp rank has one term. FSDP2 adds the terms once, together with the data-parallel reduction.
                    # The gathered parameter is the same object in every backward, and so is its spec.
                    cached = binding.fsdp.partial_specs.get(name)
                    if cached is None or cached[0] is not spec:
                        cached = spec, dataclasses.replace(spec, placements=(Partial(),))
                        binding.fsdp.partial_specs[name] = cached
                    specs[index] = cached[1]
                elif gradient is not None:
                    grads[index] = summed = gradient.contiguous()
                    dist.all_reduce(summed, group=binding.tp_mesh.get_group())
        dtensors = _torch.dtensors(grads, specs)
        if ctx.assigns:
            dtensors = _autograd.assign_to_leaves(ctx, dtensors)
        return None, None, None, *dtensors


@contextmanager
def local_parameters(
    module: nn.Module, binding: ModuleBinding, *, differentiable: bool = True, is_foreign: bool = False
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Replace the module's direct DTensor parameters by their local tensors, which the context yields.

    The entries of ``module._parameters`` are swapped. Attribute access, ``parameters()`` and TE's op fuser therefore
    see the same objects. Gradients flow back to the DTensors if ``differentiable`` (not in a backward). A forward that
    returns a local tensor must pass its result through :func:`replace_returned_parameters`. Local operation. Raise
    OrderError if parameters are still sharded because FSDP2's hooks did not run.
    """
    table: dict[str, Any] = module._parameters  # type: ignore[assignment]
    names: list[str] = []
    parameters: list[DTensor] = []
    for name, value in table.items():
        if isinstance(value, DTensor):
            if name in binding.distributed:
                check_unsharded(binding, name, value)  # the user's code reads the DTensor
                continue
            names.append(name)
            parameters.append(value)
    if not names:
        yield ()
        return
    pair = binding.fsdp.pairs.get(names[0])
    if pair is None or parameters[0] is not pair.unsharded:
        check_unsharded(binding, names[0], parameters[0])
    if differentiable and torch.is_grad_enabled():
        local = _ToLocal.apply(binding, names, is_foreign, *parameters)
    else:
        local, _ = _torch.locals_and_specs(parameters)
    table.update(zip(names, local, strict=True))
    try:
        yield local
    finally:
        for name, parameter, tensor in zip(names, parameters, local, strict=True):
            if table.get(name) is tensor:
                table[name] = parameter
            if not tensor.is_leaf and not is_foreign:
                # The graph already has its edges. If the autograd node stayed on the tensor, parameter and local
                # tensor would form a cycle that outlives the model. requires_grad stays, because TE's recomputation
                # reads it in backward.
                tensor.detach_().requires_grad_()


class MeshModule(torch.nn.Module):
    """Mixin of every bound module. It precedes TE's class in the method resolution order."""

    #: Whether no base class is TE's, so that torch functions read the parameters.
    _is_foreign = False

    if TYPE_CHECKING:  # ``bind_device_mesh.py``, which makes the classes, adds the method

        def set_device_mesh(
            self,
            tp_mesh: DeviceMesh | None = None,
            weight_mesh: DeviceMesh | None = None,
            *,
            ep_mesh: DeviceMesh | None = None,
            expert_weight_mesh: DeviceMesh | None = None,
        ) -> None:
            """Bind the module to meshes: :func:`te_fsdp.set_device_mesh`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run TE's forward on local tensors."""
        binding: ModuleBinding | None = self.__dict__.get(BINDING)
        # TE's containers have no direct parameters.
        if binding is None or (binding.amax.group is None and not self._parameters):
            return super().forward(*args, **kwargs)
        group = binding.amax.group
        recipe = None if group is None else _te.active_recipe()
        if recipe is None or not (recipe.delayed() or recipe.custom()):
            return self._forward(binding, *args, **kwargs)
        with _te_modules.amax_reduced_over(group):
            return self._forward(binding, *args, **kwargs)

    def _forward(self, binding: ModuleBinding, *args: Any, **kwargs: Any) -> Any:
        """Run TE's forward on local tensors, within the amax group that :meth:`forward` has set."""
        if not self._parameters:
            return super().forward(*args, **kwargs)
        if binding.on_meta:
            check_initialized(self._parameters.items(), binding.name)
            if binding.fsdp.emptied:
                check_written(self._parameters.items(), binding.name)
            binding.on_meta = binding.fsdp.emptied = False
        if binding.fsdp.is_managed and _torch.backward_id() != -1:  # in_backward(), without a Python call
            gather_missing_direction(self, binding)
        with local_parameters(self, binding, is_foreign=self._is_foreign) as local:
            output = super().forward(*args, **kwargs)
            if not isinstance(output, tuple):
                return output
            # The FSDP unit that frees the parameter may be this module or any ancestor.
            return replace_returned_parameters(
                output, local or self._parameters.values(), copy=binding.fsdp.is_managed
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the parameters; after ``to_empty``, the next forward checks that they have been written."""
        super()._apply(fn, recurse)
        if (binding := binding_of(self)) is not None and fill_with_nan(fn, self._parameters.values()):
            binding.on_meta = binding.fsdp.emptied = True
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Copy Python attributes to the replacement of a parameter.

        FSDP2 assigns sharded and unsharded parameters through this method (it respects an overridden
        ``__setattr__``). So do ``load_state_dict(assign=True)`` and users.
        """
        parameters = self.__dict__.get("_parameters")
        if parameters is None or name not in parameters or not isinstance(value, torch.nn.Parameter):
            super().__setattr__(name, value)
            return
        binding: ModuleBinding | None = self.__dict__.get(BINDING)
        if binding is not None:
            old, pair = parameters[name], binding.fsdp.pairs.get(name)
            # FSDP2 registers the same two parameters alternately, in every forward and backward: keep this path short.
            if pair is None or (value is not pair.shard and value is not pair.unsharded):
                self._on_replace(binding, name, old, value)
            else:
                if old is not pair.shard and old is not pair.unsharded:  # assigned without __setattr__
                    _check_assignment(self, binding, name, old)
                ends = old is pair.unsharded or pair.is_shard_exposed
                if pair.release is not None and value is pair.shard and ends:
                    pair.is_shard_exposed = False
                    pair.release()
                attrs, before = value.__dict__, old.__dict__ if isinstance(old, DTensor) else {}
                if before and value is pair.unsharded and attrs.get(PARAMETER) is not before.get(PARAMETER):
                    share_record(old, value)
                elif before.keys() - attrs.keys() - _torch.DTENSOR_ATTRIBUTES:
                    copy_param_attrs(old, value)
        parameters[name] = value

    def register_parameter(self, name: str, param: torch.nn.Parameter | None, **kwargs: Any) -> None:
        """Register a parameter; raise OrderError if it would replace or restore one that FSDP2 manages."""
        binding = binding_of(self)
        if binding is not None:
            # FSDP2 calls this if its parameter was deleted or hidden by a parametrization.
            _check_assignment(self, binding, name, param if name in self._parameters else None)
        super().register_parameter(name, param, **kwargs)

    def _on_replace(self, binding: ModuleBinding, name: str, old: torch.Tensor | None, value: Any) -> None:
        """Prepare the replacement of a direct parameter by a new ``value``."""
        _check_assignment(self, binding, name, value)
        if isinstance(old, DTensor) and not isinstance(old, torch.nn.Parameter):
            raise _assignment_error(binding, name, old, "replaced by torch.func.functional_call")
        pair = binding.fsdp.pairs.setdefault(name, ShardedUnshardedPair())
        unsharded_mesh = binding.unsharded_mesh(name)
        is_shard = isinstance(value, DTensor) and value.device_mesh != unsharded_mesh
        if not is_shard and isinstance(old, DTensor) and old.device_mesh != unsharded_mesh:
            share_record(old, value)
        elif old is not None:
            copy_param_attrs(old, value)
        binding.set_attributes(name, value)
        describe_shards(self, binding, name, value)
        if not is_shard:
            if pair.shard is None and old is not None and old is not value:  # FSDP2 has not set it
                mark_replaced(old, binding.label(name), "an assignment")
            if all(other_pair.unsharded is None for other_pair in binding.fsdp.pairs.values()):
                reshard_after_evaluations(self, pair.shard)
            mark_unsharded(old, value, binding)
            pair.unsharded, pair.release = value, release_function_of(value, pair.shard, binding)
            return
        # The cached gather metadata may be outdated, if a different tensor was the shard in the meantime.
        if (record := _torch.local_of(value).__dict__.get(WEIGHT)) is not None:
            record.gathers = None
        release = release_function_of(old, value, binding)
        if release is not None:
            release()
        else:
            check_shard_fits(self, binding, name, value)
            # TE 2.20.2 dequantizes float8-block and NVFP4 weights silently while FSDP2 shards them.
            if (
                old is not None
                and not binding.fsdp.needs_requantize
                and _te.is_quantized(_torch.local_of(old))
                and not _te.is_quantized(_torch.local_of(value))
            ):
                raise PrecisionError(
                    f"{binding.label(name)}: shards of a quantized weight",
                    expected=f"{_te.format_of(_torch.local_of(old))} shards",
                    got=f"{value.dtype} shards",
                    why="FSDP2 shards with tensor operations for which TE returns dequantized copies",
                    fix="use te_fsdp.fully_shard, or build the model on meta and call reset_parameters after "
                    "fully_shard",
                )
        if name not in binding.fsdp.sharded and old is not None:
            refuse_hooks([(binding.label(name), old)], sharded=False)
            binding.fsdp.sharded.add(name)
            mark_replaced(old, binding.label(name), "fully_shard")
        register_shard(binding, self, name, value)
        binding.fsdp.is_managed = True
        _te_modules.cache_is_fsdp2(self)
        pair.shard, pair.release = value, release_function_of(pair.unsharded, value, binding)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy everything except process groups and streams. These cannot be copied and are shared."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for value in self.__dict__.values():
            # cp_group may be a list of two groups.
            for shared in value if isinstance(value, list) else (value,):
                if isinstance(shared, (torch.distributed.ProcessGroup, torch.Stream)):
                    memo[id(shared)] = shared
        for parameter in self._parameters.values():
            if isinstance(parameter, DTensor) and id(parameter) not in memo:
                # torch cannot copy a DTensor whose local tensor is a view with an offset. TE's split parameters are
                # such views of one buffer, and copies of their local tensors keep this structure.
                local = copy.deepcopy(_torch.local_of(parameter), memo)
                copied = _torch.with_local(local, parameter, requires_grad=parameter.requires_grad)
                copy_param_attrs(copy.deepcopy(param_attrs_to_copy(parameter), memo), copied)
                copied.grad = copy.deepcopy(parameter.grad, memo)
                memo[id(parameter)] = copied
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class ReadableModule:
    """Mixin of modules outside of TE under tp, whose parameters other modules may read."""

    def __getattr__(self, name: str) -> Any:
        """Return an unsharded parameter as a local tensor in forwards, as FSDP2 does without tp.

        Gradients flow back to the parameter.
        """
        attributes = self.__dict__
        for table in ("_parameters", "_buffers", "_modules"):  # as torch, without its call
            if name in attributes.get(table, ()):
                value = attributes[table][name]
                break
        else:
            return super().__getattr__(name)  # type: ignore[misc]
        binding: ModuleBinding | None = attributes.get(BINDING)
        if not isinstance(value, DTensor) or binding is None or not is_read_as_local(binding, name, value):
            return value
        has_grad = torch.is_grad_enabled()
        return _ToLocal.apply(binding, [name], True, value)[0] if has_grad else _torch.local_of(value)


def pair_of(module: torch.nn.Module, name: str) -> ShardedUnshardedPair | None:
    """Return the pair of sharded and unsharded parameter (:data:`te_fsdp.upstream.fsdp2_settled.PairOf`).

    ``None`` for a module that is not bound and has torch's ``__setattr__``. Other modules get an empty pair. Raises
    KeyError if FSDP2 has not registered both parameters yet. Local operation.
    """
    if isinstance(module, MeshModule) and (binding := binding_of(module)) is not None:
        pair = binding.fsdp.pairs[name]
        if pair.shard is None or pair.unsharded is None:
            raise KeyError(name)
        return pair
    is_plain = type(module).__setattr__ is torch.nn.Module.__setattr__
    return None if is_plain or isinstance(module, MeshModule) else ShardedUnshardedPair()


def _check_assignment(
    module: torch.nn.Module, binding: ModuleBinding, name: str, value: torch.nn.Parameter | None
) -> None:
    """Raise if ``value`` would replace a parameter that FSDP2 manages: FSDP2 would register its parameter again."""
    pair = binding.fsdp.pairs.get(name)
    is_first = pair is None or pair.shard is None or pair.unsharded is None
    if not is_first and _fsdp2.is_assigned_by_user(module, name, value):
        raise _assignment_error(binding, name, value, "assigned after the first forward")


def _assignment_error(binding: ModuleBinding, name: str, value: Any, change: str) -> OrderError:
    return OrderError(
        f"{binding.label(name)}: a parameter {change}",
        expected="the parameter set by te_fsdp.fully_shard",
        got="None" if value is None else f"a different one, of shape {tuple(value.shape)}",
        why="FSDP2 would restore its parameter in the next forward, and optimizers keep updating that one",
        fix="copy the values: `with torch.no_grad(): parameter.copy_(values)`, with a DTensor of its placements; "
        "or assign and tie parameters before te_fsdp.fully_shard",
    )


class ResettableModule(MeshModule):
    """Mixin of TE modules with parameters: ``reset_parameters`` under any sharding."""

    def reset_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Run TE's initialization. Every rank computes its shards of one unsharded initialization.

        Collective over the mesh of the parameters. All ranks call it in the same order with equal random state.
        """
        if (binding := binding_of(self)) is None:
            super().reset_parameters(*args, **kwargs)  # type: ignore[misc]
            return
        before = dict(self._parameters)
        with track_replaced_parameters(self, "reset_parameters", prefix=binding.name):
            super().reset_parameters(*args, **kwargs)  # type: ignore[misc]
        for name, parameter in self._parameters.items():
            if parameter is not None:
                if (old := before.get(name)) is not None:
                    inherit(old, parameter)
                binding.set_attributes(name, parameter)
                describe_shards(self, binding, name, parameter)
        fsdp2_units.retie_parameters(self, before)

    def adjust_amax_history_length(self, *args: Any, **kwargs: Any) -> None:
        """Change the length of delayed scaling's amax history and update FSDP2's shards."""
        super().adjust_amax_history_length(*args, **kwargs)  # type: ignore[misc]
        if (binding := binding_of(self)) is not None:
            sync_quantizers_with_history(binding, self)

    def get_extra_state(self) -> Any:
        """Return TE's state dict entry, or a tensor with the load condition if plain DCP cannot reshard the weights."""
        return encode_extra_state(self, super().get_extra_state())

    def set_extra_state(self, state: Any) -> None:
        """Load an entry of :meth:`get_extra_state`; raise CheckpointError if the weights would not match."""
        super().set_extra_state(decode_extra_state(self, state))


class OpMeshModule(ResettableModule):
    """Mixin of TE's norms, which are fusible operations: they read their parameters again in backward."""

    def op_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation's backward on local tensors."""
        if (binding := binding_of(self)) is None:
            return super().op_backward(*args, **kwargs)  # type: ignore[misc]
        with local_parameters(self, binding, differentiable=False):
            return super().op_backward(*args, **kwargs)  # type: ignore[misc]


class ForeignModule(MeshModule):
    """Mixin of modules outside of TE that have their own ``reset_parameters``."""

    def reset_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Run the module's own initialization on tensors of original size and keep this rank's shards.

        Collective over the mesh of the parameters. All ranks call it in the same order with equal random state.
        Raise InitError if a parameter or buffer was left uninitialized.
        """
        stock = functools.partial(super().reset_parameters, *args, **kwargs)  # type: ignore[misc]
        if (binding := binding_of(self)) is None:
            stock()
            return
        before = dict(self._parameters)
        with track_replaced_parameters(self, "reset_parameters", prefix=binding.name):
            unset = initialize_by_reset(self, stock)
        fsdp2_units.retie_parameters(self, before)
        if unset:
            raise InitError(
                f"{', '.join(binding.label(name) for name in unset)}: not initialized",
                expected=f"{type(self).__name__}.reset_parameters to fill every parameter and buffer",
                got="uninitialized values",
                why="They would contain uninitialized memory",
                fix="initialize them in reset_parameters",
            )
