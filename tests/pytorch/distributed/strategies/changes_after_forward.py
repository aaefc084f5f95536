"""Bodies: changes to weights that stay unsharded between two forwards."""

from __future__ import annotations

import harness
import torch

from strategies.models import batch, one_process, sharded


def freeze_after_forward(strategy: str, between: str) -> dict[str, object]:
    """Freeze and unfreeze parameters after a forward; compare the training with that of one process."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    pair = sharded(meshes, strategy), one_process()
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.5) for model in pair)
    first = harness.full(pair[1].head.weight.detach()).clone()
    for step in range(2):
        x = batch(step, meshes.data_size, 1)[0]
        for model in pair:
            model(x[meshes.data_rank])
            model.head.weight.requires_grad_(False)
            model.head.bias.requires_grad_(True)
            if between == "evaluation":
                with torch.no_grad():
                    model(x[0])
            elif between == "release":
                te_fsdp.release_params(pair[0])
        pair[0](x[meshes.data_rank]).square().mean().backward()
        pair[1](x.flatten(0, 1)).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    both = list(zip(pair[0].named_parameters(), pair[1].parameters(), strict=True))
    values = [(harness.full(p.detach()), harness.full(r.detach())) for (_, p), r in both]
    return {
        "worst": max(float((value - expected).norm() / expected.norm()) for value, expected in values),
        "flags": [name for (name, p), r in both if p.requires_grad != r.requires_grad],
        "control": torch.equal(harness.full(pair[1].head.weight.detach()), first),
    }


def write_after_forward(strategy: str) -> None:
    """Write to weights after a forward; the step must raise."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = sharded(meshes, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = batch(0, meshes.data_size, 1)[0, meshes.data_rank]
    model(x)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    model(x).square().mean().backward()
    optimizer.step()


def write_between_evaluation_and_microbatches(strategy: str) -> float:
    """Write to weights after an evaluation and before several microbatches. Return the largest relative difference."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    pair = sharded(meshes, strategy), one_process()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in pair)
    for step in range(2):
        microbatches = batch(step, meshes.data_size, 2)
        for model in pair:
            with torch.no_grad():
                model(microbatches[0, 0])
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        for number, x in enumerate(microbatches):
            with te_fsdp.microbatch(pair[0], is_last=number == 1):
                pair[0](x[meshes.data_rank]).square().mean().backward()
            pair[1](x.flatten(0, 1)).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    both = list(zip(pair[0].parameters(), pair[1].parameters(), strict=True))
    values = [(harness.full(p.detach()), harness.full(r.detach())) for p, r in both]
    return max(float((value - expected).norm() / expected.norm()) for value, expected in values)


def unshard_after_a_load(strategy: str, path: str) -> tuple[bool, bool]:
    """Unshard units by hand after a load in the middle of a step.

    Return whether the output is that of the loaded weights, and whether it is that of the earlier ones.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = sharded(meshes, strategy)
    x = batch(0, meshes.data_size, 1)[0, meshes.data_rank]
    with torch.no_grad():
        loaded = model(x)
    te_fsdp.checkpoint.save(path, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    earlier = model(x)
    te_fsdp.checkpoint.load(path, model)
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.unshard()
    output = model(x)
    return torch.equal(output, loaded), torch.equal(output, earlier)


def write_after_unshard(strategy: str) -> None:
    """Write to shards of units that were unsharded by hand; the forward must raise."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = sharded(meshes, strategy)
    shards = list(model.parameters())
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.unshard()
    with torch.no_grad():
        for parameter in shards:
            parameter.mul_(0.5)
    model(batch(0, meshes.data_size, 1)[0, meshes.data_rank])
