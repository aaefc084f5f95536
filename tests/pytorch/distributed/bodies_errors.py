"""Bodies that raise on every rank, with the expected text."""

from __future__ import annotations

import harness
import torch
from torch import nn


class Block(nn.Module):
    """A TE linear next to a module of the user's own class."""

    def __init__(self, own: nn.Module, device: str | torch.device, **kwargs: object) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.linear = te.Linear(8, 8, parallel_mode="column", device=device, **kwargs)
        self.own = own


class NoReset(nn.Module):
    """Has a parameter and a buffer, but no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8, device="meta"))
        self.register_buffer("table", torch.empty(4, device="meta"))


class ResetFails(nn.Module):
    """Has a reset_parameters that fails on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8, device="meta"))

    def reset_parameters(self) -> None:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("no such table on this host")
        nn.init.ones_(self.scale)


def _meshes(tp: int = 1):
    import te_fsdp

    return te_fsdp.Meshes.build(tp=tp, device_type=harness.device_type())


def world_size_mismatch() -> None:
    import te_fsdp

    te_fsdp.Meshes.build(dp_shard=3, tp=2, device_type=harness.device_type())


def model_differs_between_ranks() -> None:
    import te_fsdp

    meshes = _meshes()
    width = 8 + 8 * (torch.distributed.get_rank() == 1)
    te_fsdp.fully_shard(Block(nn.Linear(width, 8, device="meta"), "meta"), meshes)


def settings_differ_between_ranks() -> None:
    """Use a different epsilon and activation on one rank; a module without parameters exists there only."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes, is_first = _meshes(), torch.distributed.get_rank() == 0
    layer = te.LayerNormMLP(8, 16, device="meta", eps=1e-5 if is_first else 1e-3)
    activations = [nn.ReLU()] if is_first else [nn.GELU(), nn.Upsample()]
    te_fsdp.fully_shard(nn.Sequential(layer, *activations), meshes)


def sequence_parallelism_differs_between_ranks() -> None:
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = _meshes(tp=2)
    options = {
        "sequence_parallel": torch.distributed.get_rank() == 1,
        "set_parallel_mode": True,
        "device": "meta",
    }
    te_fsdp.fully_shard(te.LayerNormMLP(8, 16, **options, **meshes.te_kwargs()), meshes)


def module_on_one_rank() -> bool:
    """Shard a model with a module without parameters that exists on one rank only; return whether it trains."""
    import te_fsdp

    meshes = _meshes()
    model = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.ReLU())
    if torch.distributed.get_rank() == 1:
        model.add_module("log", nn.Identity())
    te_fsdp.materialize(te_fsdp.fully_shard(model, meshes), seed=0)
    model(torch.ones(2, 8, device=meshes.device)).sum().backward()
    return all(bool(p.grad.full_tensor().abs().sum()) for p in model.parameters())


def one_rank_fails() -> None:
    """Use a unit name that exists on all ranks but one."""
    import te_fsdp

    meshes = _meshes()
    unit = "linear" if torch.distributed.get_rank() != 1 else "lin"
    te_fsdp.fully_shard(Block(nn.Linear(8, 8, device="meta"), "meta"), meshes, units=unit)


def one_rank_clips_without_a_norm() -> None:
    """Clip with a maximum norm on all ranks but one."""
    import te_fsdp

    model = nn.Linear(8, 8, device=harness.device())
    te_fsdp.fully_shard(model, _meshes())
    model(torch.ones(2, 8, device=harness.device())).sum().backward()
    te_fsdp.clip_grad_norm_(model, 1.0 if torch.distributed.get_rank() != 1 else None)  # type: ignore[bad-argument-type]


def one_rank_clips_without_a_norm_later(order: float, wrong: dict[str, object]) -> list[str]:
    """Return the error of each of two later calls, the second after a backward, with wrong arguments on rank 1."""
    import te_fsdp

    model = nn.Linear(8, 8, device=harness.device())
    te_fsdp.fully_shard(model, _meshes())
    errors = []
    for arguments in ({}, wrong, {}, wrong):
        model(torch.ones(2, 8, device=harness.device())).sum().backward()
        try:
            given = arguments if torch.distributed.get_rank() == 1 else {}
            te_fsdp.clip_grad_norm_(model, **{"max_norm": 1.0, "norm_type": order, **given})
            errors += ["none"] if arguments else []
        except te_fsdp.PlacementError as error:
            errors.append(str(error))
    return errors


def never_initialised() -> None:
    import te_fsdp

    model = te_fsdp.fully_shard(Block(NoReset(), "meta"), _meshes())
    te_fsdp.materialize(model)


class ResetOmitsBias(nn.Linear):
    """Has a reset_parameters that initializes the weight and omits the bias."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def reset_leaves_bias_uninitialized() -> None:
    """Call reset_parameters of a non-TE module after FSDP2, as a user does."""
    import te_fsdp

    model = te_fsdp.fully_shard(Block(ResetOmitsBias(8, 8, device="meta"), "meta"), _meshes())
    model.own.reset_parameters()


