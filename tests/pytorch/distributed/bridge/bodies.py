"""Bodies of the tests of the Megatron-FSDP bridge."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parent / "script.py"
IMPORT = "from megatron_fsdp import"
BRIDGE = "from te_fsdp.compat.megatron_fsdp import"


def readme(directory: str) -> dict[str, Any]:
    """Run the script with its import changed; then the same training by te_fsdp's own names."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(IMPORT) == 1
    names: dict[str, Any] = {}
    os.environ["CHECKPOINTS"] = directory
    exec(compile(text.replace(IMPORT, BRIDGE), str(SCRIPT), "exec"), names)
    weights = full_weights(names["model"])
    native, losses = native_training()
    wrong = [name for name, value in native.items() if not torch.equal(value, weights[name])]
    return {
        "before": names["before"],
        "ahead": names["ahead"],
        "again": names["again"],
        "native": losses,
        "wrong": wrong,
        "tensors": len(native),
    }


def native_training() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return weights and losses after the script's five steps, by te_fsdp's API."""
    import te_fsdp

    torch.manual_seed(0)
    units = [torch.nn.TransformerEncoder, torch.nn.TransformerDecoder]
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2, "dim_feedforward": 48}
    model = torch.nn.Transformer(d_model=32, nhead=4, dropout=0.0, **sizes).to(harness.device())
    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    te_fsdp.fully_shard(model, meshes, units=units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        source, target = (torch.randn(3, 5, 32, generator=generator).to(harness.device()) for _ in range(2))
        loss = torch.nn.functional.mse_loss(model(source, target), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return full_weights(model), losses


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return gathered parameters by name."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in model.named_parameters()
    }


def make_net() -> torch.nn.Sequential:
    """Return a model with units of two sizes and a root without parameters."""
    torch.manual_seed(1)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    return torch.nn.Sequential(linear(6, 8), linear(8, 8), tanh(), linear(8, 3)).to(harness.device())


def batch(step: int, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(4, 6, generator=generator).to(harness.device())


def loops(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare three SGD steps of three microbatches each, the last one marked in different ways, with one process.

    Adam divides gradients by their own size: a factor that is wrong all the time would not show.
    """
    return [one_loop(**case) for case in cases]


