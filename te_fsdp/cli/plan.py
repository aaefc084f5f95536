"""The commands that show a plan: ``te-fsdp plan``, ``te-fsdp report``."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import Positional, arg

from te_fsdp import planning
from te_fsdp.checkpoint.storage import expanded
from te_fsdp.cli import bytes_of, print_json, print_table
from te_fsdp.errors import CheckpointError, PlacementError
from te_fsdp.planning import LINK_RATIO, Candidate, Job, Machine, Plan, Sizes, StepTime, plan
from te_fsdp.precision import MixedPrecisionPolicy

_Dtype = Literal["model", "float32", "bfloat16", "float16"]
_ARCHITECTURE = "9.0"
_Json = Annotated[bool, arg(name="json", help="One JSON document on stdout instead of text.")]
#: Axes that a search fixes if their sizes are given.
_FIXED = ("dp_replicate", "dp_shard", "ep", "tp")


@dataclass(frozen=True)
class _Mesh:
    """Mesh of the job."""

    gpus: Annotated[int | None, arg(help="GPUs of the job. dp_shard is inferred from the other axes.")] = None
    dp_replicate: int = 1
    dp_shard: Annotated[int, arg(help="-1: inferred from --gpus and the other axes.")] = -1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    arch: Annotated[
        Literal["9.0", "10.0"] | None, arg(help="Hopper or Blackwell; default: this machine's GPU, else 9.0.")
    ] = None
    memory: Annotated[str, arg(help="Memory of a GPU with its unit, such as 80GiB or 141GB.")] = "80GiB"

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of all axes; raise PlacementError if their product is not the number of GPUs."""
        if self.gpus is not None and self.gpus < 1:
            fix = "--gpus with the number of GPUs of the job, or omit it"
            raise PlacementError("plan: gpus", expected="1 or more", got=self.gpus, fix=fix)
        others = Sizes(self.dp_replicate, 1, self.cp, self.ep, self.tp).ranks
        shard = self.dp_shard if self.dp_shard != -1 else max((self.gpus or others) // others, 1)
        sizes = Sizes(self.dp_replicate, shard, self.cp, self.ep, self.tp)
        if self.gpus is not None and sizes.ranks != self.gpus:
            raise PlacementError(
                "plan: sizes of the mesh",
                expected=f"sizes whose product is --gpus {self.gpus}",
                got=str(sizes),
                fix="choose sizes that divide it; --dp-shard -1 (default) is inferred from the other axes",
            )
        return sizes


@dataclass(frozen=True)
class _Work:
    """Sharding and training options."""

    recipe: Annotated[
        Literal["none", "delayed", "current", "block", "mxfp8", "nvfp4"],
        arg(help="Recipe of the GEMMs (te.autocast); none: bf16."),
    ] = "none"
    quantized_weights: Annotated[bool, arg(help="Quantize weights as well (te.quantized_model_init).")] = (
        False
    )
    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    outer_strategy: Literal["no_shard", "optim"] = "no_shard"
    units: Annotated[
        tuple[str, ...], arg(help="Names of FSDP2 units, such as 'layers.*'. Default: layers and head.")
    ] = ()
    main_params: Annotated[_Dtype | None, arg(help="main_params_dtype of the precision policy.")] = None
    main_grads: Annotated[_Dtype | None, arg(help="main_grads_dtype of the precision policy.")] = None
    grad_comm: Annotated[_Dtype | None, arg(help="grad_comm_dtype of the precision policy.")] = None
    optimizer: Literal["adamw", "fused-adam", "sgd"] = "adamw"
    sequence: Annotated[int, arg(help="Tokens per sequence.")] = 4096
    batch: Annotated[int, arg(help="Sequences per microbatch and data-parallel rank.")] = 1
    microbatches: Annotated[int, arg(help="Backward passes per optimizer step.")] = 1
    recompute: Annotated[bool, arg(help="Recompute each unit in backward.")] = False
    no_sequence_parallel: Annotated[bool, arg(help="Disable sequence parallelism over tp.")] = False
    vocabulary: Annotated[
        int | None, arg(help="Logits per token. Default: vocabulary of a Hugging Face model.")
    ] = None
    experts_per_token: int | None = None

    def job(self, model: str) -> Job:
        """Return the job of a model with these options."""
        given = {name: getattr(self, name) for name in ("main_params", "main_grads", "grad_comm")}
        dtypes: dict[str, Any] = {
            f"{name}_dtype": None if dtype == "model" else getattr(torch, dtype)
            for name, dtype in given.items()
            if dtype is not None
        }
        shared = {item.name for item in fields(Job)} & {item.name for item in fields(self)} - {"units"}
        return Job(
            model,
            units=self.units or None,
            precision=MixedPrecisionPolicy(**dtypes) if dtypes else None,
            sequence_parallel=not self.no_sequence_parallel,
            **{name: getattr(self, name) for name in shared},
        )


@dataclass(frozen=True)
class _Speeds:
    """Achieved speeds of the machine. --tflops enables the estimate of a step's time."""

    tflops: Annotated[
        float | None, arg(help="TFLOP/s of GEMMs in the recipe's format, as achieved in a step.")
    ] = None
    attention_tflops: Annotated[float | None, arg(help="TFLOP/s of attention. Default: as GEMMs.")] = None
    within: Annotated[float, arg(help="GB/s that a GPU receives within its node.")] = Machine.within
    between: Annotated[float, arg(help="GB/s that a GPU receives between nodes.")] = Machine.between
    memory_bandwidth: Annotated[float, arg(help="GB/s of a GPU's memory.")] = Machine.memory
    contention: Annotated[
        float, arg(help="Fraction of overlapped communication time that computation loses.")
    ] = Machine.contention
    host_ms: Annotated[float, arg(help="Measured milliseconds in which the host issues a step.")] = (
        Machine.host
    )

    def machine(self, node: int) -> Machine | None:
        """Return the machine with ``node`` GPUs per node, or ``None`` without --tflops."""
        if self.tflops is None:
            return None
        links = self.within, self.between, self.memory_bandwidth
        return Machine(self.tflops, self.attention_tflops, *links, node, self.contention, self.host_ms)


def show_plan(
    model: Positional[str],
    /,
    mesh: Annotated[_Mesh, arg(name="")] = _Mesh(),
    work: Annotated[_Work, arg(name="")] = _Work(),
    speeds: Annotated[_Speeds, arg(name="")] = _Speeds(),
    *,
    search: Annotated[bool, arg(help="Try all meshes of --gpus with the given sizes.")] = False,
    node: Annotated[int, arg(help="GPUs per node, for --search and --tflops.")] = 8,
    as_json: _Json = False,
) -> int:
    """Estimate memory and communication of each rank of a job, on one CPU without the job's GPUs.

    The model is a Hugging Face config.json, a folder with one, or module:function. The function takes
    te_fsdp.Meshes or nothing, and returns the model on the meta device.
    """
    job, limit, machine = work.job(model), _memory(mesh.memory), speeds.machine(node)
    if search and mesh.gpus is None:
        raise PlacementError("plan --search", expected="--gpus", fix="add --gpus with the number of GPUs")
    # Before the plan, which takes seconds for a large model.
    if machine is None and speeds != _Speeds():
        why, fix = "They would have no effect", "add --tflops, or omit the other speeds"
        raise PlacementError("plan: speeds of the machine", expected="--tflops", got="none", why=why, fix=fix)
    # A search chooses the sizes itself, so the given ones need not multiply to the number of GPUs.
    sizes = mesh.sizes if not search else Sizes()
    if torch.cuda.is_available():
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        if mesh.arch not in (None, capability):
            why = "TransformerEngine queries this machine's GPU"
            raise PlacementError(f"plan: arch {mesh.arch}", expected=capability, why=why, fix="omit --arch")
    else:
        import te_fsdp.emulation

        # A meta model runs no kernels, so this variable does not matter.
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
        emulation = te_fsdp.emulation
        (emulation.switch_arch if emulation.active() else emulation.install)(mesh.arch or _ARCHITECTURE)
    if search and mesh.gpus is not None:
        fixed = {axis: size for axis in _FIXED if (size := getattr(mesh, axis)) not in (1, -1)}
        found_meshes = planning.search(job, gpus=mesh.gpus, memory=limit, node=node, cp=mesh.cp, fixed=fixed)
        return _show_search(found_meshes, mesh.gpus, limit, node, machine, as_json)
    estimate = plan(job, sizes)
    step = None if machine is None else estimate.time(machine)
    if as_json:
        timed = {} if step is None else {"step": asdict(step) | {"seconds": step.seconds}}
        print_json(estimate.as_json() | timed)
    else:
        _show(estimate, limit)
        if step is not None:
            _show_step(step, estimate)
    return 0 if estimate.peak.bytes <= limit else 1


def _memory(text: str) -> int:
    """Return the bytes of a size with a unit; raise PlacementError for a size without one."""
    size = bytes_of(text, unit=True)
    if size is None:
        bare = bytes_of(text) is not None
        raise PlacementError(
            f"plan: memory {text!r}",
            expected="a size with a unit, such as 80GiB or 141GB",
            got="a number without a unit" if bare else None,
            fix=f"--memory {text.strip()}GiB" if bare else "",
        )
    return size


# ------------------------------------------------------------------------------------------------------------ tables


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _show(estimate: Plan, limit: int | None) -> None:
    """Print a plan as tables. A plan from a file has no memory limit and is printed with its parameters."""
    job, sizes = estimate.job, estimate.sizes
    print(f"{job['model']}: {estimate.parameters / 1e9:.2f} billion parameters, {sizes.ranks} ranks, {sizes}")
    if limit is None:
        print(estimate.report)
    rank = {
        **estimate.held,
        "between steps": estimate.held_bytes,
        "gradients, reduced": estimate.gradients,
        "largest unsharded unit": estimate.largest_unit,
        "activations": estimate.activations,
    }
    peak = {**estimate.peak.parts, "peak": estimate.peak.bytes}
    for title, sizes_of in (("Largest rank, GiB", rank), (f"At the peak, {estimate.peak.when}", peak)):
        rows = [(label, _gib(size)) for label, size in sizes_of.items()]
        print_table(title, ("what", "GiB"), rows, right=("GiB",))
    received = [(t.axis, t.what, t.collective, t.ranks, _gib(t.bytes)) for t in estimate.traffic]
    columns = ("axis", "what", "collective", "ranks", "GiB")
    print_table("Received by a rank in a step", columns, received, right=columns[-2:])
    model, optimizer = estimate.checkpoint["model"], estimate.checkpoint["optimizer"]
    print(f"checkpoint: {_gib(model + optimizer)} GiB, of which the model {_gib(model)}")
    for note in estimate.notes:
        print(f"note: {note}")
    if limit is not None:
        fits = "fits into" if estimate.peak.bytes <= limit else "does NOT fit into"
        print(f"{_gib(estimate.peak.bytes)} GiB {fits} {_gib(limit)} GiB")


def _show_step(step: StepTime, estimate: Plan) -> None:
    rows = [("GEMMs and attention", step.compute), ("optimizer", step.optimizer)]
    rows += [(f"waiting for {axis}", seconds) for axis, seconds in step.exposed.items()]
    rows += [("slowdown by overlapped communication", step.contended)]
    rows += [("waiting for the host", step.waits)] if step.host else []
    rows += [("a step", step.seconds)]
    cells = [(label, f"{1e3 * seconds:.1f}") for label, seconds in rows]
    print_table("A step, estimated, ms", ("what", "ms"), cells, right=("ms",))
    flops, job, sizes = sum(estimate.flops.values()), estimate.job, estimate.sizes
    tokens = job["sequence"] * job["batch"] * job["microbatches"] / (sizes.tp * sizes.cp)
    print(f"{tokens / step.seconds:,.0f} tokens/s and {flops / step.seconds / 1e12:.0f} TFLOP/s for each GPU")


def _show_search(
    meshes: list[Candidate], gpus: int, limit: int, node: int, machine: Machine | None, as_json: bool
) -> int:
    """Print the meshes of a search as a table or as JSON, ordered by time if speeds are given."""
    if machine is not None:  # those that fit come first, ordered by time
        meshes = sorted(
            meshes, key=lambda mesh: math.inf if mesh.reason else _seconds(mesh, machine) / mesh.tokens
        )
    if as_json:
        candidates = []
        for candidate in meshes:
            about: dict[str, Any] = {"sizes": asdict(candidate.sizes), "fits": not candidate.reason}
            about["reason"] = candidate.reason
            if candidate.plan is not None:
                about |= {"peak": candidate.plan.peak.bytes, "held": candidate.plan.held_bytes}
                about |= {n: getattr(candidate, n) for n in ("within", "between", "tokens", "cost")}
                about |= {} if machine is None else {"seconds": _seconds(candidate, machine)}
            candidates.append(about)
        print_json({"memory": limit, "gpus": gpus, "candidates": candidates})
    else:
        columns = ["peak", "left", "in a node", "between nodes", "tokens", "bytes per token"]
        columns += [] if machine is None else ["ms"]
        title = f"Meshes of {gpus} GPUs with {_gib(limit)} GiB, best first; GiB"
        rows = []
        for candidate in meshes:
            cells = [""] * len(columns)
            if candidate.plan is not None:
                peak = candidate.plan.peak.bytes
                cells = [*map(_gib, (peak, limit - peak, candidate.within, candidate.between))]
                cells += [f"{candidate.tokens:,.0f}", f"{candidate.cost:,.0f}"]
                cells += [] if machine is None else [f"{1e3 * _seconds(candidate, machine):.1f}"]
            rows.append((str(candidate.sizes), *cells, candidate.reason))
        print_table(title, ("mesh", *columns, "remark"), rows, right=columns)
        print(
            f"bytes per token: (in a node / {LINK_RATIO} + between nodes) / tokens per GPU and step; a node has "
            f"{node} GPUs, with links assumed to be {LINK_RATIO} times as fast as those between nodes"
        )
    return 0 if any(not candidate.reason for candidate in meshes) else 1


def _seconds(candidate: Candidate, machine: Machine) -> float:
    assert candidate.plan is not None
    return candidate.plan.time(machine).seconds


# ------------------------------------------------------------------------------------------------------------ report


def show_report(path: Positional[Path], /, *, as_json: _Json = False) -> int:
    """Show a saved plan (a file of te-fsdp plan --json), parameter by parameter.

    For a running job, call te_fsdp.report(model). For a checkpoint, run te-fsdp ckpt inspect.
    """
    path = expanded(path)
    if path.is_dir():
        raise CheckpointError(
            f"{path}: not a plan",
            expected="a file of te-fsdp plan --json",
            got="a directory",
            fix=f"te-fsdp ckpt inspect {path}",
        )
    if not path.exists():
        raise CheckpointError(f"{path}: path does not exist", fix="check the path")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fix = "a file of te-fsdp plan --json"
        raise CheckpointError(f"{path}: not valid JSON ({error})", fix=fix) from error
    estimate = Plan.from_json(value if isinstance(value, dict) else {}, str(path))
    print_json(estimate.as_json()) if as_json else _show(estimate, None)
    return 0
