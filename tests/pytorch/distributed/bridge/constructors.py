"""Bodies of the tests of the bridge's constructors."""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness.collectives import recorded
from torch.distributed.tensor import DTensor

from bridge.bodies import batch, full_weights, make_net


@contextmanager
def capture_log() -> Any:
    """Collect te_fsdp's log messages in the context."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("te_fsdp").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("te_fsdp").removeHandler(handler)


def largest_relative_difference(net: torch.nn.Module, reference: torch.nn.Module) -> float:
    """Return the largest difference of a parameter from that of one process, relative to its largest value."""
    wanted = dict(reference.named_parameters())
    pairs = ((value, wanted[name]) for name, value in full_weights(net).items())
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def trained(model: Any, net: torch.nn.Module, average: bool = True) -> float:
    """Train two steps of two microbatches by SGD in the plain loop, compared with one process."""
    from te_fsdp.compat import megatron_fsdp

    reference = make_net()
    optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    world = dist.get_world_size()
    for step in range(2):
        for number in range(2):
            model(batch(step, number, dist.get_rank())).square().mean().backward()
            for rank in range(world):
                loss = reference(batch(step, number, rank)).square().mean()
                (loss / world if average else loss).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    return largest_relative_difference(net, reference)


def construct_with_dist_index(outer: str | None) -> dict[str, Any]:
    """Call `MegatronFSDP(module, dist_index, ddp_config)` on axes with the user's own names."""
    from te_fsdp.compat import megatron_fsdp

    mesh = dist.init_device_mesh(
        harness.device_type(), (2, dist.get_world_size() // 2, 1), mesh_dim_names=("far", "near", "wide")
    )
    everyone = mesh["far", "near"]._flatten("all")
    index = megatron_fsdp.FSDPDistributedIndex(
        device_mesh=mesh,
        dp_shard_dim="near" if outer is not None else "all",
        dp_outer_dim="far" if outer is not None else None,
        tp_dim="wide",
        hybrid_fsdp_group=everyone.get_group() if outer is not None else None,
        hsdp_outer_dp_shard=outer == "optim",
    )
    config = megatron_fsdp.DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", outer_dp_sharding_strategy=outer or "no_shard"
    )
    net = make_net()
    model = megatron_fsdp.MegatronFSDP(net, index, config, fsdp_unit_modules=[torch.nn.Linear])
    results: dict[str, Any] = {"worst": trained(model, net), "auto": model.model_auto_sync}
    results["same"] = model.get_distributed_index() is index and model.ddp_config is config
    results["cut"] = net[0].weight.to_local().shape[0]
    return results


def construct_without_dist_index() -> dict[str, Any]:
    """Call `MegatronFSDP(module)` with options only. The rest are the configuration's defaults."""
    from te_fsdp.compat import megatron_fsdp

    net, results = make_net(), {}
    with capture_log() as messages:
        model = megatron_fsdp.MegatronFSDP(net, fsdp_unit_modules=["torch.nn.Linear"], nccl_ub=True)
    results["worst"], results["messages"] = trained(model, net), list(messages)
    index = model.get_distributed_index()
    results["names"] = index.get_root_mesh().mesh_dim_names
    results["sharded"] = isinstance(net[0].weight, DTensor)
    config = megatron_fsdp.DistributedDataParallelConfig(
        check_for_nan_in_grad=True,
        overlap_grad_reduce=True,
        fp8_param_gather=True,
        outer_dp_sharding_strategy="optim",
    )
    net = make_net()
    with capture_log() as messages:
        model = megatron_fsdp.MegatronFSDP(net, ddp_config=config, calculate_per_token_loss=True)
    results["whole"] = not isinstance(net[0].weight, DTensor)
    results["sums"], results["config"] = trained(model, net, average=False), list(messages)
    optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0, 0, 0) * float("nan")).sum().backward()
    try:
        optimizer.step()
    except Exception as error:
        results["nan"] = type(error).__name__
    return results


