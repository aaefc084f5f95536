"""Description of a job to plan, with the meta model that it builds for one mesh."""

from __future__ import annotations

import contextlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from te_fsdp.checkpoint.portable.huggingface_config import Architecture, config_contents, read_config
from te_fsdp.errors import OrderError, PlacementError, PrecisionError, TeFsdpError
from te_fsdp.mesh import Meshes
from te_fsdp.mesh_checks import ALL_AXES
from te_fsdp.plan import StrategySpec
from te_fsdp.precision import MixedPrecisionPolicy
from te_fsdp.upstream import te as _te


class Recipe(NamedTuple):
    """A recipe of TE."""

    te_class: str = ""  #: In ``transformer_engine.common.recipe``
    available: str = ""  #: TE's function that checks whether the device supports it
    #: Bytes per value in one direction, including scales. Two directions need twice as much. Float8 on Blackwell is an
    #: exception: its GEMMs accept any layout, so one copy serves both directions.
    value_bytes: float = 0.0


RECIPE_ROWS = {
    "none": Recipe(),
    "delayed": Recipe("DelayedScaling", "is_fp8_available", 1.0),
    "current": Recipe("Float8CurrentScaling", "is_fp8_available", 1.0),
    "block": Recipe("Float8BlockScaling", "is_fp8_block_scaling_available", 1 + 4 / 128),
    "mxfp8": Recipe("MXFP8BlockScaling", "is_mxfp8_available", 1 + 1 / 32),
    "nvfp4": Recipe("NVFP4BlockScaling", "is_nvfp4_available", 0.5 + 1 / 16),
}
#: Recipe name -> TE's class in ``transformer_engine.common.recipe``.
RECIPES = {name: row.te_class for name, row in RECIPE_ROWS.items()}
#: Optimizer name -> number of states of the parameter's shape, without main weights.
OPTIMIZERS = {"adamw": 2, "fused-adam": 2, "sgd": 0}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a job's mesh axes. ``dp_shard`` excludes ``cp`` and ``ep``, as in ``Meshes.build``."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ALL_AXES:
            if getattr(self, axis) < 1:
                got, fix = getattr(self, axis), f"omit {axis} if it is not used"
                raise PlacementError(f"plan: {axis}", expected="1 or more", got=got, fix=fix)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.ep * self.tp

    def __str__(self) -> str:
        texts = [f"{axis}={getattr(self, axis)}" for axis in ALL_AXES if getattr(self, axis) > 1]
        return " x ".join(texts) or "one rank"


