"""Bodies: quantized weights onto other meshes or into other formats, against quantizing in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.bodies import assemble, first_steps
from checkpointing.format_models import QuantizedTraining, width_of

AFTER = 2  # the first loss shows the weights that were loaded, the second the optimizer's state


def values_of(local: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Return the values of a tensor, fp32 if it is quantized; of both directions if these are independent."""
    from te_fsdp.quantized.components import components_of, dequantize_box, describe_format, needed_components
    from te_fsdp.upstream import te as _te

    if not _te.is_quantized(local):
        return {name: local.detach()}
    results = {name: local.dequantize(dtype=torch.float32)}
    parts = {c.name: c.tensor for c in components_of(local, name)}
    columnwise = {k: v for k, v in parts.items() if "columnwise" in k}
    if columnwise:
        described = describe_format(local)
        needed = needed_components(described, list(columnwise), name)
        results[f"{name} columnwise"] = dequantize_box(described, columnwise, needed, (0, 0), local.shape)
    return results


def shards(run: Any) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Label, values and place of every parameter and its optimizer state on this rank."""
    from te_fsdp.shard_info import shard_info
    from te_fsdp.upstream import torch_dtensor as _torch

    names = {id(p): n for n, p in run.model.named_parameters()}
    for module in run.model.modules():
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, info = names[id(parameter)], shard_info(module, own, parameter)
            values = values_of(_torch.local_of(parameter), name)
            for key, state in run.optimizer.state.get(parameter, {}).items():
                values[f"{name}.{key}"] = _torch.local_of(state).detach()
            for label, value in values.items():
                yield label, value, info


def save_formats(
    axes: dict[str, int] | None, directory: str, name: str, recipes: list[str]
) -> dict[str, list[float]]:
    """Train with weights of each format, save, on tp4 without the optimizer too, write down all values, train on."""
    import te_fsdp

    losses = {}
    for recipe in recipes:
        run = QuantizedTraining(recipe, axes, seed=0)
        run.steps(first_steps(recipe))
        expected = assemble(shards(run))
        path = f"{directory}/{name}-{recipe}"
        te_fsdp.checkpoint.save(path, run.model, run.optimizer)
        if name == "tp4":
            te_fsdp.checkpoint.save(f"{path}-weights", run.model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(expected, f"{path}.pt")
        losses[recipe] = run.steps(AFTER)
    return losses


def load_formats(
    axes: dict[str, int] | None, directory: str, names: list[str], recipes: list[str]
) -> dict[str, dict[str, Any]]:
    """Load what other meshes saved into the same format: values of both directions and state, bit for bit."""
    import te_fsdp

    outcomes = {}
    for recipe in recipes:
        run = QuantizedTraining(recipe, axes, seed=1)
        for name in names:
            path = f"{directory}/{name}-{recipe}"
            loaded = te_fsdp.checkpoint.load(path, run.model, run.optimizer)
            assert not loaded.left and not loaded.converted
            wrong, count = differing(run, torch.load(f"{path}.pt", weights_only=True))
            run.position = first_steps(recipe)
            outcomes[f"{name}-{recipe}"] = {"wrong": wrong, "tensors": count}
            if name == names[0]:
                outcomes[f"{name}-{recipe}"]["losses"] = run.steps(AFTER)
    return outcomes


def differing(run: Any, expected: dict[str, torch.Tensor]) -> tuple[list[str], int]:
    """Return the labels of this rank's values that differ from the originals, and the number compared."""
    wrong, seen = [], 0
    for label, value, info in shards(run):
        seen += 1
        original, local = expected.get(label), value.cpu()
        if (
            original is None
            or original.dtype != local.dtype
            or any(
                not torch.equal(original[b.original_slices()], local[b.local_slices()]) for b in info.boxes
            )
        ):
            wrong.append(label)
    return wrong, seen