def dist_index_methods() -> dict[str, Any]:
    """Check groups, meshes and ranks by the user's names, experts, and errors."""
    from te_fsdp.compat.megatron_fsdp import FSDPDistributedIndex
    from te_fsdp.errors import MeshError

    kind, names = harness.device_type(), ("far", "near", "wide")
    mesh = dist.init_device_mesh(kind, (2, 2, 1), mesh_dim_names=names)
    apart = dist.new_group([0, 1, 2, 3])
    index = FSDPDistributedIndex(mesh, "near", "far", "wide", hsdp_outer_dp_shard=True, fsdp_group_ag=apart)
    ranks = dist.get_process_group_ranks
    results: dict[str, Any] = {
        "near": ranks(index.get_fsdp_group()),
        "far": ranks(index.get_outer_fsdp_group()),
        "dp": sorted(ranks(index.get_dp_group())),
        "place": index.get_logical_hybrid_fsdp_rank(),
        "apart": index.get_fsdp_group(independent_all_gather=True) is apart,
        "root": index.get_root_mesh() is mesh,
        "one": index.get_submesh("near") == mesh["near"],
        "two": tuple(index.get_submesh(("far", "near")).shape),
        "hybrid": index.use_hybrid_fsdp,
        "experts": [index.get_root_mesh(True), index.get_fsdp_group(True), index.get_dp_group(True)],
    }
    given = FSDPDistributedIndex(mesh, "near", "far", hybrid_fsdp_group=apart)
    results["given"] = given.get_dp_group() is apart
    experts = dist.init_device_mesh(kind, (1, 2, 2, 1), mesh_dim_names=("far", "near", "ep", "wide"))
    dense = dist.init_device_mesh(kind, (1, 4, 1), mesh_dim_names=names)
    both = FSDPDistributedIndex(dense, "near", "far", "wide", expt_device_mesh=experts)
    results["expert_near"] = ranks(both.get_fsdp_group(True))
    results["expert_dp"] = ranks(both.get_dp_group(True))
    results["expert_far"] = ranks(both.get_outer_fsdp_group(True))
    results["expert_mesh"] = both.get_submesh("near", is_expert_parallel=True) == experts["near"]
    wrong = {
        "no axis": lambda: FSDPDistributedIndex(device_mesh=mesh),
        "unknown": lambda: FSDPDistributedIndex(mesh, "near", tp_dim="tp"),
        "submesh": lambda: index.get_submesh(("near", "tp")),
        "none": lambda: index.get_submesh(None),
        "no experts": lambda: index.get_submesh("near", is_expert_parallel=True),
        "place": lambda: given.get_logical_hybrid_fsdp_rank(),
    }
    results["errors"] = {}
    for name, call in wrong.items():
        try:
            call()
        except MeshError as error:
            results["errors"][name] = str(error)
    return results


def is_unreduced(parameter: torch.nn.Parameter) -> bool:
    """Return whether reading the gradient raises, as before its reduction."""
    from te_fsdp.errors import OrderError

    try:
        parameter.grad.norm()  # type: ignore[union-attr]
    except OrderError:
        return True
    return False


def effects_of_methods() -> dict[str, Any]:
    """Check delayed reductions, gathers, and weights changed without the model's methods."""
    from te_fsdp.compat import megatron_fsdp

    results: dict[str, Any] = {}
    options: dict[str, Any] = {"fsdp_unit_modules": [torch.nn.Linear]}
    reference = make_net()
    for rank in range(dist.get_world_size()):
        (reference(batch(0, 0, rank)).square().mean() / dist.get_world_size()).backward()
    for method in ("synchronize_gradient_reduce", "attach_grad_to_optimizer_state", "finish_grad_sync"):
        net = make_net()
        model = megatron_fsdp.fully_shard_model(
            net, zero_dp_strategy="optim", sync_model_each_microbatch=False, **options
        )
        with model.no_sync():
            model(batch(0, 0, dist.get_rank())).square().mean().backward()
        model.synchronize_param_gather()  # "optim" keeps weights unsharded
        waits = all(map(is_unreduced, net.parameters()))
        with capture_log() as messages:
            getattr(model, method)(*([True] if method == "finish_grad_sync" else []))
        pairs = zip(net.parameters(), reference.parameters(), strict=True)
        results[method] = waits, max((p.grad.full_tensor() - r.grad).abs().max().item() for p, r in pairs)
        results["messages"] = list(messages)
    net = make_net()
    model = megatron_fsdp.fully_shard_model(net, zero_dp_strategy="optim_grads", **options)
    data, state = batch(0, 0, 0), deepcopy(model.state_dict())
    before = model(data).detach()
    with torch.no_grad():
        model.synchronize_param_gather()
        for parameter in net.parameters():
            parameter.mul_(2.0)
        model.start_param_sync(force_sync=True)
        results["gathered"] = not isinstance(net[0].weight, DTensor)
        doubled = model(data)
        model.load_state_dict(state)
        results["loaded"] = torch.equal(model(data), before) and not torch.equal(doubled, before)
        # The values of a state dict are those that the optimizer updates: written while weights are unsharded.
        values = list(model.state_dict().values())  # taking it cuts the weights again
        model.start_param_sync(force_sync=True)
        for value in values:
            value.to_local().mul_(2.0)
        model.install_optimized_model_weights()
        results["installed"] = torch.equal(model(data), doubled)
    model.synchronize_param_gather()
    results["released"] = isinstance(net[0].weight, DTensor)
    other = megatron_fsdp.MixedPrecisionPolicy(torch.bfloat16, None, torch.bfloat16)
    with capture_log() as messages:
        model.reset_mixed_precision_policy(other)
    results["policy"] = [str(model.mp_policy.main_params_dtype), str(model.mp_policy.grad_comm_dtype)]
    results["messages"] += messages
    return results