@dataclass(frozen=True)
class Job:
    """A model with its sharding and training options."""

    #: A Hugging Face folder, ``config.json`` or its contents; ``"module:function"``; or a function. The function
    #: returns the model on the meta device. If it takes an argument, it receives the ``te_fsdp.Meshes``.
    model: str | os.PathLike[str] | Mapping[str, Any] | Callable[..., nn.Module]
    recipe: str = "none"  #: Recipe of ``te.autocast`` for the GEMMs, one of :data:`RECIPES`
    #: Whether weights are quantized as well (``te.quantized_model_init`` with that recipe).
    quantized_weights: bool = False
    strategy: StrategySpec = "optim_grads_params"  #: ``strategy`` of ``te_fsdp.fully_shard``
    #: ``outer_strategy`` of ``te_fsdp.fully_shard``. With ``"optim"`` the job also calls
    #: ``te_fsdp.shard_optimizer``.
    outer_strategy: str = "no_shard"
    #: ``units`` of ``te_fsdp.fully_shard``. ``None`` means each TransformerLayer, or the layers and the head of a
    #: Hugging Face model.
    units: tuple[str, ...] | None = None
    precision: MixedPrecisionPolicy | None = None  #: ``precision`` of ``te_fsdp.fully_shard``
    #: One of :data:`OPTIMIZERS`, which are torch's AdamW and SGD with ``te_fsdp.main_weights``, and TE's FusedAdam.
    #: Its ``master_weights`` is true if a weight is quantized or below fp32.
    optimizer: str = "adamw"
    sequence: int = 4096  #: Tokens per sequence
    batch: int = 1  #: Sequences per microbatch and data-parallel rank
    #: Backward passes per optimizer step. The last one is marked with ``te_fsdp.microbatch``.
    microbatches: int = 1
    recompute: bool = False  #: Whether each unit is recomputed in backward (activation checkpointing)
    sequence_parallel: bool = True  #: Whether a Hugging Face model uses sequence parallelism over ``tp``
    #: Logits per token of an fp32 loss; 0 for no loss over logits. ``None`` means the vocabulary of the Hugging Face
    #: model, else 0.
    vocabulary: int | None = None
    #: Experts per token (top-k). ``None`` means the value of the Hugging Face model, else 2.
    experts_per_token: int | None = None

    def __post_init__(self) -> None:
        for name, options in (("recipe", tuple(RECIPES)), ("optimizer", tuple(OPTIMIZERS))):
            if getattr(self, name) not in options:
                got = repr(getattr(self, name))
                raise PlacementError(f"plan: {name}", expected=f"one of {', '.join(options)}", got=got)
        least = {"sequence": 1, "batch": 1, "microbatches": 1, "vocabulary": 0, "experts_per_token": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                fix = f"omit {name} for the default"
                raise PlacementError(f"plan: {name}", expected=f"{smallest} or more", got=value, fix=fix)
        if self.quantized_weights and self.recipe == "none":
            what, fix = "plan: quantized weights", "recipe='current'"
            raise PlacementError(what, expected="a recipe", got="recipe 'none'", fix=fix)

    def described(self) -> dict[str, Any]:
        """Return the fields as plain values for tables and files."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        model = self.model
        if isinstance(model, Mapping):
            values["model"] = model.get("model_type", "configuration")
        elif not isinstance(model, str):
            values["model"] = getattr(model, "__qualname__", None) or str(model)
        if isinstance(self.strategy, Mapping):
            values["strategy"] = {getattr(k, "__name__", k): name for k, name in self.strategy.items()}
        if self.precision is not None:
            policy = {item.name: getattr(self.precision, item.name) for item in fields(self.precision)}
            values["precision"] = {
                k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
                for k, v in policy.items()
            }
        return values | {"units": list(self.units) if self.units is not None else None}


@dataclass(frozen=True)
class Workload:
    """Workload of a microbatch on one rank."""

    tokens: int  #: Tokens of the rank's sequences; with ``cp``, its fraction of them
    vocabulary: int  #: Logits per token; 0: no loss over logits
    experts_per_token: int  #: Experts per token (top-k)
    sequence_parallel: bool  #: Whether tp ranks have different tokens in modules that are not sharded by tp

    def part(self, tp: int) -> int:
        """Return the tokens of a rank in a module that is not sharded by tp."""
        return -(-self.tokens // tp) if self.sequence_parallel else self.tokens

    def expert_rows(self, own_tp: int, tp: int) -> int:
        """Return the number of rows of a rank's experts, with tokens distributed equally.

        If tp shards the experts (``own_tp`` > 1), all tp ranks process the same tokens.
        """
        return (self.tokens if own_tp > 1 else self.part(tp)) * self.experts_per_token


def workload_of(job: Job, sizes: Sizes) -> Workload:
    """Return the workload of a microbatch on each rank. Local operation."""
    vocabulary, experts = job.vocabulary, job.experts_per_token
    if not is_function(job.model):
        config = config_contents(job.model)
        vocabulary = read_config(config).vocabulary if vocabulary is None else vocabulary
        experts = config.get("num_experts_per_tok") if experts is None else experts
    tokens = -(-job.sequence // sizes.cp) * job.batch
    return Workload(tokens, vocabulary or 0, experts or 2, job.sequence_parallel)


def build_model(job: Job, meshes: Meshes) -> tuple[nn.Module, tuple[str, ...] | None]:
    """Build the model on the meta device as one rank does. Local operation.

    Return the model and the names of its units; ``None`` for the default units. Raise PlacementError if the function
    does not exist or does not return a meta model, CheckpointError for an unsupported Hugging Face configuration.
    """
    quantized = contextlib.nullcontext()
    if job.quantized_weights:
        recipe = getattr(_te.recipes(), RECIPES[job.recipe])()
        quantized = _te.te().quantized_model_init(enabled=True, recipe=recipe)
    with quantized:
        if not is_function(job.model):
            about = read_config(job.model)
            try:
                model: nn.Module = Decoder(about, meshes, job.sequence_parallel)
            except (AssertionError, ValueError) as error:
                # Errors of te_fsdp name their fix already.
                if isinstance(error, TeFsdpError):
                    raise
                raise PlacementError(
                    f"plan: {about.model_type} model over tp={meshes.size('tp')}",
                    expected="model sizes divisible by tp",
                    got=f"TransformerEngine's {type(error).__name__}: {error}",
                    fix="choose a different tp size",
                ) from error
            # With tied weights the model has no separate head.
            units = ("layers.*",) if about.tied else ("layers.*", "head")
            return model, job.units or units
        model = _build_by_function(job, meshes)
    # Only functions of the user can get here with a model on a device.
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if real:
        raise PlacementError(
            f"plan: {job.described()['model']}",
            expected="a model on meta",
            got=f"{len(real)} parameters on a device, such as {real[0]}",
            why="A plan must not allocate the memory of the model",
            fix='build it with device="meta", or under torch.device("meta")',
        )
    return model, job.units


def require_recipe(job: Job) -> None:
    """Check that the device supports the job's recipe with TE's own check; raise PrecisionError otherwise. Local."""
    # Training makes this check on entering ``te.autocast``, which a plan never enters.
    if job.recipe == "none":
        return
    supported, reason = getattr(_te.te(), RECIPE_ROWS[job.recipe].available)(return_reason=True)
    if not supported:
        raise PrecisionError(
            f"plan: recipe {job.recipe!r}",
            expected="a recipe that the device supports",
            got="compute capability {}.{}".format(*_te.te().get_device_compute_capability()),
            why=f"TransformerEngine: {reason}",
            fix="plan for a device that supports it (--arch 10.0 on a machine without a GPU), or use a different "
            "recipe",
        )


def is_function(model: object) -> bool:
    """Return whether ``model`` is a function that builds a model, or the name of one."""
    if isinstance(model, str):
        return ":" in model and not Path(model).expanduser().exists()
    return callable(model)


def _build_by_function(job: Job, meshes: Meshes) -> nn.Module:
    """Call the user's function that builds a model. Raise PlacementError unless it returns a module."""
    function: Any = job.model
    what, fix = f"plan: model {job.described()['model']!r}", "def build(meshes): return Model(...)"
    expected = "a function that takes te_fsdp.Meshes or nothing and returns the model"
    if isinstance(job.model, str):
        try:
            function = pkgutil.resolve_name(job.model)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            module, _, attribute = job.model.partition(":")
            file = Path(module)
            raise PlacementError(
                f"plan: model {job.model!r}",
                expected="module:function, or a folder with config.json",
                got=f"{type(error).__name__}: {error}",
                fix=f"{file.stem}:{attribute}, in the folder of {file.name}"
                if file.suffix == ".py"
                else "run it where python -c 'import module' works, or set PYTHONPATH",
            ) from error
    if not callable(function) or isinstance(function, nn.Module):
        raise PlacementError(what, expected=expected, got=f"a {type(function).__name__}", fix=fix)
    parameters = inspect.signature(function).parameters
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in named if p.default is p.empty]
    if len(needed) > 1:
        raise PlacementError(what, expected=expected, got=f"one that needs {', '.join(needed)}", fix=fix)
    model = function(meshes) if parameters else function()
    if not isinstance(model, nn.Module):
        raise PlacementError(what, expected=expected, got=f"one that returns {type(model).__name__}", fix=fix)
    return model


