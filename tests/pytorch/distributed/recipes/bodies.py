"""Bodies: ports of recipes against one process."""

from __future__ import annotations

import itertools
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from recipes.models import IGNORED, MODELS, PADDING, VOCABULARY, Rotary, loss_of

SEQUENCES, LENGTH = 4, 16


def batch(kind: str, step: int, part: int, parts: int) -> tuple[dict[str, torch.Tensor], float]:
    """Return a part of a step's sequences, and the number of labels of all parts over the number of parts."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(2, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    # As many tokens in each pair of sequences, because FP8 takes multiples of eight.
    lengths = torch.tensor([10, 14, 9, 15]) if kind != "mixtral" else torch.full((SEQUENCES,), LENGTH)
    inside = torch.arange(LENGTH) < lengths[:, None]
    if kind == "esm2":
        hidden = torch.rand(tokens.shape, generator=generator) < 0.3
        labels = torch.where(inside & hidden, tokens, IGNORED)
        tokens = torch.where(inside, torch.where(hidden, 0, tokens), PADDING)
    else:
        labels = torch.where(torch.arange(LENGTH) + 1 < lengths[:, None], tokens.roll(-1, 1), IGNORED)
    total = float((labels != IGNORED).sum()) / parts
    own = slice(part * SEQUENCES // parts, (part + 1) * SEQUENCES // parts)
    tokens, labels, inside = tokens[own], labels[own], inside[own]
    if kind != "llama":
        return {"tokens": tokens, "labels": labels}, total
    bounds = nn.functional.pad(lengths[own].cumsum(0), (1, 0)).int()
    return {"tokens": tokens[inside], "labels": labels[inside], "bounds": bounds}, total


def one_process(
    kind: str, config: dict[str, Any], initial: dict[str, torch.Tensor], parts: list[int]
) -> list[list[float]]:
    """Return the losses of each step by part, trained by stock TE without sharding from the initial weights.

    ``parts`` has the number of parts of each step. Each part of a step is its own forward, as on its rank.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    from recipes.scripts import optimizer_of

    with te.quantized_model_init(config["fp8"], Float8CurrentScaling()):
        model = MODELS[kind](config, device="cpu", params_dtype=config["dtype"])
    model.rotary_emb.inv_freq = Rotary(config["width"] // config["heads"]).inv_freq
    parameters = dict(model.named_parameters())
    assert parameters.keys() == initial.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(initial[name])
    optimizer, results = optimizer_of(model, config), []
    for step, count in enumerate(parts):
        losses = []
        for part in range(count):
            inputs, total = batch(kind, step, part, count)
            with te.autocast(config["fp8"], recipe=Float8CurrentScaling()):
                logits = model(inputs)
            loss = loss_of(logits, inputs["labels"], total)
            (loss / count).backward()
            losses.append(loss.item())
        # torch would compute the norm of bf16 gradients in bf16, te_fsdp computes it in fp32.
        norm = nn.utils.get_total_norm([p.grad.float() for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        results.append(losses)
    return results


def train(
    kind: str,
    config: dict[str, Any],
    axes: dict[str, int] | None,
    steps: tuple[int, int],
    folder: str,
    before: int = 0,
    is_wrong: bool = False,
) -> dict[str, Any]:
    """Train a port, or without ``axes`` the recipe itself, from step ``steps[0]`` to ``steps[1]``.

    The first of several runs saves to ``folder``, another one loads from it, both by the recipe's own code.
    ``before``: number of data-parallel ranks of the run that saved.
    ``is_wrong``: one process begins with other weights.

    Returns:
        Losses of this rank's part, and of one process that has trained all steps on the same parts.
    """
    from recipes import scripts

    def own_batch(step: int, part: int, parts: int) -> Any:
        return batch(kind, step, part, parts)

    first, last = steps
    if axes is None:
        run = scripts.stock(kind, config, own_batch, range(first, last))
        part, parts = dist.get_rank(), dist.get_world_size()
    else:
        run = scripts.ported(kind, config, own_batch, range(first, last), axes)
        tp = axes.get("tp", 1)
        part, parts = dist.get_rank() // tp, dist.get_world_size() // tp
    model, optimizer = next(run)
    initial = {}
    for name, parameter in model.named_parameters():
        initial[name] = harness.full(parameter.detach())
    if config["experts"] and axes and axes.get("ep", 1) > 1 and not config["stacked"]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, initial)
        initial = {name: value for item in everyone for name, value in item.items()}
    if is_wrong:
        initial["embed_tokens.weight"] = initial["embed_tokens.weight"].roll(1, 0)
    expected = one_process(kind, config, initial, [before] * first + [parts] * (last - first))
    if first:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        options = StateDictOptions(strict=False)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    losses = [*itertools.islice(run, last - first)]
    if not first:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return {"losses": losses, "expected": [losses[part] for losses in expected[first:]]}


def error_of_meta_frequencies(config: dict[str, Any]) -> str:
    """Return the error of a model whose rotary frequencies were computed on meta."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type="cpu")
    with torch.device("meta"):
        model = MODELS["llama"](config, device="meta", params_dtype=torch.float32)
    te_fsdp.fully_shard(model, meshes)
    try:
        te_fsdp.materialize(model, seed=0)
    except te_fsdp.TeFsdpError as error:
        return str(error)
    return ""
