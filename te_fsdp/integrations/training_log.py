"""What a training run tells: numbers of each step, handed to writers on rank 0.

    log = TrainingLog([JsonLines("out/metrics.jsonl"), TensorBoard("out/tensorboard")], every=10,
                      optimizer=optimizer, tokens_per_step=batch * length)
    ...
    log.step(step, loss=loss, grad_norm=norm)    # on all ranks, after optimizer.step()
    ...
    log.close()

A writer is anything with :class:`Writer`'s two methods. Between logging steps ``step`` does nothing but look at a
number: tensors stay on the device, and nothing waits for it. At a logging step all values come over in one transfer.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp._te_formats import FORMATS
from te_fsdp.agree import maximum, rank, world_size
from te_fsdp.errors import message
from te_fsdp.integrations import needs
from te_fsdp.quantized.components import components_of
from te_fsdp.sharding.state import shard_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["JsonLines", "TensorBoard", "TrainingLog", "WandB", "Writer", "weight_health"]

_log = logging.getLogger("te_fsdp")

#: Codes of the largest magnitude, without the sign, of element types.
_LARGEST = {"kFloat8E4M3": 0x7E, "kFloat8E5M2": 0x7B, "kFloat4E2M1": 0x7}


class Writer(Protocol):
    """Where numbers go. Called on rank 0 alone."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a logging step."""

    def close(self) -> None:
        """Nothing follows."""


class JsonLines:
    """A line of JSON for each logging step, appended to a file.

    Args:
        path: The file; its folder is made.
        also: What each line holds besides, such as the mesh.
    """

    def __init__(self, path: str | Path, also: Mapping[str, Any] | None = None) -> None:
        self._path, self._also = Path(path), dict(also or {})

    @functools.cached_property
    def _file(self) -> TextIO:  # on the rank that writes
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line; floats are written to the last bit."""
        print(json.dumps({"step": step, **values, **self._also}), file=self._file, flush=True)

    def close(self) -> None:
        """Close the file."""
        if "_file" in vars(self):
            self._file.close()


class TensorBoard:
    """TensorBoard's event files in a folder (``pip install tensorboard``)."""

    def __init__(self, folder: str | Path) -> None:
        with needs("tensorboard"):  # on all ranks alike
            from torch.utils import tensorboard

        self._open = functools.partial(tensorboard.SummaryWriter, str(folder))

    @functools.cached_property
    def _writer(self) -> Any:
        return self._open()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add each value as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if "_writer" in vars(self):
            self._writer.close()


class WandB:
    """A run of Weights & Biases (``pip install wandb``), begun at the first logging step.

    Options are those of ``wandb.init``, such as ``project``, ``config`` and ``mode="offline"``.
    """

    def __init__(self, **options: Any) -> None:
        with needs("wandb"):  # on all ranks alike
            import wandb

        self._begin = functools.partial(wandb.init, **options)

    @functools.cached_property
    def _run(self) -> Any:
        return self._begin()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values under the step's number."""
        # Without `commit` wandb holds a row back until one of another step comes, or the end.
        self._run.log(dict(values), step=step, commit=True)

    def close(self) -> None:
        """End the run."""
        if "_run" in vars(self):
            self._run.finish()