# ------------------------------------------------------------------------------------------------- Hugging Face models


class _Shapes(nn.Module):
    """A module that is planned but never run."""

    def forward(self, *inputs: Any) -> Any:
        """Raise OrderError. The method exists because FSDP2 requires modules with a forward."""
        raise OrderError(
            "forward of a planned model", why="It has shapes but no values", fix="build your own"
        )


class Decoder(_Shapes):
    """A Hugging Face model built as in docs/huggingface.md: embedding, layers, norm and head.

    The embedding and the head are torch modules, replicated over ``tp``. Each tp rank has a fraction of the tokens.
    """

    def __init__(self, about: Architecture, meshes: Meshes, sequence_parallel: bool) -> None:
        super().__init__()
        te, tp = _te.te(), meshes.size("tp")
        split = sequence_parallel and tp > 1
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "meta"}
        factory: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
        self.embedding = nn.Embedding(about.vocabulary, about.hidden, **factory)
        if about.positions:
            self.positions = nn.Embedding(about.positions, about.hidden, **factory)
        parallel = {**meshes.te_kwargs(), "set_parallel_mode": tp > 1, "sequence_parallel": split}
        self.layers = nn.ModuleList()
        for _ in range(about.layers):
            if about.experts is not None:
                self.layers.append(Layer(about, meshes, parallel, options))
            else:
                kwargs = {"fuse_qkv_params": True, **about.te_kwargs(), **parallel, **options}
                self.layers.append(te.TransformerLayer(**kwargs))
        self.norm = _norm(about, split)
        if not about.tied:
            self.head = nn.Linear(about.hidden, about.vocabulary, bias=False, **factory)
        for module in self.children():
            if split and isinstance(module, nn.Embedding | nn.Linear):
                # te_fsdp sums the gradients over the tp ranks because each rank has different tokens.
                module.weight.sequence_parallel = True  # type: ignore[assignment]


