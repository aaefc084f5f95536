"""Check the bridge's arguments: Megatron-FSDP's names, its defaults, none ignored silently."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.compat import megatron_fsdp
from te_fsdp.compat.megatron_fsdp.arguments import (
    UNUSED_ARGUMENTS,
    UNUSED_OPTIONS,
    Arguments,
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    native_strategy,
    native_units,
)
from te_fsdp.errors import MeshError, PlacementError, PrecisionError

MAPPED = {
    "device_mesh",
    "dp_shard_dim",
    "dp_outer_dim",
    "tp_dim",
    "expt_device_mesh",
    "fsdp_unit_modules",
    "zero_dp_strategy",
    "outer_dp_sharding_strategy",
    "device",
    "init_model_with_meta_device",
    "mixed_precision_policy",
    "sync_model_each_microbatch",
    "report_nan_in_param_grad",
    "calculate_per_token_loss",
}


def test_every_argument_is_mapped_or_has_an_equivalent():
    """megatron-fsdp 0.6.1 documents 33, the model included."""
    names = {field.name for field in fields(Arguments)}
    assert len(names) == 32
    assert names == MAPPED | UNUSED_ARGUMENTS.keys()
    assert not MAPPED & UNUSED_ARGUMENTS.keys()


@pytest.mark.parametrize(("function", "own"), [("fully_shard_model", 1), ("fully_shard", 2)])
def test_signature_shows_every_argument(function, own):
    shown = list(inspect.signature(getattr(megatron_fsdp, function)).parameters)
    assert shown[own:] == [field.name for field in fields(Arguments)]


def test_unknown_argument_raises_type_error():
    with pytest.raises(TypeError, match="overlap_everything"):
        megatron_fsdp.fully_shard_model(torch.nn.Linear(2, 2), overlap_everything=True)


def test_arguments_without_effect_are_logged_once(caplog):
    changed = {"nccl_ub": True, "overlap_grad_reduce": False, "cuda_graph_mode": True}
    with caplog.at_level(logging.WARNING, logger="te_fsdp"):
        Arguments(**changed)
        assert len(caplog.messages) == len(changed)
        for (name, value), text in zip(sorted(changed.items()), sorted(caplog.messages), strict=True):
            assert text == f"megatron_fsdp: {name}={value} has no effect: {UNUSED_ARGUMENTS[name]}"
        caplog.clear()
        Arguments()
        assert caplog.messages == []


def test_strategy_names_and_numbers_are_mapped():
    names = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    assert [native_strategy(number, "zero_dp_strategy") for number in range(4)] == names
    assert [native_strategy(name, "zero_dp_strategy") for name in names] == names
    for wrong in (4, -1, "zero3", True, None):
        with pytest.raises(PlacementError, match="zero_dp_strategy: expected 0 or 'no_shard', 1 or 'optim'"):
            native_strategy(wrong, "zero_dp_strategy")
    with pytest.raises(PlacementError, match="outer"):
        native_strategy(2, "outer_dp_sharding_strategy", names[:2])


def test_unit_classes_are_resolved_from_import_paths():
    assert native_units(None) is None
    assert native_units(["torch.nn.Linear", torch.nn.Tanh]) == [torch.nn.Linear, torch.nn.Tanh]
    for wrong in ("torch.nn.NoSuch", "no_such_package.Class", "Linear", "torch.nn.functional.relu"):
        with pytest.raises(PlacementError, match=f"fsdp_unit_modules: '{wrong}'"):
            native_units([wrong])


def test_mixed_precision_policy_is_mapped():
    policy = megatron_fsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    native = policy.native()
    assert (native.main_params_dtype, native.main_grads_dtype) == (torch.float32, None)
    assert native.grad_comm_dtype == torch.bfloat16
    with pytest.raises(PrecisionError, match="main_grads_dtype"):
        megatron_fsdp.MixedPrecisionPolicy(main_grads_dtype=torch.int8).native()
    with pytest.raises(AttributeError):
        policy.grad_comm_dtype = None


def test_documentation_lists_arguments_without_effect():
    """The page's table has one row for all arguments with the same equivalent."""
    text = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", text, re.MULTILINE)
    listed = {(name, equivalent) for names, equivalent in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(UNUSED_ARGUMENTS.items()) <= listed
    for name, equivalent in UNUSED_OPTIONS.items():
        same = UNUSED_ARGUMENTS.get(name.removeprefix("megatron_fsdp_")) == equivalent
        assert same or (name, equivalent) in listed, name


def test_every_field_of_the_configuration_is_mapped_or_has_an_equivalent():
    """megatron-fsdp 0.6.1 has 24."""
    names = {field.name for field in fields(DistributedDataParallelConfig)}
    mapped = {"data_parallel_sharding_strategy", "outer_dp_sharding_strategy", "check_for_nan_in_grad"}
    always = {"overlap_grad_reduce", "overlap_param_gather"}
    assert len(names) == 24
    assert names == mapped | always | UNUSED_OPTIONS.keys()


def test_fixes_respect_the_precision_policy():
    """FSDP2 rejects both with te_fsdp's own reductions, which the bridge's precision policy always uses."""
    for equivalent in (*UNUSED_ARGUMENTS.values(), *UNUSED_OPTIONS.values()):
        assert "set_symm_mem" not in equivalent and "from_process_group" not in equivalent


def test_expert_meshes_of_a_different_order_or_size_are_rejected(fake_world, monkeypatch):
    """The bridge distributes experts as te_fsdp does: ep varies faster than the axis that shards."""
    fake_world(8, rank=1)
    raised: list[int] = []

    def told(tensor, **options):
        raised.append(int(tensor))

    monkeypatch.setattr(torch.distributed, "all_reduce", told)

    def meshes(shape, names):
        dense = torch.distributed.init_device_mesh("cpu", (8, 1), mesh_dim_names=("shard", "width"))
        experts = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
        return FSDPDistributedIndex(dense, "shard", tp_dim="width", expt_device_mesh=experts).meshes

    assert meshes((4, 2, 1), ("shard", "ep", "width")).experts(4) == range(2, 4)
    with pytest.raises(MeshError, match="ranks in the order"):
        meshes((2, 4, 1), ("ep", "shard", "width"))
    assert raised == [0, 1]
    with pytest.raises(MeshError, match="whose size divides that of device_mesh, 8"):
        dense = torch.distributed.init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
        experts = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("shard",))
        assert FSDPDistributedIndex(dense, "shard", expt_device_mesh=experts).meshes
