"""All-gather of an FSDP2 unit whose tensors are those of its previous all-gather."""

# [Note: repeated all-gathers] FSDP2 computes the dtypes, sizes and views of all tensors in each all-gather, and calls
# two operators of its own that run Python code. From a unit's second all-gather on te_fsdp keeps them:
#
#     copies in     one kernel copies the shards, and casts them, into this rank's part of the all-gather's output
#     collective    FSDP2's (``AllGather``), on the streams that FSDP2 chooses
#     copies out    one kernel, into views that share no version counter with the parameters
#
# Units with shards on the CPU or along dimensions other than 0 use FSDP2's functions, as do inference mode and
# function transforms. Private names of FSDP2 (``FSDPParamGroup.unshard``, ``wait_for_unshard``,
# ``foreach_all_gather``, ``foreach_all_gather_copy_out``), checked with torch 2.11 to 2.15.

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from te_fsdp.upstream.fsdp2_hooks import current_stream, on_stream, profiler_range
from te_fsdp.upstream.fsdp2_settled import pass_of, sent_tensors, wait_before_gathers
from te_fsdp.upstream.fsdp2_units import GROUP

#: The function of torch 2.15 that copies out of an all-gather; ``None`` before.
_STOCK_COPY_OUT = getattr(_fsdp_collectives, "_default_all_gather_output_fn", None)


class _Plan(NamedTuple):
    """Plan of a group's all-gathers. It refers to no shard, so that a user can free a shard's memory."""

    records: list[Any]  #: FSDP2's records of the gathered parameters: all of the group, or some
    dtypes: list[torch.dtype]  #: Dtype of each sent tensor
    numels: list[int]  #: Number of elements of each sent tensor
    casts: list[torch.dtype | None]  #: FSDP2's ``param_dtype`` of each record
    outputs: list[list[torch.Tensor]]  #: FSDP2's lists of gathered tensors, one for each record
    dtype: torch.dtype  #: Dtype of the collective: that of all sent tensors, or uint8
    sizes: list[int]  #: Number of elements of ``dtype`` of each sent tensor
    #: Indices of sent tensors that are cast before they are copied, and their new dtype
    cast_first: tuple[list[int], torch.dtype | None]
    #: Views of the gathered tensors: (ranks, size of one rank's part); empty until their memory is allocated
    targets: list[torch.Tensor]
    #: Memory of the gathered tensors, with their sizes in bytes
    storages: list[tuple[torch.UntypedStorage, int]]
    hooked: list[Any]  #: Records whose parameter is made by a hook after each all-gather

    def is_valid(self, records: list[Any], sent: list[torch.Tensor]) -> bool:
        """Return whether the plan applies to these flat tensors of these records."""
        return (
            [tensor.numel() for tensor in sent] == self.numels
            and [tensor.dtype for tensor in sent] == self.dtypes
            and [record.param_dtype for record in records] == self.casts
            and all(map(operator.is_, [record.all_gather_outputs for record in records], self.outputs))
        )

    def copy_in(self, own: torch.Tensor, sent: list[torch.Tensor]) -> None:
        """Copy flat tensors to this rank's part of the output: 1-D, ``sum(sizes)`` elements of ``dtype``."""
        indices, dtype = self.cast_first
        if indices:
            sources = [sent[index] for index in indices]
            numels = [source.numel() for source in sources]
            cast = torch.empty(sum(numels), dtype=dtype, device=own.device).split_with_sizes(numels)
            torch._foreach_copy_(cast, sources)
            for index, part in zip(indices, cast, strict=True):
                sent[index] = part
        if self.dtype == torch.uint8:
            sent = [tensor.view(torch.uint8) for tensor in sent]
        torch._foreach_copy_(own.split_with_sizes(self.sizes), sent)


class _Pending(NamedTuple):
    """A pending all-gather, with the fields that FSDP2 reads of an ``AllGatherResult``."""

    all_gather_output: torch.Tensor
    all_gather_event: Any
    all_gather_work: Any
    plan: _Plan


def repeat_gathers(group: Any) -> None:
    """Shorten a parameter group's all-gathers from its second one on. Local operation.

    Call this after :func:`te_fsdp.upstream.fsdp2_settled.shorten_fsdp_calls`.
    """
    if group.mesh_info.shard_mesh_size == 1 or group.__dict__[GROUP].replay is None:
        return
    group.unshard = functools.partial(_unshard, group, group.unshard, {})
    group.wait_for_unshard = functools.partial(_wait_for_unshard, group, group.wait_for_unshard)