class Gating(_Shapes):
    """Activation between the two GEMMs of experts: the activated gate times the other half."""

    def __init__(self, width: int, hidden: int = 0) -> None:
        """Set the sizes. ``hidden`` is the model's hidden size if expert results are summed per token, else 0."""
        super().__init__()
        self.width, self.hidden = width, hidden


class Layer(_Shapes):
    """A decoder layer with experts. ``te.TransformerLayer`` does not support experts."""

    def __init__(
        self, about: Architecture, meshes: Meshes, cut: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        te, split = _te.te(), bool(cut["sequence_parallel"])
        kwargs = {"fuse_qkv_params": True, **about.te_attention_kwargs(), **cut, **options}
        self.attention = te.MultiheadAttention(**kwargs)
        experts, plain = about.experts, {"bias": False, **options}
        assert experts is not None
        num_experts = len(meshes.experts(experts.count))
        self.mlp_norm = _norm(about, split)
        self.router = nn.Linear(about.hidden, experts.count, bias=False, dtype=torch.bfloat16, device="meta")
        self.router.weight.sequence_parallel = split  # type: ignore[assignment]
        # Gate and up-projection share one matrix, so tp must not shard its rows. Each tp rank has a fraction of
        # the tokens and all of these experts.
        self.experts_fc1 = te.GroupedLinear(num_experts, about.hidden, 2 * experts.ffn, **plain)
        self.experts_gating = Gating(experts.ffn, about.hidden)
        self.experts_fc2 = te.GroupedLinear(num_experts, experts.ffn, about.hidden, **plain)
        if experts.shared_ffn:
            self.shared_fc1 = te.Linear(about.hidden, 2 * experts.shared_ffn, **plain)
            self.shared_gating = Gating(experts.shared_ffn)
            self.shared_fc2 = te.Linear(experts.shared_ffn, about.hidden, **plain)


def _norm(about: Architecture, split: bool) -> nn.Module:
    kind = _te.te().RMSNorm if about.style == "llama" else _te.te().LayerNorm
    return kind(
        about.hidden, eps=about.norm_eps, dtype=torch.bfloat16, device="meta", sequence_parallel=split
    )
