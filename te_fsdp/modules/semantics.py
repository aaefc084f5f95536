"""What a model's modules compute beyond their weights: epsilons, activations, heads, windows and the like.

Two models with tensors of the same names and shapes may be different functions. A checkpoint records what tells them
apart, under the names of the constructors' arguments; :data:`SETTINGS` says what a difference means. Facts are those of
TransformerEngine 2.18 to 2.20.2 (``pytorch/{transformer,module,attention,ops}``) and of ``torch.nn``. What does not
change the function of unsharded weights is left out: sizes (shapes tell), parallelism, dtypes, memory, speed,
``layer_number`` (TE divides scores by it and multiplies them again), what a module returns beside its output.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from te_fsdp import _te, _torch
from te_fsdp.modules.callables import is_told, text_of

if TYPE_CHECKING:
    from torch import nn

#: ``error``: another function of the same weights. ``strict``: whether it matters only the user knows. ``note``: the
#: same function, or another only while training. ``names``: names of parameters tell.
Effect = Literal["error", "strict", "note", "names"]

UNKNOWN = object()
#: Stands in a difference for what one of the two models does not tell.
_NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Setting:
    """What is known of one setting.

    Attributes:
        effect: What a difference means.
        absent: The value that a module without it acts by: of an older TE, or of the other library.
    """

    effect: Effect
    absent: Any = UNKNOWN


_ERROR = Setting("error")
_OFF = Setting("error", None)

#: Settings of TE's modules, and those of ``torch.nn`` that are no plain errors.
SETTINGS: dict[str, Setting] = {
    # norms
    "normalization": _ERROR,
    "eps": _ERROR,
    "zero_centered_gamma": Setting("error", False),
    # activations
    "activation": _ERROR,
    "activation_params": _OFF,
    "approximate": Setting("error", "tanh"),  # TE's GELU is the approximation
    "glu_interleave_size": _OFF,
    "glu_linear_offset": Setting("error", 1.0),
    "limit": _ERROR,
    "alpha": _ERROR,
    "beta1": _ERROR,
    "beta2": _ERROR,
    "tanh_clamp_scale": _ERROR,
    "scale": _ERROR,
    "scale_bias": Setting("error", False),
    "shape": _ERROR,
    # attention
    "num_attention_heads": _ERROR,
    "num_gqa_groups": _ERROR,
    "kv_channels": _ERROR,
    "qkv_weight_interleaved": _ERROR,
    "attention_type": _ERROR,
    "softmax_scale": _ERROR,
    "softmax_type": Setting("error", "vanilla"),
    "softcap": Setting("error", 0.0),
    "attn_mask_type": _ERROR,
    "window_size": _ERROR,
    "bottom_right_diagonal": _ERROR,
    "rotary_pos_interleaved": Setting("error", False),
    "qk_norm_type": _OFF,
    "qk_norm_eps": _OFF,
    "qk_norm_before_rope": Setting("error", False),
    "num_householder": _ERROR,
    "rotary_base": Setting("error", 10000.0),
    "interleaved": Setting("error", False),
    "seq_len_interpolation_factor": _OFF,
    "pretrained_max_position_embeddings": _OFF,
    # layers
    "layer_type": _ERROR,
    "self_attn_mask_type": _ERROR,
    "enc_dec_attn_mask_type": _ERROR,
    "enc_dec_window_size": _ERROR,
    "enc_dec_bottom_right_diagonal": _ERROR,
    "output_layernorm": _ERROR,
    "parallel_attention_mlp": Setting("error", False),
    "apply_residual_connection_post_layernorm": _ERROR,
    # how tensors are given to a module
    "qkv_format": Setting("strict"),
    "attn_input_format": Setting("strict"),
    "batch_first": Setting("strict"),
    "padding_idx": Setting("strict", None),
    # training alone
    "hidden_dropout": Setting("note", 0.0),
    "attention_dropout": Setting("note", 0.0),
    "drop_path_rate": Setting("note", 0.0),
    "dropout": Setting("note", 0.0),
    "p": Setting("note", 0.0),
    "momentum": Setting("note"),
    "scale_grad_by_freq": Setting("note", False),
    "label_smoothing": Setting("note"),
    "ignore_index": Setting("note"),
    "reduction": Setting("note"),
    # parameters are there, or are not
    "bias": Setting("names"),
    "fuse_qkv_params": Setting("names"),
    "input_layernorm": Setting("names"),
}

# fmt: off
#: Arguments of ``torch.nn`` that shapes and names of parameters tell, or that do not change the function.
_NOT_RECORDED = frozenset((
    "self", "args", "kwargs", "device", "dtype", "inplace", "sparse", "process_group", "return_indices", "bias",
    "affine", "elementwise_affine", "enable_nested_tensor", "mask_check", "normalized_shape", "num_parameters",
    "num_embeddings", "embedding_dim", "embed_dim", "kdim", "vdim", "in_features", "in1_features",
    "in2_features", "out_features", "num_features", "in_channels", "out_channels", "num_channels", "input_size",
    "hidden_size", "proj_size",
))
#: Containers, bases, what exists on some meshes alone, and what its owner tells.
_NOT_MODULES = frozenset((
    "Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "TransformerEngineBaseModule", "BasicOperation", "FusedOperation", "FusibleOperation", "AllGather", "AllReduce",
    "ReduceScatter", "Fp8Padding", "Fp8Unpadding", "DropPath",
))
# fmt: on
#: Kinds that compute the same in TE and in torch.
_ALIKE = frozenset(("Linear", "LayerNorm", "RMSNorm", "GELU", "ReLU", "SiLU", "Dropout"))
#: Part of a class's name -> kind: the same function where models are evaluated. Nothing is dropout of nothing.
_SAME = (("Dropout", "Dropout"), ("Identity", "Dropout"), ("BatchNorm", "BatchNorm"))
#: Stands for the library of a user's own classes.
OWN = "own"
_CLAMPED_DEFAULTS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


@dataclass(frozen=True)
class Semantics:
    """What one module computes with its weights.

    Attributes:
        kind: Its class in the library, whatever subclasses stand in front: ``"LayerNormMLP"``, ``"GELU"``.
        library: ``"te"`` or ``"torch"``.
        settings: Argument of the constructor -> value, in plain values of JSON (tuples are lists). Windows, diagonals
            and the parameters of activations are those in effect.
    """

    kind: str
    library: str
    settings: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """A setting; one that this module does not have by the value that it acts by.

        Raises:
            KeyError: Neither.
        """
        if name in self.settings:
            return self.settings[name]
        absent = SETTINGS[name].absent
        if absent is UNKNOWN:
            raise KeyError(name)
        return absent


# --- reading


def semantics_of(model: nn.Module) -> dict[str, Semantics]:
    """What the modules of a model compute, by name without what wrappers add. Local operation.

    TE's modules and torch's own, subclasses included; of a user's own classes nothing is known.
    """
    found: dict[str, Semantics] = {}
    inside: str | None = None
    for prefix, module in model.named_modules():
        known = known_kind(type(module))
        if known is None or (inside is not None and prefix.startswith(inside)):
            continue
        name = _torch.without_wrappers(prefix)
        found[name] = known.read(module) if known.arguments else known.bare
        if known.kind == "DotProductAttention":  # its children are its backends
            inside = f"{prefix}." if prefix else ""
    return found


@dataclass(frozen=True)
class _Known:
    """A library's class, with the arguments that its modules may keep."""

    kind: str
    library: str
    arguments: tuple[str, ...]

    @functools.cached_property
    def bare(self) -> Semantics:
        """That of a module without settings."""
        return Semantics(self.kind, self.library, {})

    def read(self, module: nn.Module) -> Semantics:
        settings = dict(_plain_values(self.arguments, module))
        derive = _DERIVED.get(self.kind) if self.library == "te" else None
        if derive is not None:
            derive(module, settings)
        return Semantics(self.kind, self.library, settings)