def reset_fails_on_one_rank() -> None:
    import te_fsdp

    model = te_fsdp.fully_shard(Block(ResetFails(), "meta"), _meshes())
    te_fsdp.materialize(model)


def replicas_differ() -> None:
    """Build parameters on the device from a different seed on each rank."""
    import te_fsdp

    meshes = _meshes()
    torch.manual_seed(torch.distributed.get_rank())
    te_fsdp.fully_shard(Block(nn.Linear(8, 8, device=harness.device()), harness.device()), meshes)


def sharded_twice() -> None:
    import te_fsdp

    meshes = _meshes()
    model = te_fsdp.fully_shard(Block(nn.Linear(8, 8, device="meta"), "meta"), meshes)
    te_fsdp.fully_shard(model, meshes)


def sharded_twice_without_fsdp2() -> None:
    """Shard a ``no_shard`` model twice. It has no DTensors and no modules of FSDP2."""
    import te_fsdp

    meshes = _meshes()
    model = te_fsdp.fully_shard(Block(nn.Linear(8, 8, device="meta"), "meta"), meshes, strategy="no_shard")
    te_fsdp.fully_shard(model, meshes, strategy="no_shard")


def part_of_a_sharded_model() -> None:
    """Shard a module whose parameters belong to an already sharded model."""
    import te_fsdp

    meshes = _meshes()
    model = te_fsdp.fully_shard(Block(nn.Linear(8, 8, device="meta"), "meta"), meshes, units=[])
    te_fsdp.fully_shard(model.linear, meshes)


def incomplete_blocks() -> None:
    """Shard MXFP8 weights into shards of 8 rows."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    import te_fsdp

    with te.quantized_model_init(enabled=True, recipe=MXFP8BlockScaling()):
        model = Block(nn.Linear(8, 8, device="meta"), "meta")
    te_fsdp.fully_shard(model, _meshes())


def incomplete_stacked_blocks() -> None:
    """Shard MXFP8 gate and up of 16 rows each, so that a block would contain rows of both."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    import te_fsdp

    meshes = _meshes(tp=2)
    options = {"activation": "swiglu", "set_parallel_mode": True, "device": "meta", **meshes.te_kwargs()}
    with te.quantized_model_init(enabled=True, recipe=MXFP8BlockScaling()):
        te_fsdp.fully_shard(te.LayerNormMLP(64, 32, **options), meshes)


def fused_accumulation() -> None:
    import te_fsdp

    # fully_shard handles it; a model that is only bound may be sharded by any FSDP2 call.
    model = Block(nn.Linear(8, 8, device="meta"), "meta", fuse_wgrad_accumulation=True)
    te_fsdp.set_device_mesh(model, _meshes().tp, _meshes().weight)


def weight_with_its_own_sharding() -> None:
    import te_fsdp

    model = Block(nn.Linear(8, 8, device="meta"), "meta")
    model.linear.weight.is_distributed_weight = True
    te_fsdp.fully_shard(model, _meshes())


def missing_parallel_mode() -> None:
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = _meshes(tp=2)
    te_fsdp.set_device_mesh(
        te.LayerNormMLP(8, 16, device="meta", **meshes.te_kwargs()), meshes.tp, meshes.weight
    )


def wrong_number_of_experts() -> None:
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(ep=2, device_type=harness.device_type())
    module = te.GroupedLinear(1 + torch.distributed.get_rank(), 32, 32, device="meta")
    te_fsdp.set_device_mesh(module, ep_mesh=meshes.ep)


def unknown_axis() -> None:
    import te_fsdp

    mesh = torch.distributed.init_device_mesh(harness.device_type(), (2,), mesh_dim_names=("data",))
    te_fsdp.Meshes.from_device_mesh(mesh)