def one_loop(strategy: int, outer: int | None, how: str) -> dict[str, Any]:
    """Return a parameter's largest difference from one process with all microbatches, relative to its maximum."""
    from te_fsdp.compat import megatron_fsdp

    options: dict[str, Any] = {}
    if outer is not None:
        shape = (2, dist.get_world_size() // 2, 1)
        mesh = dist.init_device_mesh(harness.device_type(), shape, mesh_dim_names=("outer", "inner", "width"))
        options = {"device_mesh": mesh, "dp_outer_dim": "outer", "dp_shard_dim": "inner", "tp_dim": "width"}
        options["outer_dp_sharding_strategy"] = outer
    net, reference = make_net(), make_net()
    groups = [{"params": list(net[0].parameters()), "lr": 0.05}, {"params": list(net[1:].parameters())}]
    model, optimizer = megatron_fsdp.fully_shard(
        net,
        torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        fsdp_unit_modules=["torch.nn.Linear"],
        zero_dp_strategy=strategy,
        sync_model_each_microbatch=how == "each",
        **options,
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    expected_groups = [
        {"params": reference[0].parameters(), "lr": 0.05},
        {"params": reference[1:].parameters()},
    ]
    expected = torch.optim.SGD(expected_groups, lr=0.01, momentum=0.9)
    world, me = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        for number in range(3):
            with marked_last_microbatch(model, how, number == 2):
                (model(batch(step, number, me)).square().mean() / 3).backward()
            for rank in range(world):
                (reference(batch(step, number, rank)).square().mean() / 3 / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
        expected.zero_grad()
    wanted = dict(reference.named_parameters())
    worst = max(
        ((value - wanted[name]).abs().max() / wanted[name].abs().max()).item()
        for name, value in full_weights(net).items()
    )
    return {"worst": worst, "auto": model.model_auto_sync}


def marked_last_microbatch(model: Any, how: str, last: bool) -> contextlib.AbstractContextManager[None]:
    """Return the ways in which scripts mark the last microbatch."""
    if how == "no_sync":
        return contextlib.nullcontext() if last else model.no_sync()
    if how == "sync":
        return model.sync() if last else contextlib.nullcontext()
    if how == "set":
        model.set_model_auto_sync(last)
    return contextlib.nullcontext()  # "each": every backward counts; "never": the step reduces what waits


def methods() -> dict[str, Any]:
    """Call each remaining documented method once."""
    from te_fsdp.compat import megatron_fsdp

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("te_fsdp").addHandler(handler)
    net = make_net()
    policy = megatron_fsdp.MixedPrecisionPolicy()
    model = megatron_fsdp.fully_shard_model(
        net, fsdp_unit_modules=[torch.nn.Linear], nccl_ub=True, use_decoupled_grad=True
    )
    optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    index, results = model.get_distributed_index(), {}
    results["groups"] = [
        index.get_fsdp_group().size(),
        index.get_dp_group().size(),
        index.get_outer_fsdp_group(),
    ]
    model.start_param_sync(force_sync=True)
    with model.no_sync():
        model(batch(0, 0, dist.get_rank())).square().mean().backward()
    model.start_grad_sync()
    model.finish_grad_sync()
    before = [p.grad.full_tensor().clone() for p in net.parameters()]
    model.scale_gradients(0.5)
    results["scaled"] = all(
        torch.equal(p.grad.full_tensor(), g / 2) for p, g in zip(net.parameters(), before, strict=True)
    )
    with model.mixed_precision_context(megatron_fsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)):
        results["inside"] = str(model.mp_policy.grad_comm_dtype)
        model.zero_grad_buffer()
        model(batch(0, 0, dist.get_rank())).square().mean().backward()
        coarse = [p.grad.full_tensor().clone() for p in net.parameters()]
    # The wire rounds to 8 bits: near, and not the same.
    results["rounded"] = any(not torch.equal(a, b) for a, b in zip(coarse, before, strict=True))
    results["near"] = all(
        torch.allclose(a, b, rtol=2**-6, atol=2**-6) for a, b in zip(coarse, before, strict=True)
    )
    results["restored"] = model.mp_policy == policy
    state = optimizer.state_dict()
    optimizer.zero_grad(zero_grad_buffer=True)
    state = optimizer.state_dict()
    results["state"] = sorted({float(s["step"]) for s in state["state"].values()})
    optimizer.step(sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)
    model.install_optimized_model_weights()
    model.synchronize_param_gather()
    model.broadcast_params()
    results["messages"] = messages
    logging.getLogger("te_fsdp").removeHandler(handler)
    return results


def te_model(recipe: str, tp: int, meta: bool) -> dict[str, Any]:
    """Compare the README's second script: quantized weights, fp32 main weights, a tp axis; te_fsdp's own names."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp
    from te_fsdp.compat import megatron_fsdp

    chosen = {"current": recipes.Float8CurrentScaling, "mxfp8": recipes.MXFP8BlockScaling}[recipe]()
    shape = (dist.get_world_size() // tp, tp)
    mesh = dist.init_device_mesh(harness.device_type(), shape, mesh_dim_names=("dp_shard", "tp"))
    policy = megatron_fsdp.MixedPrecisionPolicy(main_params_dtype=torch.float32)
    runs = []
    for bridge in (True, False):
        torch.manual_seed(3)
        group = {
            "tp_group": mesh["tp"].get_group() if tp > 1 else None,
            "tp_size": tp,
            "set_parallel_mode": tp > 1,
        }
        with te.quantized_model_init(recipe=chosen, preserve_high_precision_init_val=not meta):
            model: Any = te.TransformerLayer(
                128, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
                params_dtype=torch.bfloat16, device="meta" if meta else harness.device(), **group,
            )  # fmt: skip
        harness.shift_rows_by_rank(model, group["tp_group"])
        units = ["transformer_engine.pytorch.TransformerLayer"]
        if bridge:
            model = megatron_fsdp.fully_shard_model(
                model, mesh, "dp_shard", tp_dim="tp", fsdp_unit_modules=units, mixed_precision_policy=policy,
                init_model_with_meta_device=meta, keep_fp8_transpose_cache=True,
            )  # fmt: skip
        else:
            te_fsdp.fully_shard(model, te_fsdp.Meshes.from_device_mesh(mesh), precision=policy.native())
            if meta:
                te_fsdp.materialize(model)
        optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
        if bridge:
            megatron_fsdp.fully_shard_optimizer(optimizer)
        else:
            te_fsdp.main_weights(model, optimizer)
        losses = []
        for _ in range(3):
            generator = torch.Generator().manual_seed(dist.get_rank() // tp)
            data = torch.randn(32, 2, 128, generator=generator).to(harness.device(), torch.bfloat16)
            with te.autocast(recipe=chosen):
                loss = model(data).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, full_weights(model)))
    (losses, weights), (expected_losses, expected) = runs
    wrong = [n for n, w in weights.items() if not torch.equal(w, expected[n.removeprefix("module.")])]
    return {"losses": losses, "expected": expected_losses, "wrong": wrong, "tensors": len(weights)}


def sums_and_nan() -> dict[str, Any]:
    """Compare gradients as sums over ranks; and a gradient that is not finite."""
    from te_fsdp.compat import megatron_fsdp

    net, reference = make_net(), make_net()
    options: dict[str, Any] = {"calculate_per_token_loss": True, "report_nan_in_param_grad": True}
    model = megatron_fsdp.fully_shard_model(net, fsdp_unit_modules=[torch.nn.Linear], **options)
    optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    model(batch(0, 0, dist.get_rank())).square().sum().backward()
    for rank in range(dist.get_world_size()):
        reference(batch(0, 0, rank)).square().sum().backward()
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    worst = max(((p.grad.full_tensor() - r.grad).abs().max() / r.grad.abs().max()).item() for p, r in pairs)
    optimizer.zero_grad()
    data = batch(0, 1, dist.get_rank())
    model(data * float("nan") if dist.get_rank() == 1 else data).square().sum().backward()
    try:
        optimizer.step()
    except Exception as error:
        return {"worst": worst, "error": f"{type(error).__name__}: {error}"}
    return {"worst": worst, "error": "none"}


def edge_cases() -> dict[str, Any]:
    """Run learning rate schedulers, zeroed gradients, state before the first step, copies and a model on meta."""
    from te_fsdp.compat import megatron_fsdp
    from te_fsdp.errors import InitError

    results: dict[str, Any] = {}
    policy = megatron_fsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    net = make_net().to(torch.bfloat16)
    model, optimizer = megatron_fsdp.fully_shard(
        net, torch.optim.RMSprop(net.parameters()), zero_dp_strategy=0, mixed_precision_policy=policy
    )
    results["state"] = sorted({float(s["step"]) for s in optimizer.state_dict()["state"].values()})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(batch(0, 0, dist.get_rank()).to(torch.bfloat16)).float().square().mean().backward()
    optimizer.step(sync_grad_before_optimizer_step=True)
    scheduler.step()
    results["lr"] = optimizer.param_groups[0]["lr"]
    optimizer.zero_grad(set_to_none=False)
    results["gradients"] = [float(p.grad.abs().max()) for p in net.parameters()]
    optimizer.zero_grad()
    results["none"] = [p.grad for p in net.parameters()]
    before = [p.detach().clone() for p in net.parameters()]
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0)
    model.broadcast_params()
    results["copies"] = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    try:
        megatron_fsdp.fully_shard_model(torch.nn.Linear(2, 2, device="meta"))
    except InitError as error:
        results["error"] = str(error)
    return results