@functools.cache
def known_kind(cls: type) -> _Known | None:
    """The stock class behind a module's: bound, sharded and users' classes stand in front of it."""
    for base in cls.__mro__:
        packages = {"te": "transformer_engine.pytorch.", "torch": "torch.nn.modules."}
        library = next((own for own, name in packages.items() if base.__module__.startswith(name)), None)
        if library is None:
            continue
        kind = base.__name__
        if kind in _NOT_MODULES or kind.startswith("_"):
            return None
        # torch.nn names some arguments there alone (LSTM).
        arguments = dict.fromkeys(
            (*inspect.signature(base.__init__).parameters, *getattr(base, "__constants__", ()))
        )
        names = [a for a in arguments if (a in SETTINGS if library == "te" else a not in _NOT_RECORDED)]
        return _Known(next((one for part, one in _SAME if part in kind), kind), library, tuple(names))
    return None


def _plain_values(names: tuple[str, ...], module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name in names:
        value = plain(_te.argument_of(module, name, UNKNOWN))
        if value is not UNKNOWN:
            yield name, value


def plain(value: Any) -> Any:
    """A value as JSON gives it back; functions in words."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        items = [plain(item) for item in value]
        return UNKNOWN if UNKNOWN in items else items
    return text_of(value) if callable(value) and not hasattr(value, "named_modules") else UNKNOWN


def _attention(module: Any, settings: dict[str, Any]) -> None:
    """Channels of a head; q and k norms; whether one parameter holds query, key and value."""
    if hasattr(module, "core_attention"):
        settings["kv_channels"] = module.hidden_size_per_attention_head
        norm = module.q_norm if hasattr(module, "q_norm") else None
        known = None if norm is None else known_kind(type(norm))
        settings["qk_norm_type"] = None if known is None else known.kind
        settings["qk_norm_eps"] = None if norm is None else norm.eps
        fused = [getattr(module, name, None) for name in ("layernorm_qkv", "qkv", "key_value")]
        settings["fuse_qkv_params"] = any(m is not None and "weight" in m._parameters for m in fused)
    else:
        channels = [module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v]
        settings["kv_channels"] = channels[0] if channels[0] == channels[1] else channels
        settings.setdefault("softmax_scale", module.unfused_attention.softmax_scale)  # before TE 2.20
    _mask(settings)


def _mask(settings: dict[str, Any], prefix: str = "", mask: str = "attn_mask_type") -> None:
    """Window and diagonal as they act: TE takes them from the mask where they are left out or contradict it."""
    causal = "causal" in settings[mask]
    left, right = settings.get(f"{prefix}window_size") or (-1, -1)
    right = 0 if causal else -1 if (left, right) == (-1, 0) else right
    settings[f"{prefix}window_size"] = [left, right]
    given = settings.get(f"{prefix}bottom_right_diagonal")
    settings[f"{prefix}bottom_right_diagonal"] = "bottom_right" in settings[mask] or (
        not causal and given is not False
    )


def _layer(module: Any, settings: dict[str, Any]) -> None:
    settings["drop_path_rate"] = 0.0 if module.drop_path is None else module.drop_path.drop_prob
    _mask(settings, mask="self_attn_mask_type")
    if settings["layer_type"] == "decoder":
        _mask(settings, "enc_dec_", "enc_dec_attn_mask_type")
        return
    for name in [name for name in settings if name.startswith("enc_dec_")]:
        del settings[name]


def _mlp(module: Any, settings: dict[str, Any]) -> None:
    clamped = module.activation == "clamped_swiglu"
    settings["activation_params"] = (
        {**_CLAMPED_DEFAULTS, **(module.activation_params or {})} if clamped else None
    )


_DERIVED: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "DotProductAttention": _attention,
    "MultiheadAttention": _attention,
    "TransformerLayer": _layer,
    "LayerNormMLP": _mlp,
}


# --- in a file


def to_json(found: Mapping[str, Semantics]) -> dict[str, Any]:
    """Semantics by name as plain values of JSON; what several modules share stands there once."""
    kinds: dict[str, int] = {}
    listed: list[dict[str, Any]] = []
    modules = {}
    for name, one in found.items():
        index = modules[name] = kinds.setdefault(repr(one), len(listed))
        if index == len(listed):
            listed.append({"kind": one.kind, "library": one.library, "settings": dict(one.settings)})
    return {"kinds": listed, "modules": modules}


#: A record of a model of which nobody knows what its modules compute.
NOTHING: Mapping[str, Any] = {"recipes": [], **to_json({})}


def from_json(recorded: Mapping[str, Any], *, own: bool = False) -> dict[str, Semantics]:
    """What :func:`to_json` was given: of the libraries' modules, or of a user's own."""
    kinds = [Semantics(one["kind"], one["library"], one["settings"]) for one in recorded["kinds"]]
    found = {name: kinds[index] for name, index in recorded["modules"].items()}
    return {name: one for name, one in found.items() if (one.library == OWN) == own}


# --- comparing


@dataclass(frozen=True)
class Difference:
    """One setting of one module that is not the same in two models.

    Attributes:
        name: ``<module>.<setting>``.
        then: Saved value.
        now: The model's.
        effect: What it means.
    """

    name: str
    then: Any
    now: Any
    effect: Effect

    def __str__(self) -> str:
        """The two values in words."""
        return f"saved {self.then}, model has {self.now}"


def differences(
    saved: Mapping[str, Semantics], here: Mapping[str, Semantics], tensors: Iterable[str] = ()
) -> list[Difference]:
    """What differs between the modules of two models. Local operation.

    Args:
        saved: Of one.
        here: Of the other.
        tensors: Names of parameters and buffers that only one model has: these tell of a module that it alone has. Of
            others, a user's class may stand on the other side, or a module without tensors be gone.
    """
    found = []
    for name in saved.keys() & here.keys():
        for setting, then, now, effect in _compare(saved[name], here[name]):
            found.append(Difference(f"{name}.{setting}".lstrip("."), then, now, effect))
    alone = saved.keys() ^ here.keys()
    owners = {name[:at] for name in tensors for at, c in enumerate(name) if c == "."} if alone else set()
    for name in alone - owners:
        if name.rpartition(".")[0] not in alone:
            then, now = (_class(side[name]) if name in side else _NOT_KNOWN for side in (saved, here))
            found.append(Difference(f"{name}.class".lstrip("."), then, now, "note"))
    return sorted(found, key=lambda d: d.name)


def in_words(found: Iterable[Difference], words: str = "saved {}, model has {}") -> list[str]:
    """One text per setting and pair of values, with its modules; one for all that only one model tells."""
    groups: dict[str, list[str]] = {}
    untold: dict[str, list[str]] = {}
    for one in found:
        module, _, setting = one.name.rpartition(".")
        if _NOT_KNOWN in (one.then, one.now):
            untold.setdefault(setting, []).append(module)
        else:
            groups.setdefault(f"{setting}: {words.format(one.then, one.now)}", []).append(module)
    texts, rest = (
        [text + (f" ({folded(names)})" if any(names) else "") for text, names in each.items()]
        for each in (groups, untold)
    )
    return texts + ([f"known of one alone, and not compared: {'; '.join(rest)}"] if rest else [])


def folded(names: Iterable[str]) -> str:
    """Names of modules; many that differ in numbers alone as a pattern."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name or "model")
    count = sum(map(len, patterns.values()))
    shown = [p if len(alike) > 3 else ", ".join(alike) for p, alike in patterns.items()]
    return ", ".join(shown) + (f": {count} modules" if count > 3 else "")


def deciding(here: Mapping[str, Semantics]) -> str:
    """The settings of a model that another one of the same tensors may not share, in words; empty if it has none."""
    values: dict[str, dict[str, None]] = {}
    for one in here.values():
        for setting, value in one.settings.items():
            if setting in SETTINGS and SETTINGS[setting].effect == "error":
                values.setdefault(setting, {})[str(value)] = None
    return ", ".join(f"{setting} {' or '.join(found)}" for setting, found in sorted(values.items()))


def _compare(saved: Semantics, here: Semantics) -> Iterator[tuple[str, Any, Any, Effect]]:
    if saved is here:
        return
    if (saved.kind, saved.library) != (here.kind, here.library):
        alike = saved.kind == here.kind and saved.kind in _ALIKE
        yield "class", _class(saved), _class(here), "note" if alike else "error"
        if not alike:
            return
    for setting in sorted({*saved.settings, *here.settings}):
        known = SETTINGS.get(setting, _ERROR)
        then, now = (s.settings.get(setting, known.absent) for s in (saved, here))
        if same(then, now) or known.effect == "names":
            continue
        effect = known.effect
        if UNKNOWN in (then, now):  # a setting that one version of a library has
            effect, then, now = "note", *(_NOT_KNOWN if v is UNKNOWN else v for v in (then, now))
        elif not (is_told(then) and is_told(now)):
            effect = "note"
        elif setting.endswith("attn_mask_type") and _unpadded(then) == _unpadded(now):
            effect = "note"  # what is padded is told by each call
        yield setting, then, now, effect


def same(then: Any, now: Any) -> bool:
    """Whether two values are one to kernels, which take numbers in fp32: ``d**-0.5`` and ``1 / sqrt(d)`` are."""
    if isinstance(then, float) and isinstance(now, float):
        return math.isclose(then, now, rel_tol=2**-24)
    return then == now


def _class(one: Semantics) -> str:
    return f"{'torch.nn' if one.library == 'torch' else 'te'}.{one.kind}"


def _unpadded(mask: Any) -> str:
    """A mask without what it says of padding."""
    return "_".join(part for part in str(mask).replace(",", "_").split("_") if part != "padding") or "no_mask"
