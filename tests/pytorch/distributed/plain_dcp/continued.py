"""Bodies: FP8 training that continues on a different mesh, compared with TE's unsharded module.

All values but the operands of GEMMs are in FP32, so models with equal quantized operands differ by rounding of FP32.
With current scaling, a rank's scales depend on its part of the activations. :func:`constant_amax` removes this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from plain_dcp import round_trip
from plain_dcp.round_trip import BATCH, HIDDEN, SEQUENCE, Model, to_full

TOKENS = SEQUENCE * BATCH * 2


class Job(round_trip.Job):
    """A sharded model in fp32 whose weights are quantized."""

    def __init__(
        self, kind: str, recipe: str, axes: dict[str, int], keep: bool, seed: int, averages: bool, amax: float
    ) -> None:
        from transformer_engine.pytorch.optimizers import FusedAdam

        import te_fsdp

        device = harness.device_type()
        self.meshes = meshes = te_fsdp.Meshes.build(**axes, device_type=device)
        tp = {} if meshes.tp is None else {"tp_size": meshes.tp.size(), "tp_group": meshes.tp.get_group()}
        self.model = Model(kind, recipe, keep=keep, device="meta", dtype=torch.float32, **tp)
        self._shard_with_torch(seed)
        self.averages, self.amax = averages, amax
        if not averages:
            self.model.set_force_sum_reduction_for_comms(True)
            self.model.set_gradient_divide_factor(1.0)
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-2, eps=1e-3, master_weights=True)

    def step(self, position: int) -> dict[str, torch.Tensor]:
        """Return the original gradients."""
        tp = self.meshes.tp
        parts = dist.get_world_size() // (tp.size() if tp is not None else 1)
        own = batch(position).chunk(parts, dim=1)[self.meshes.data_rank]
        if self.model.kind == "row" and tp is not None:
            own = own.chunk(tp.size(), dim=2)[tp.get_local_rank()].contiguous()
        with constant_amax(self.amax):
            loss(self.model(own), parts if self.averages else 1).backward()
        found = {name: to_full(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def batch(position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + position)
    return torch.randn(SEQUENCE * 2, BATCH, HIDDEN, generator=generator).to(harness.device())


def loss(output: torch.Tensor, parts: int) -> torch.Tensor:
    return output.float().pow(2).sum() * (10 * parts / (TOKENS * HIDDEN))


class Stock:
    """TE's module without te_fsdp, with the values of a job."""

    def __init__(self, job: Job, kind: str, recipe: str, factor: int) -> None:
        self.factor, self.amax = factor, job.amax
        from transformer_engine.pytorch.optimizers import FusedAdam

        torch.manual_seed(9)
        self.model = Model(kind, recipe, keep=True, device=str(harness.device()), dtype=torch.float32)
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-2, eps=1e-3, master_weights=True)
        self.take(job)

    def take(self, job: Job) -> None:
        ours = dict(job.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                full = to_full(ours[name])
                parameter.copy_(full)
                scale_inv = getattr(parameter, "_scale_inv", None)
                if scale_inv is not None and scale_inv.numel() == 1:
                    # Under delayed scaling the bytes are older than the newest scale.
                    from te_fsdp.emulation.tex.formats import cast

                    scale_inv.copy_(ours[name].to_local()._scale_inv)
                    parameter._data.copy_(cast.cast_fp8(full / scale_inv, parameter._fp8_dtype))
                    parameter._transpose, parameter._transpose_invalid = None, True
        self._states(job)

    def _states(self, job: Job) -> None:
        from te_fsdp.upstream import te as upstream, te_modules

        found = round_trip.get_optimizer_state_dict(job.model, job.optimizer)["state"]
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            self.optimizer.initialize_state(parameter, False)
            for key, value in found[name].items():
                if torch.is_tensor(value) and key in state:
                    state[key].copy_(to_full(value).reshape(state[key].shape))
        for group, other in zip(self.optimizer.param_groups, job.optimizer.param_groups, strict=True):
            group["step"] = other["step"]
        ours = dict(job.model.named_modules())
        for name, module in self.model.named_modules():
            states = upstream.delayed_states(ours[name])
            if states is not None:
                described = te_modules.describe_delayed_recipe(ours[name])
                for key, state in te_modules.make_delayed_states(module, described).items():
                    state.scale.copy_(states[key].scale)
                    state.amax_history.copy_(states[key].amax_history)

    def step(self, position: int) -> dict[str, torch.Tensor]:
        with constant_amax(self.amax):
            loss(self.model(batch(position)), self.factor).backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.factor
        found = {name: to_full(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def values(self) -> dict[str, torch.Tensor]:
        results = {}
        for name, parameter in self.model.named_parameters():
            results[name] = to_full(parameter)
            for key, value in self.optimizer.state[parameter].items():
                if torch.is_tensor(value):
                    # Steps update the main weights of quantized weights only. State dicts have current values.
                    is_main = key == "master_param" and type(parameter) is torch.nn.Parameter
                    results[f"{name}.{key}"] = to_full(parameter if is_main else value)
        return results


def histories(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales and amax histories of delayed scaling."""
    from te_fsdp.upstream import te as upstream

    found = {}
    for name, module in model.named_modules():
        for key, state in (upstream.delayed_states(module) or {}).items():
            found[f"{name} {key} scale"] = state.scale.clone()
            found[f"{name} {key} history"] = state.amax_history.clone()
    return found


@contextlib.contextmanager
def constant_amax(amax: float) -> Iterator[None]:
    """Quantize with a constant in place of the amax in current scaling; 0 for no change."""
    if not amax:
        yield
        return
    from te_fsdp.emulation.tex import formats
    from te_fsdp.emulation.tex.formats import float8

    key, formats_of = "Float8CurrentScalingQuantizer", formats._FORMATS
    module, fill = formats_of[key]

    def fill_with_constant(values: Any, quantizer: Any, output: Any, noop: bool, **options: Any) -> None:
        float8.fill_current(values, quantizer, output, noop, **{**options, "amax": torch.full((1,), amax)})

    formats_of[key] = (module, fill_with_constant)
    try:
        yield
    finally:
        formats_of[key] = (module, fill)


def _differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest difference as a share of a tensor's largest value, and the share of different weights."""
    largest = weights = count = 0.0
    for key in one:
        difference = (one[key] - other[key]).abs()
        if key.endswith("weight"):  # quantized
            weights, count = weights + int((difference > 0).sum()), count + difference.numel()
        else:
            largest = max(largest, float(difference.max() / other[key].abs().max().clamp(min=1e-30)))
    return largest, weights / max(count, 1)


def continue_elsewhere(
    kind: str,
    recipe: str,
    source: dict[str, int],
    target: dict[str, int],
    directory: str,
    *,
    keep: bool = True,
    averages: bool = False,
    amax: float = 0.0,
) -> dict[str, Any]:
    """Train on a mesh, save, load on a different one, and compare two further steps with TE's unsharded module.

    Args:
        kind: A kind of :class:`round_trip.Model`.
        recipe: The recipe of the weights.
        source: Axes of the mesh that saves.
        target: Axes of the mesh that loads.
        directory: Of the checkpoint.
        keep: Whether the state dict has ``_extra_state``.
        averages: Whether FSDP2 averages gradients, so that gradients of activations are larger by the size of dp.
        amax: See :func:`constant_amax`.

    Returns:
        Names of loaded values that differ from the saved ones ("loaded"; "stock": in TE's module), the largest
        difference of gradients, optimizer states and amax histories from TE's module, the share of different weights,
        and the largest difference of TE's module from the mesh that saved ("meshes").
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def record(model: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for position in (2,):
            gradients = {f"{key}.gradient": value for key, value in model.step(position).items()}
            for results in (gradients, model.values(), histories(model.model)):
                found |= {f"{position} {key}": value for key, value in results.items()}
        FP8GlobalStateManager.reset()  # models would roll each other's amax histories
        return found

    job = Job(kind, recipe, source, keep, 3, averages, amax)
    for position in (0, 1):
        job.step(position)
    dcp.save(job.state(), checkpoint_id=f"{directory}/0")
    saved = job.values() | (histories(job.model) if keep else {})
    unchanged = record(job)
    job = Job(kind, recipe, target, keep, 4, averages, amax)
    state = job.state()
    dcp.load(state, checkpoint_id=f"{directory}/0")
    job.take(state)
    stock = Stock(job, kind, recipe, target.get("dp_shard", 1) if averages else 1)
    loaded = [one.values() | (histories(one.model) if keep else {}) for one in (job, stock)]
    continued, expected = record(job), record(stock)
    largest, weights = _differences(continued, expected)
    return {
        "loaded": round_trip.differing(loaded[0], saved),
        "stock": round_trip.differing(loaded[1], saved),
        "largest": largest,
        "weights": weights,
        "meshes": _differences(unchanged, expected)[0],
    }