def _unshard(
    group: Any,
    stock: Callable[[bool], None],
    plans: dict[tuple[bool, bool, int], _Plan],
    async_op: bool = False,
) -> None:
    """Run in place of ``FSDPParamGroup.unshard``. Same collective over the ranks of the group's shards."""
    if group._all_gather_result is not None or group._sharded_state is ShardedState.UNSHARDED:
        return
    now, ranks = (*pass_of(group), len(group.fsdp_params)), group._all_gather_process_group
    if now[0] and not group.unshard_in_backward:
        return
    plan = plans.get(now)
    # Another selection of the group's records may contain one that this file does not gather.
    if not _can_repeat(group, plan is not None and plan.records == group.fsdp_params):
        stock(async_op)
        return
    copies, stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    with profiler_range(group._with_fqn("FSDP::all_gather")), torch.no_grad():
        with on_stream(copies):
            tensors = sent_tensors(group)
            sent = [tensor.view(-1) for several in tensors for tensor in several]
            if plan is None or not plan.is_valid(group.fsdp_params, sent):
                plan = plans[now] = _make_plan(group, tensors)
            numel, count = sum(plan.sizes), ranks.size()
            output = group._all_gather_comm.allocate((numel * count,), dtype=plan.dtype, device=group.device)
            own = output.narrow(0, numel * ranks.rank(), numel)
            plan.copy_in(own, sent)
        stream.wait_stream(copies)
        with on_stream(stream):
            work = group._all_gather_comm(
                output_tensor=output, input_tensor=own, group=ranks, async_op=async_op
            )
            event = stream.record_event()
    group._all_gather_result = _Pending(output.view(count, -1), event, work, plan)


def _can_repeat(group: Any, is_planned: bool) -> bool:
    """Return whether FSDP2's functions would only do what this file does."""
    return (
        group._sharded_state is ShardedState.SHARDED
        and group._reshard_after_forward_event is None
        and hasattr(group.comm_ctx, "all_gather_stream")  # set by the first forward
        and getattr(group, "_all_gather_output_fn", None) is _STOCK_COPY_OUT
        and not torch.is_inference_mode_enabled()  # which would create inference tensors for later steps
        and not torch._C._are_functorch_transforms_active()
        and (
            is_planned
            or all(
                "_unsharded_param" in managed.__dict__  # it has been all-gathered before
                and managed.fsdp_placement.dim == 0
                and not managed.offload_to_cpu
                and not any(output.is_inference() for output in managed.all_gather_outputs)
                for managed in group.fsdp_params
            )
        )
    )


def _make_plan(group: Any, sent: list[Sequence[torch.Tensor]]) -> _Plan:
    """Return the plan of an all-gather of these tensors: one list for each record."""
    records, ranks = group.fsdp_params, group.mesh_info.shard_mesh_size
    before, after, hooked = list[torch.dtype](), list[torch.dtype](), []
    for record, tensors in zip(records, sent, strict=True):
        is_plain = type(record.sharded_param._local_tensor) is torch.Tensor
        dtypes = [(is_plain and record.param_dtype) or tensor.dtype for tensor in tensors]
        before += [tensor.dtype for tensor in tensors]
        after += dtypes
        # A hook may have dropped them, because it sends tensors of other sizes.
        record.init_all_gather_outputs([tensor.numel() for tensor in tensors], dtypes, ranks, group.device)
        if not is_plain:
            hooked.append(record)
    dtype = after[0] if len(set(after)) == 1 else torch.uint8
    # One kernel casts and copies, unless it copies bytes.
    cast_first = [
        index for index, source in enumerate(before) if dtype == torch.uint8 and source != after[index]
    ]
    numels = [tensor.numel() for tensors in sent for tensor in tensors]
    outputs = [record.all_gather_outputs for record in records]
    return _Plan(
        records=list(records),
        dtypes=before,
        numels=numels,
        casts=[record.param_dtype for record in records],
        outputs=outputs,
        dtype=dtype,
        sizes=[n * sent_as.itemsize // dtype.itemsize for n, sent_as in zip(numels, after, strict=True)],
        cast_first=(cast_first, after[cast_first[0]] if cast_first else None),
        targets=[],
        storages=[(tensor.untyped_storage(), tensor.nbytes) for several in outputs for tensor in several],
        hooked=hooked,
    )


def _wait_for_unshard(group: Any, stock: Callable[[], None]) -> None:
    """Run in place of ``FSDPParamGroup.wait_for_unshard``. Local operation."""
    pending = group._all_gather_result
    if not isinstance(pending, _Pending):
        stock()
        return
    output, event, work, plan = pending
    context, is_forward = group.comm_ctx, group._training_state._name_ == "FORWARD"
    if is_forward and context.all_gather_state is not None:
        wait_before_gathers(group, context.all_gather_state.event)
        context.all_gather_state = None  # frees its output
    current = current_stream(group)
    if event is not None:
        current.wait_event(event)
    if isinstance(work, dist.Work):
        work.wait()
    for storage, size in plan.storages:
        if storage.nbytes() != size:
            storage.resize_(size)
    if not plan.targets:
        # `data` has no version. Autograd would take a new version for a change of saved tensors.
        views = [tensor.data.view(output.shape[0], -1) for several in plan.outputs for tensor in several]
        plan.targets.extend([view.view(plan.dtype) for view in views] if plan.dtype == torch.uint8 else views)
    with profiler_range(group._with_fqn("FSDP::all_gather_copy_out")), torch.no_grad():
        torch.split_with_sizes_copy(output, plan.sizes, dim=1, out=plan.targets)
    for record in plan.hooked:
        record.init_unsharded_param()
    group._to_unsharded()
    event = current.record_event()
    if work is None and is_forward:
        # FSDP2 keeps the output until the next unit waits, so that this copy overlaps with its all-gather.
        kept: Any = pending
        context.all_gather_state = _fsdp_param_group.AllGatherState(kept, event)
    else:
        wait_before_gathers(group, event)
    group._all_gather_result = None