def convert_formats(
    axes: dict[str, int] | None,
    directory: str,
    name: str,
    pairs: list[tuple[str, str]],
    *,
    master: bool = True,
    spoil: bool = False,
) -> dict[str, dict[str, Any]]:
    """Load weights of one format into a model of a different format, with and without main weights.

    Args:
        axes: This mesh.
        directory: Where `save_formats` wrote.
        name: Of the mesh that saved.
        pairs: Saved format and format here.
        master: Load the checkpoint with main weights; otherwise the one of the weights alone.
        spoil: Negative control: each rank quantizes its shard alone.
    """
    import te_fsdp

    outcomes = {}
    for saved, here in pairs:
        run = QuantizedTraining(here, axes, seed=1, width=width_of(saved))
        if saved == "current":
            run.steps(1)  # a used optimizer must not matter
        path = f"{directory}/{name}-{saved}"
        originals = torch.load(f"{path}.pt", weights_only=True)
        if master:
            with _without_shared_amax() if spoil else _unchanged():
                loaded = te_fsdp.checkpoint.load(path, run.model, run.optimizer)
        else:
            allow = ["optimizer"]
            loaded = te_fsdp.checkpoint.load(f"{path}-weights", run.model, run.optimizer, allow=allow)
        expected = expected_values(run, originals, loaded.converted, master)
        wrong, count = differing(run, expected)
        if not master:  # the moments of an optimizer that was not loaded are its own
            wrong = [label for label in wrong if not label.endswith((".exp_avg", ".exp_avg_sq"))]
        losses = run.steps(1)
        outcomes[f"{saved}-{here}"] = {
            "wrong": wrong,
            "tensors": count,
            "converted": loaded.converted,
            "notes": loaded.notes,
            "losses": losses,
        }
    return outcomes


def expected_values(
    run: Any, originals: dict[str, torch.Tensor], converted: dict[str, str], master: bool
) -> dict[str, torch.Tensor]:
    """Return the result of one process for the originals: main weights or values, quantized or rounded once."""
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    expected = dict(originals)
    for name, parameter in run.model.named_parameters():
        local = _torch.local_of(parameter)
        truth = originals[f"{name}.master_param" if master else name].float()
        if name in converted:
            if _te.is_quantized(local):
                whole = quantized_in_one_process(local, truth)
                expected |= {label: v.cpu() for label, v in values_of(whole, name).items()}
            else:
                expected[name] = truth.to(parameter.dtype)
        if not master:
            expected[f"{name}.master_param"] = truth
    return expected


def quantized_in_one_process(local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Quantize the unsharded weight with a quantizer like that of a shard, without any communication."""
    from te_fsdp.quantized.quantizer_record import QUANTIZER_RECORD
    from te_fsdp.upstream import te as _te

    quantizer = _te.quantizer_of(local).copy()
    quantizer.__dict__.pop(QUANTIZER_RECORD, None)  # the amax group of a weight that is sharded
    if type(quantizer).__name__ == "Float8Quantizer":
        quantizer.scale = (448.0 / whole.abs().max()).to(local.device)
        quantizer.amax = torch.zeros(1, device=local.device)
    elif hasattr(quantizer, "with_amax_reduction"):
        quantizer.with_amax_reduction, quantizer.amax_reduction_group = False, None
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    return quantizer(whole.to(local.device))


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


@contextmanager
def _without_shared_amax() -> Iterator[None]:
    """Compute the result of a load without the amaxes of the other ranks."""
    from te_fsdp.checkpoint import reading
    from te_fsdp.quantized.components import components_of

    def by_itself(module: Any, name: str, local: Any, value: torch.Tensor, **options: Any) -> None:
        alone = quantized_in_one_process(local, value)
        sources = {c.name: c.tensor for c in components_of(alone, name)}
        for target in components_of(local, name):
            target.tensor.copy_(sources[target.name])

    stock, reading.quantize_with_shared_scale = reading.quantize_with_shared_scale, by_itself
    try:
        yield
    finally:
        reading.quantize_with_shared_scale = stock


def compare_quantized_main_weights(recipe: str, axes: dict[str, int]) -> dict[str, Any]:
    """Check that weights rebuilt from the main weights have the bytes that the optimizer's step gave them."""
    from te_fsdp.checkpoint.model_state import owned_parameters
    from te_fsdp.quantized.components import components_of
    from te_fsdp.quantized.shards import quantize_with_shared_scale
    from te_fsdp.upstream import te as _te, torch_dtensor as _torch

    run = QuantizedTraining(recipe, axes, seed=0)
    run.steps(first_steps(recipe))
    wrong, count = [], 0
    for owned in owned_parameters(run.model):
        if not _te.is_quantized(owned.local):
            continue
        before = {c.name: c.tensor.clone() for c in components_of(owned.local, owned.fqn)}
        main = _torch.local_of(run.optimizer.state[owned.parameter]["master_param"])
        owned.local.quantize_(torch.zeros_like(main))  # so that the comparison can fail
        quantize_with_shared_scale(owned.module, owned.name, owned.local, main, keep_delayed_scale=True)
        for component in components_of(owned.local, owned.fqn):
            count += 1
            same = torch.equal(component.tensor, before[component.name])
            wrong += [] if same else [f"{owned.fqn}:{component.name}"]
    return {"wrong": wrong, "tensors": count}
