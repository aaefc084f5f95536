"""Body of each of two gloo processes in ``test_distributed``; results go to a file that the test reads."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from te_fsdp import emulation

H, FFN, HEADS, S, B, STEPS = 128, 256, 4, 32, 4, 2

HOPPER = ["none", "Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling"]
RECIPES = {"9.0": HOPPER, "10.0": [*HOPPER, "MXFP8BlockScaling", "NVFP4BlockScaling"]}
#: (recipe, quantized weights) of the FSDP2 runs. What the architectures have in common runs on one of them. Weights
#: that stay unquantized are sharded in the same way for every recipe.
SHARDED = {
    "9.0": [("Float8CurrentScaling", True), ("DelayedScaling", True)],
    "10.0": [
        ("none", False),
        ("Float8CurrentScaling", True),
        ("DelayedScaling", False),
        ("DelayedScaling", True),
        ("Float8BlockScaling", True),
        ("MXFP8BlockScaling", True),
        ("NVFP4BlockScaling", False),
    ],
}
SAVED = {
    "9.0": ["Float8CurrentScaling"],
    "10.0": ["none", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"],
}


def layer(te, dtype, width=1, **options):
    """Return one layer. Shards of block-scaled weights need multiples of 128 rows; fused QKV has 3 * width * H."""
    return te.TransformerLayer(
        width * H,
        width * FFN,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=dtype,
        device=options.pop("device", "cpu"),
        **options,
    )


def recipe_of(name):
    from transformer_engine.common import recipe

    return None if name == "none" else getattr(recipe, name)()


def shard_of(full, own, rank):
    """Return rank's part of a parameter that tensor parallelism shards along the one dim where the shapes differ."""
    for dim, (whole, part) in enumerate(zip(full.shape, own.shape, strict=True)):
        if whole != part:
            return full.chunk(whole // part, dim)[rank]
    return full


def tensor_parallel(te, name, sequence_parallel, rank):
    """Return the largest relative distance of a tp=2 layer's output and gradients from the single-process one's."""
    recipe = recipe_of(name)
    dtype = torch.float32 if recipe is None else torch.bfloat16
    torch.manual_seed(0)
    whole = layer(te, dtype)
    part = layer(
        te,
        dtype,
        set_parallel_mode=True,
        sequence_parallel=sequence_parallel,
        tp_group=dist.group.WORLD,
        tp_size=2,
    )
    with torch.no_grad():
        for (_, full), (_, own) in zip(whole.named_parameters(), part.named_parameters(), strict=True):
            own.copy_(shard_of(full, own, rank))
    torch.manual_seed(1)
    x, grad = torch.randn(S, B, H, dtype=dtype), torch.randn(S, B, H, dtype=dtype)
    results = []
    for module, cut in ((whole, False), (part, sequence_parallel)):
        mine = x.chunk(2)[rank].clone() if cut else x.clone()
        mine.requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(mine)
        y.backward(grad.chunk(2)[rank] if cut else grad)
        results.append((y.detach(), mine.grad))
    pairs = []
    for one, two in zip(*results, strict=True):
        pairs.append((one.chunk(2)[rank] if sequence_parallel else one, two))
    for (key, full), (_, own) in zip(whole.named_parameters(), part.named_parameters(), strict=True):
        got = own.grad.clone()
        if sequence_parallel and full.shape == own.shape:
            dist.all_reduce(got)  # norms and row biases see a part of the sequence
        if "layernorm_qkv.bias" not in key:  # contains the key bias, whose gradient is 0 up to rounding
            pairs.append((shard_of(full.grad, own, rank), got))
    return max(((b.double() - a.double()).norm() / a.double().norm()).item() for a, b in pairs)


def losses(te, name, primary, mesh, meta):
    """Return losses of a few optimizer steps, over ``mesh`` or alone, and the type of a local weight."""
    recipe = recipe_of(name)
    dtype = torch.float32 if recipe is None else torch.bfloat16
    width = 2 if primary else 1  # see ``layer``
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=primary, recipe=recipe):
        model = torch.nn.Sequential(
            *(layer(te, dtype, width, device="meta" if meta else "cpu") for _ in range(2))
        )
    if mesh is not None:
        for item in model:
            fully_shard(item, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if meta:
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=dtype != torch.float32)
    torch.manual_seed(1)
    x, target, results = torch.randn(S, B, width * H, dtype=dtype), torch.randn(S, B, width * H), []
    for _ in range(STEPS):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        loss = (y.float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    weight = model[0].layernorm_mlp.fc1_weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return results, type(local).__name__


def checkpoint(te, name, mesh, folder):
    """Return the largest difference after loading a DCP checkpoint into a second model, and before (control)."""
    import torch.distributed.checkpoint as dcp

    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with te.quantized_model_init(enabled=name != "none", recipe=recipe_of(name)):
            model = layer(te, torch.bfloat16, width=2)
        models.append(fully_shard(model, mesh=mesh))

    def state(model):
        return {key: value for key, value in model.state_dict().items() if "_extra_state" not in key}

    def difference():
        values = []
        for one, two in zip(*(state(model).values() for model in models), strict=True):
            plain = [v.to_local() for v in (one, two)]
            plain = [v.dequantize() if hasattr(v, "get_metadata") else v for v in plain]
            values.append(
                (plain[0].float() - plain[1].float()).abs().max().item() if plain[0].numel() else 0.0
            )
        return max(values)

    before = difference()
    dcp.save(state(models[0]), checkpoint_id=folder)
    loaded = state(models[1])
    # Python 3.11.0 to 3.11.2 pickle the members of TE's DType through getattr, which torch.load refuses by default.
    by_name = [getattr] if te.DType.kByte.__reduce_ex__(2)[0] is getattr else []
    with torch.serialization.safe_globals(by_name):
        dcp.load(loaded, checkpoint_id=folder)
    models[1].load_state_dict(loaded, strict=False)
    return before, difference()


def cross_entropy(te, dtype, smoothing, reduced, rank):
    """Return distances of loss and gradient from torch's over all logits, and of the loss of this shard alone."""
    from tests.unit.emulation import reference as ref

    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(2, 5, 24, generator=generator)).to(dtype)
    target = torch.randint(0, 24, (2, 5), generator=generator)
    target[0, 1] = -100
    whole = logits.double().requires_grad_()
    options = {"label_smoothing": smoothing, "reduction": "mean" if reduced else "none"}
    expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1), target.flatten(), **options)
    expected.sum().backward()
    local = logits.chunk(2, dim=-1)[rank].contiguous().requires_grad_()
    loss = te.parallel_cross_entropy(local, target, smoothing, reduced, dist.group.WORLD)
    loss.sum().backward()
    alone = te.parallel_cross_entropy(local.detach(), target % 12, smoothing, reduced)
    return (
        ref.distance(loss.flatten(), expected.detach().flatten()),
        ref.distance(local.grad, whole.grad.chunk(2, dim=-1)[rank]),
        ref.distance(alone.flatten(), expected.detach().flatten()),
    )


def work(rank, folder):
    """Run a process."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    emulation.install("10.0")
    import transformer_engine.pytorch as te

    mesh, results = init_device_mesh("cpu", (2,)), {}
    for dtype in (torch.float32, torch.bfloat16):
        for smoothing in (0.0, 0.2):
            for reduced in (False, True):
                results["loss", dtype, smoothing, reduced] = cross_entropy(
                    te, dtype, smoothing, reduced, rank
                )
    for arch in ("9.0", "10.0"):
        emulation.switch_arch(arch)
        for name in RECIPES[arch]:
            for sequence_parallel in (False, True):
                results["tp", arch, name, sequence_parallel] = tensor_parallel(
                    te, name, sequence_parallel, rank
                )
        for name, primary in SHARDED[arch]:
            alone, _ = losses(te, name, primary, None, False)
            together, kind = losses(te, name, primary, mesh, False)
            results["fsdp", arch, name, primary] = (alone, together, kind)
        for name in SAVED[arch]:
            results["dcp", arch, name] = checkpoint(te, name, mesh, f"{folder}/{arch}-{name}")
        results["meta", arch] = losses(te, "Float8BlockScaling", True, mesh, True)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