class TrainingLog:
    """Collects the numbers of training steps and hands them to writers.

    Besides what ``step`` is given, a logging step has: ``step_s`` (seconds per step since the last logging step, or
    since this object was made), ``tokens_per_s`` over all ranks, ``lr`` (``lr_1``, ... of further groups), on GPUs
    ``memory_peak_gib`` and ``memory_reserved_gib`` (the allocator's maxima so far, of the rank that has most), and what
    :func:`weight_health` finds.

    Args:
        writers: Where the numbers go; used on rank 0 alone, but made on all. A writer that raises is left out from then
            on, which the log of te_fsdp says: the other ranks train on and could not be told.
        every: Steps whose number is a multiple of it are logging steps.
        optimizer: Whose learning rates are told.
        tokens_per_step: Of the global batch.
        health_of: Model whose :func:`weight_health` is told.
    """

    def __init__(
        self,
        writers: Sequence[Writer] = (),
        *,
        every: int = 10,
        optimizer: Optimizer | None = None,
        tokens_per_step: int | None = None,
        health_of: nn.Module | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(message("TrainingLog: every", expected="at least 1", got=every))
        self._writers, self._every, self._optimizer = list(writers), every, optimizer
        self._tokens, self._health_of = tokens_per_step, health_of
        self._since, self._steps = time.perf_counter(), 0

    def step(self, step: int, **values: float | torch.Tensor) -> dict[str, float] | None:
        """Take the numbers of a step.

        At a logging step collective over the world where there is something to reduce: one all-reduce of the memory on
        GPUs, two of ``health_of``; and the only wait for the device.

        ``values`` are numbers, or tensors of one element on any device: rank 0's are told. ``step`` is the same on all
        ranks.

        Returns:
            What was told, on every rank with its own values; ``None`` between logging steps.

        Raises:
            ValueError: A tensor of several elements, or no number.
        """
        self._steps += 1
        if step % self._every:
            return None
        self._check(values)
        if self._optimizer is not None:
            for index, group in enumerate(self._optimizer.param_groups):
                values[f"lr_{index}" if index else "lr"] = group["lr"]
        found = _fetched(values)
        if self._health_of is not None:
            found |= weight_health(self._health_of)
        found |= _memory()
        now = time.perf_counter()  # behind the fetch, which has waited for the device
        found["step_s"] = (now - self._since) / self._steps
        if self._tokens is not None:
            found["tokens_per_s"] = self._tokens / found["step_s"]
        self._since, self._steps = now, 0
        for writer in list(self._writers) if rank() == 0 else ():
            try:
                writer.write(step, found)
            except Exception:
                self._writers.remove(writer)
                _log.exception("TrainingLog: %s is left out from now on", type(writer).__name__)
        return found

    def _check(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Raise before any collective, on all ranks alike."""
        large = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.numel() != 1]
        others = [n for n, v in values.items() if not hasattr(v, "__float__")]
        for names, expected, got, fix in (
            (large, "one number", "a tensor of several elements", "reduce it first"),
            (others, "a number, or a tensor of one element", "something else", "leave it out, or convert it"),
        ):
            if names:
                what = f"TrainingLog.step: {', '.join(names)}"
                raise ValueError(message(what, expected=expected, got=got, fix=fix))

    def close(self) -> None:
        """Close the writers, on rank 0."""
        for writer in self._writers if rank() == 0 else ():
            writer.close()


def _fetched(values: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    """All values as numbers, by one transfer from the device."""
    tensors = {name: _torch.local_of(v) for name, v in values.items() if isinstance(v, torch.Tensor)}
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
    # float64 holds each of them to the last bit.
    own = [
        # Numbers of Python too, which torch would take for float32.
        torch.as_tensor(value, dtype=None if name in tensors else torch.float64)
        .detach()
        .reshape(())
        .to(device, torch.float64, non_blocking=True)
        for name, value in {**values, **tensors}.items()
    ]
    return dict(zip(values, torch.stack(own).tolist(), strict=True)) if own else {}


def _memory() -> dict[str, float]:
    """The CUDA allocator's maxima, of the rank that has most; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    told = torch.tensor(peaks, dtype=torch.int64, device="cuda")
    if world_size() > 1:
        maximum(told)
    peak, reserved = (value / 2**30 for value in told.tolist())
    return {"memory_peak_gib": peak, "memory_reserved_gib": reserved}


@torch.no_grad()
def weight_health(model: nn.Module) -> dict[str, float]:
    """How a model's quantized weights use their formats.

    Per format that the model has (``float8``, ``mxfp8``, ...): ``<format>/saturated``, the share of values with the
    largest magnitude of the format; ``<format>/zero``, the share of zeros, of those that underflowed above all;
    ``<format>/scale_inv_min`` and ``scale_inv_max``, the extremes of what values are multiplied by when they are read
    (not for NVFP4, whose scales have two levels). Scales from the amax make one value of each block saturate;
    with delayed scaling a larger share says that scales lag behind the weights.

    Collective over the world: two all-reduces of a few numbers, then one wait for the device. Replicas count as often
    as they are held, which changes no share. Values are read along rows, where a format holds them twice.

    Returns:
        The numbers, the same on every rank; nothing for a model without quantized weights on any rank. New weights on
        their way are waited for.
    """
    names = [name for name in FORMATS if name != "hybrid"]
    device = next((_torch.local_of(p).device for p in model.parameters()), torch.device("cpu"))
    counts = torch.zeros(len(names), 3, dtype=torch.float64, device=device)
    extremes = torch.full((len(names), 2), -torch.inf, dtype=torch.float64, device=device)
    for parameter in model.parameters():
        local = _torch.local_of(shard_of(parameter))
        for part in (p for one in _single(local) for p in _te.parts_of(one)[:1]):
            name = str(_te.format_of(part))
            if _te.high_precision_part(part) is None and name in names and part.numel():
                _add_health(part, counts[names.index(name)], extremes[names.index(name)])
    if world_size() > 1:
        dist.all_reduce(counts)
        maximum(extremes)
    found = {}
    numbers = torch.cat([counts, extremes], 1).tolist()
    for name, (saturated, zero, elements, low, high) in zip(names, numbers, strict=True):
        if elements:
            found |= {f"{name}/saturated": saturated / elements, f"{name}/zero": zero / elements}
            if high > -torch.inf:
                found |= {f"{name}/scale_inv_min": -low, f"{name}/scale_inv_max": high}
    return found


def _single(local: torch.Tensor) -> Sequence[torch.Tensor]:
    """A quantized local tensor, of all experts' weight each expert's; nothing of a plain one."""
    if not _te.is_quantized(local):
        return ()
    return local.experts if _te.is_grouped(local) else (local,)  # type: ignore[missing-attribute]


def _add_health(local: torch.Tensor, counts: torch.Tensor, extremes: torch.Tensor) -> None:
    """Add one quantized tensor's numbers, on the device."""
    metadata = local.get_metadata()  # type: ignore[attr-defined]
    components = {c.name: c.tensor for c in components_of(local, "weight")}
    data = next(components[n] for n in ("data", "rowwise_data", "columnwise_data") if n in components)
    element = getattr(metadata.get("fp8_dtype", metadata.get("fp4_dtype")), "name", "")
    four_bits = element == "kFloat4E2M1"
    codes = torch.stack([data & 0xF, data >> 4]) & 0x7 if four_bits else data & 0x7F
    counts += torch.stack(
        [(codes == _LARGEST[element]).sum(), (codes == 0).sum(), counts.new_tensor(codes.numel())]
    )
    scales = next((t for n, t in components.items() if n.endswith("scale_inv")), None)
    if four_bits or scales is None:
        return
    if scales.element_size() == 1:  # E8M0: an exponent with a bias of 127
        scales = torch.exp2(scales.view(torch.uint8).double() - 127)
    values = scales.double()
    extremes.copy_(torch.maximum(extremes, torch.stack([-values.min(), values.max()])))