class Root(torch.nn.Module):
    """A unit, and a weight of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = torch.nn.Parameter(torch.ones(6, device=harness.device()))
        self.unit = torch.nn.Linear(6, 8, device=harness.device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit(x * self.scale)


def start_param_sync() -> dict[str, Any]:
    """Check that `start_param_sync()` gathers the root's weights only, by counting all-gathers."""
    from te_fsdp.compat import megatron_fsdp
    from te_fsdp.compat.megatron_fsdp import sharding

    net = Root()
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # gathers by copies, the default on GPUs, are no collective calls
        by_nccl = functools.partial(sharding.native_fully_shard, transport="nccl")
        patch.setattr(sharding, "native_fully_shard", by_nccl)
        model = megatron_fsdp.fully_shard_model(net, fsdp_unit_modules=[torch.nn.Linear])
    model(batch(0, 0, 0))
    model.synchronize_param_gather()
    with recorded() as early:
        model.start_param_sync(None, "what hooks are given")
    with recorded() as late:
        model(batch(0, 0, 0))
    return {name: [c.whole for c in calls] for name, calls in (("early", early), ("late", late))}


class Attention(torch.nn.Module):
    """torch's attention, which has `_reset_parameters` and no `reset_parameters`; and a module with neither name."""

    def __init__(self, device: Any, own: bool) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, device=device)
        if own:
            self.shift = torch.nn.Parameter(torch.zeros(8, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def underscore_reset_parameters() -> dict[str, Any]:
    """Initialize from meta like the constructor in one process. A module without either method raises."""
    from te_fsdp.compat import megatron_fsdp
    from te_fsdp.errors import InitError

    torch.manual_seed(5)
    model = megatron_fsdp.fully_shard_model(
        Attention("meta", False),
        fsdp_unit_modules=[torch.nn.MultiheadAttention],
        init_model_with_meta_device=True,
    )
    torch.manual_seed(5)
    expected = Attention(harness.device(), False)
    wanted = dict(expected.named_parameters())
    values = full_weights(model.module)
    results: dict[str, Any] = {"wrong": [n for n, v in values.items() if not torch.equal(v, wanted[n])]}
    results["tensors"] = len(values)
    try:
        megatron_fsdp.fully_shard_model(Attention("meta", True), init_model_with_meta_device=True)
    except InitError as error:
        results["error"] = str(error)
    return results


def no_shard() -> dict[str, Any]:
    """Use `fsdp_no_shard` under the bridge's name."""
    from te_fsdp.compat import megatron_fsdp

    net = make_net()
    megatron_fsdp.fsdp_no_shard(net[1])
    model = megatron_fsdp.fully_shard_model(net, fsdp_unit_modules=[torch.nn.Linear])
    kinds = [isinstance(net[0].weight, DTensor), isinstance(net[1].weight, DTensor)]
    return {"kinds": kinds, "worst": trained(model, net)}
