"""Settings that determine what a model computes beyond its weights: epsilons, activations, heads, windows."""

# [Note: settings] Two models whose tensors have the same names and shapes may still compute different
# functions. A checkpoint records the settings that distinguish them, under the names of the constructors'
# arguments. :data:`SETTINGS` defines the effect of a difference. Sources: TransformerEngine 2.18 to 2.20.2
# (``pytorch/{transformer,module,attention,ops}``) and ``torch.nn``. Settings that do not change the function
# of unsharded weights are not recorded. These are sizes (shapes show them), parallelism, dtypes, memory,
# speed, ``layer_number`` (TE divides scores by it and multiplies them again), and additional return values.

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn

from te_fsdp.modules.plain_values import UNKNOWN, plain_value
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

#: ``error``: a different function of the same weights. ``strict``: relevant or not, depending on use. ``note``:
#: the same function, or a different one only in training. ``names``: visible in parameter names.
Effect = Literal["error", "strict", "note", "names"]

#: Placeholder in a difference for a value that one model does not record.
_NO_VALUE = "not known"


# fmt: off
#: Settings of TE's modules, and those of ``torch.nn`` that are not plain errors, by effect of a difference.
_EFFECTS: dict[Effect, tuple[str, ...]] = {
    "error": (
        "normalization", "eps", "zero_centered_gamma",  # norms
        # activations
        "activation", "activation_params", "approximate", "glu_interleave_size", "glu_linear_offset", "limit", "alpha",
        "beta1", "beta2", "tanh_clamp_scale", "scale", "scale_bias", "shape",
        # attention
        "num_attention_heads", "num_gqa_groups", "kv_channels", "qkv_weight_interleaved", "attention_type",
        "softmax_scale", "softmax_type", "softcap", "attn_mask_type", "window_size", "bottom_right_diagonal",
        "rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope", "num_householder",
        "rotary_base", "interleaved", "seq_len_interpolation_factor", "pretrained_max_position_embeddings",
        # layers
        "layer_type", "self_attn_mask_type", "enc_dec_attn_mask_type", "enc_dec_window_size",
        "enc_dec_bottom_right_diagonal", "output_layernorm", "parallel_attention_mlp",
        "apply_residual_connection_post_layernorm",
        "order",  # of a Sequential
    ),
    # layout of a module's tensors; for a ModuleDict, the order of its keys
    "strict": ("qkv_format", "attn_input_format", "batch_first", "padding_idx", "keys"),
    # affect training only
    "note": (
        "hidden_dropout", "attention_dropout", "drop_path_rate", "dropout", "p", "momentum", "scale_grad_by_freq",
        "label_smoothing", "ignore_index", "reduction",
    ),
    # affect which parameters exist
    "names": ("bias", "fuse_qkv_params", "input_layernorm"),
}
#: Value in effect if a module lacks the setting (older TE, or the other library).
_ABSENT = {
    "zero_centered_gamma": False, "activation_params": None, "glu_interleave_size": None, "glu_linear_offset": 1.0,
    "approximate": "tanh",  # TE's GELU is the approximation
    "scale_bias": False, "softmax_type": "vanilla", "softcap": 0.0, "rotary_pos_interleaved": False,
    "qk_norm_type": None, "qk_norm_eps": None, "qk_norm_before_rope": False, "rotary_base": 10000.0,
    "interleaved": False, "seq_len_interpolation_factor": None, "pretrained_max_position_embeddings": None,
    "parallel_attention_mlp": False, "layer_type": "encoder", "output_layernorm": False,
    "apply_residual_connection_post_layernorm": False, "padding_idx": None, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "drop_path_rate": 0.0, "dropout": 0.0, "p": 0.0, "scale_grad_by_freq": False,
}
#: Arguments of ``torch.nn`` that show in shapes and parameter names, or do not change the function.
_NOT_RECORDED = frozenset((
    "self", "args", "kwargs", "device", "dtype", "inplace", "sparse", "process_group", "return_indices", "bias",
    "affine", "elementwise_affine", "enable_nested_tensor", "mask_check", "normalized_shape", "num_parameters",
    "num_embeddings", "embedding_dim", "embed_dim", "kdim", "vdim", "in_features", "in1_features",
    "in2_features", "out_features", "num_features", "in_channels", "out_channels", "num_channels", "input_size",
    "hidden_size", "proj_size",
))
#: Containers, base classes, modules that exist on some meshes only, and modules described by their owner.
_NOT_MODULES = frozenset((
    "Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "TransformerEngineBaseModule", "BasicOperation", "FusedOperation", "FusibleOperation", "AllGather", "AllReduce",
    "ReduceScatter", "Fp8Padding", "Fp8Unpadding", "DropPath",
))
# fmt: on


class Setting(NamedTuple):
    """Effect of a difference in one setting, and its value in a module without it."""

    effect: Effect
    absent: Any = UNKNOWN


SETTINGS = {
    name: Setting(effect, _ABSENT.get(name, UNKNOWN)) for effect, names in _EFFECTS.items() for name in names
}
#: Kinds that compute the same in TE and in torch.
_SAME_IN_TORCH = frozenset(("Linear", "LayerNorm", "RMSNorm", "GELU", "ReLU", "SiLU", "Dropout"))
#: Part of a class's name -> kind: the same function in evaluation. Identity is dropout with rate 0.
_SAME = (("Dropout", "Dropout"), ("Identity", "Dropout"), ("BatchNorm", "BatchNorm"))
#: Containers with an order that module names do not show -> setting that records the order.
_ORDERED = {"Sequential": "order", "ModuleDict": "keys"}
#: Library name of user-defined classes.
USER_DEFINED = "own"
_CLAMPED_DEFAULTS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
#: Python modules that do not contain user-defined classes.
_LIBRARIES = ("torch.", "transformer_engine.", "te_fsdp.", "builtins")
#: Maximum length of an attribute of a user-defined class and maximum number of configuration fields; prefix of
#: functions.
_LONGEST, _FUNCTION = 200, "function "


@dataclass(frozen=True)
class Semantics:
    """Settings that determine what one module computes with its weights."""

    kind: str  #: Class in the library, without the user's subclasses: ``"LayerNormMLP"``, ``"GELU"``
    library: str  #: ``"te"``, ``"torch"`` or :data:`USER_DEFINED`
    #: Constructor argument -> value as plain JSON (tuples are lists). Windows, diagonals and activation parameters are
    #: those in effect.
    settings: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return a setting, or the value in effect if the module lacks it; raise KeyError if neither is known."""
        if name in self.settings:
            return self.settings[name]
        absent = SETTINGS[name].absent
        if absent is UNKNOWN:
            raise KeyError(name)
        return absent


# --- reading


def semantics_of(model: nn.Module) -> dict[str, Semantics]:
    """Return the semantics of TE's and torch's modules, with subclasses, by FQN without wrappers. Local operation."""
    semantics: dict[str, Semantics] = {}
    inside: str | None = None
    for prefix, module in model.named_modules():
        if inside is not None and prefix.startswith(inside):
            continue
        stock = _stock_kind(type(module))
        # The names of modules in other containers are numbers, which show the order.
        is_ordered = isinstance(module, (nn.Sequential, nn.ModuleDict)) and not all(
            map(str.isdigit, module._modules)
        )
        if is_ordered and _user_class(type(module)) is None:
            kind = "Sequential" if isinstance(module, nn.Sequential) else "ModuleDict"
            semantics[_torch.without_wrappers(prefix)] = Semantics(kind, "torch", {})
        if stock is None:
            continue
        kind, library, arguments = stock
        settings = _recordable(
            (name, plain_value(_te.argument_of(module, name, UNKNOWN))) for name in arguments
        )
        if library == "te" and kind in _DERIVED:
            _DERIVED[kind](module, settings)
        semantics[_torch.without_wrappers(prefix)] = Semantics(kind, library, settings)
        if kind == "DotProductAttention":  # its children are its backends
            inside = f"{prefix}." if prefix else ""
    return semantics


# [Note: user-defined modules] For modules of user-defined classes, the class and the public attributes are
# recorded. Only the user knows whether an attribute affects the computation. So a different function requires
# confirmation, as does a different class of a module without attributes. A different value is only reported.
# Values may differ between ranks (a rank number, for example); the file contains those of rank 0.
def user_settings(model: nn.Module) -> dict[str, Semantics]:
    """Return classes and public attributes of user-defined modules by FQN. Functions are described. Local operation."""
    # Fields of a configuration shared by many modules are recorded once, as ``config.<field>``.
    classes, seen = {}, set[int]()
    for prefix, module in model.named_modules():
        cls, user_class = type(module), _user_class(type(module))
        if user_class is None or _stock_kind(cls) is not None:
            continue
        # A module without state is recorded by its class, like a function by its name.
        is_leaf = not (module._modules or module._parameters or module._buffers)
        recorded = [("class", f"{_FUNCTION if is_leaf else ''}{user_class.__name__}")]
        for name, value in vars(module).items():
            recorded.append((name, _public_value(cls, name, value)))
            if not name.startswith("_") and id(value) not in seen:
                seen.add(id(value))
                recorded += (
                    (f"{name}.{field}", _public_value(cls, field, item)) for field, item in _fields(value)
                )
        classes[_torch.without_wrappers(prefix)] = Semantics(
            user_class.__name__, USER_DEFINED, _recordable(recorded)
        )
    return classes


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a configuration object; nothing for other objects, such as a vocabulary."""
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        value = vars(value) if hasattr(value, "__dict__") else {}
    is_small = isinstance(value, dict) and len(value) <= _LONGEST
    return [item for item in value.items() if isinstance(item[0], str)] if is_small else []


def _recordable(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in values if value is not UNKNOWN}


@functools.cache
def _stock_kind(cls: type) -> tuple[str, str, tuple[str, ...]] | None:
    """Return kind, library and arguments of the stock class behind a bound or user-defined class."""
    for base in _te.stock_classes(cls):
        packages = {"te": "transformer_engine.pytorch.", "torch": "torch.nn.modules."}
        library = next((lib for lib, name in packages.items() if base.__module__.startswith(name)), None)
        if library is None:
            continue
        kind = base.__name__
        if kind in _NOT_MODULES or kind.startswith("_"):
            return None
        # torch.nn names some arguments in a base class only (LSTM).
        arguments = dict.fromkeys(
            (*inspect.signature(base.__init__).parameters, *getattr(base, "__constants__", ()))
        )
        names = [a for a in arguments if (a in SETTINGS if library == "te" else a not in _NOT_RECORDED)]
        return next((stock for part, stock in _SAME if part in kind), kind), library, tuple(names)
    return None


def _user_class(cls: type) -> type | None:
    """Return the first user-defined class in a module's method resolution order."""
    return next((base for base in cls.__mro__ if not base.__module__.startswith(_LIBRARIES)), None)


def _attention(module: Any, settings: dict[str, Any]) -> None:
    """Add channels per head, q and k norms, and whether query, key and value share one parameter."""
    if hasattr(module, "core_attention"):
        settings["kv_channels"] = module.hidden_size_per_attention_head
        norm = getattr(module, "q_norm", None)
        stock = None if norm is None else _stock_kind(type(norm))
        settings["qk_norm_type"] = None if stock is None else stock[0]
        settings["qk_norm_eps"] = None if norm is None else norm.eps
        fused = [getattr(module, name, None) for name in ("layernorm_qkv", "qkv", "key_value")]
        settings["fuse_qkv_params"] = any(m is not None and "weight" in m._parameters for m in fused)
    else:
        channels = [module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v]
        settings["kv_channels"] = channels[0] if channels[0] == channels[1] else channels
        settings.setdefault("softmax_scale", module.unfused_attention.softmax_scale)  # before TE 2.20
    _mask(settings)


def _mask(settings: dict[str, Any], prefix: str = "", mask: str = "attn_mask_type") -> None:
    """Set window and diagonal to those in effect."""
    # TE infers them from the mask if they are missing or contradict it.
    causal = "causal" in settings[mask]
    before, after = settings.get(f"{prefix}window_size") or (-1, -1)
    after = 0 if causal else -1 if (before, after) == (-1, 0) else after
    settings[f"{prefix}window_size"] = [before, after]
    diagonal = settings.get(f"{prefix}bottom_right_diagonal")
    is_bottom_right = "bottom_right" in settings[mask] or (not causal and diagonal is not False)
    settings[f"{prefix}bottom_right_diagonal"] = is_bottom_right


def _layer(module: Any, settings: dict[str, Any]) -> None:
    settings["drop_path_rate"] = 0.0 if module.drop_path is None else module.drop_path.drop_prob
    _mask(settings, mask="self_attn_mask_type")
    if settings["layer_type"] == "decoder":
        _mask(settings, "enc_dec_", "enc_dec_attn_mask_type")
        return
    for name in [name for name in settings if name.startswith("enc_dec_")]:
        del settings[name]


def _mlp(module: Any, settings: dict[str, Any]) -> None:
    in_effect = {**_CLAMPED_DEFAULTS, **(module.activation_params or {})}
    settings["activation_params"] = in_effect if module.activation == "clamped_swiglu" else None


_DERIVED: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "DotProductAttention": _attention,
    "MultiheadAttention": _attention,
    "TransformerLayer": _layer,
    "LayerNormMLP": _mlp,
}


def _public_value(cls: type, name: str, value: Any) -> Any:
    """Return an attribute's plain value; ``UNKNOWN`` if it is private, torch's, or hides a method as wrappers do."""
    if name.startswith("_") or name == "training" or (callable(value) and hasattr(cls, name)):
        return UNKNOWN
    plain = plain_value(value)
    values = [value, *value] if isinstance(value, (list, tuple)) else [value]
    if plain is not UNKNOWN and any(map(callable, values)):
        plain = f"{_FUNCTION}{plain}"
    if plain is UNKNOWN or len(text := plain if isinstance(plain, str) else repr(plain)) <= _LONGEST:
        return plain
    return f"{text[:_LONGEST]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def to_json(modules: Mapping[str, Semantics]) -> dict[str, Any]:
    """Convert semantics by FQN to plain JSON. Values shared by several modules are stored once."""
    kinds = {
        repr(module): {"kind": module.kind, "library": module.library, "settings": dict(module.settings)}
        for module in modules.values()
    }
    index_of = {text: index for index, text in enumerate(kinds)}
    indices = {name: index_of[repr(module)] for name, module in modules.items()}
    return {"kinds": [*kinds.values()], "modules": indices}


def record(model: nn.Module) -> dict[str, Any]:
    """Return a model's semantics for a manifest, and the recipes under which it has run. Local operation."""
    return {"recipes": _te.recipes_in_use(model), **to_json(semantics_of(model) | user_settings(model))}


#: Record of a model with unknown semantics.
NOTHING: Mapping[str, Any] = {"recipes": [], **to_json({})}


def from_json(recorded: Mapping[str, Any], *, user_defined: bool = False) -> dict[str, Semantics]:
    """Load the output of :func:`to_json`, for modules of the libraries or (``user_defined``) user-defined modules."""
    kinds = [Semantics(module["kind"], module["library"], module["settings"]) for module in recorded["kinds"]]
    semantics = {name: kinds[index] for name, index in recorded["modules"].items()}
    return {
        name: module for name, module in semantics.items() if (module.library == USER_DEFINED) == user_defined
    }


# --- comparing


@dataclass(frozen=True)
class Difference:
    """One setting ``<module>.<setting>`` that differs between the saved and the current model."""

    name: str
    then: Any
    now: Any
    effect: Effect

    def __str__(self) -> str:
        return f"saved {self.then}, model has {self.now}"


def differences(
    saved: Mapping[str, Semantics], current: Mapping[str, Semantics], tensors: Iterable[str] = ()
) -> list[Difference]:
    """Return the differences between the modules of two models. Local operation.

    ``tensors`` are names of parameters and buffers that only one model has. They already report a module that
    only this model has. A module without tensors may be missing, or be user-defined in the other model.
    """
    different = [
        Difference(f"{name}.{setting}".lstrip("."), *values)
        for name in saved.keys() & current.keys()
        for setting, *values in _compare(saved[name], current[name])
    ]
    for name in [
        n for n in saved.keys() & current.keys() if saved[n].kind in _ORDERED and saved[n] == current[n]
    ]:
        setting = _ORDERED[saved[name].kind]
        then, now = (_child_names(name, side) for side in (saved, current))
        then, now = [n for n in then if n in now], [n for n in now if n in then]
        if then != now:
            different.append(Difference(f"{name}.{setting}".lstrip("."), then, now, SETTINGS[setting].effect))
    all_modules = {**saved, **current}
    # Containers have no function of their own: wrapping layers in one does not change the model.
    one_sided = {name for name in saved.keys() ^ current.keys() if all_modules[name].kind not in _ORDERED}
    owners = {name[:n] for name in tensors for n, c in enumerate(name) if c == "."} if one_sided else set()
    for name in one_sided - owners:
        # A missing module is reported without its submodules, which are missing with it.
        if name.rpartition(".")[0] not in one_sided:
            then, now = (_class(side[name]) if name in side else _NO_VALUE for side in (saved, current))
            different.append(Difference(f"{name}.class".lstrip("."), then, now, "note"))
    return sorted(different, key=lambda d: d.name)


def _child_names(name: str, modules: Iterable[str]) -> list[str]:
    """Return the names of a container's children in module order, as far as they are recorded."""
    prefix = f"{name}." if name else ""
    inside = (
        child[len(prefix) :].partition(".")[0]
        for child in modules
        if child != name and child.startswith(prefix)
    )
    return list(dict.fromkeys(inside))


def user_differences(saved: Mapping[str, Semantics], current: Mapping[str, Semantics]) -> list[Difference]:
    """Return the differences between attributes that modules of both models have. Local operation."""
    different = []
    for name in sorted(saved.keys() & current.keys()):
        then, now = saved[name].settings, current[name].settings
        for setting in sorted(then.keys() & now.keys()):
            pair = then[setting], now[setting]
            if not _same(*pair):
                asks = all(value is None or str(value).startswith(_FUNCTION) for value in pair)
                label = f"{name}.{setting}".lstrip(".")
                different.append(Difference(label, *pair, "strict" if asks else "note"))
    return different


def format_differences(
    different: Iterable[Difference], template: str = "saved {}, model has {}"
) -> list[str]:
    """Format one text per setting and pair of values with its modules."""
    # Settings recorded on one side only share one text.
    groups: dict[str, list[str]] = {}
    one_sided: dict[str, list[str]] = {}
    for diff in different:
        module, _, setting = diff.name.rpartition(".")
        if _NO_VALUE in (diff.then, diff.now):
            one_sided.setdefault(setting, []).append(module)
        else:
            groups.setdefault(f"{setting}: {template.format(diff.then, diff.now)}", []).append(module)
    texts, one_sided_texts = (
        [text + (f" ({fold_names(names)})" if any(names) else "") for text, names in grouped.items()]
        for grouped in (groups, one_sided)
    )
    return texts + (
        [f"recorded on one side only, not compared: {'; '.join(one_sided_texts)}"] if one_sided_texts else []
    )


def fold_names(names: Iterable[str]) -> str:
    """Format module names. Many names that differ in numbers only are shown as a pattern."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name or "model")
    count = sum(map(len, patterns.values()))
    shown = [p if len(matching) > 3 else ", ".join(matching) for p, matching in patterns.items()]
    return ", ".join(shown) + (f": {count} modules" if count > 3 else "")


def distinguishing_settings(current: Mapping[str, Semantics]) -> str:
    """Format the settings in which models with the same tensors may differ; empty if there are none."""
    values: dict[str, dict[str, None]] = {}
    for module in current.values():
        for setting, value in module.settings.items():
            if setting in SETTINGS and SETTINGS[setting].effect == "error":
                values.setdefault(setting, {})[str(value)] = None
    return ", ".join(f"{setting} {' or '.join(texts)}" for setting, texts in sorted(values.items()))


def _compare(saved: Semantics, current: Semantics) -> Iterator[tuple[str, Any, Any, Effect]]:
    if saved is current or {saved.kind, current.kind} <= _ORDERED.keys():
        return
    if (saved.kind, saved.library) != (current.kind, current.library):
        is_same_in_torch = saved.kind == current.kind and saved.kind in _SAME_IN_TORCH
        yield "class", _class(saved), _class(current), "note" if is_same_in_torch else "error"
        if not is_same_in_torch:
            return
    for setting in sorted({*saved.settings, *current.settings}):
        row = SETTINGS.get(setting, Setting("error"))
        then, now = (s.settings.get(setting, row.absent) for s in (saved, current))
        if _same(then, now) or row.effect == "names":
            continue
        effect = row.effect
        if UNKNOWN in (then, now):  # only one version of a library has the setting
            effect, then, now = "note", *(_NO_VALUE if v is UNKNOWN else v for v in (then, now))
        elif setting.endswith("attn_mask_type") and _unpadded(then) == _unpadded(now):
            effect = "note"  # each call defines the padding
        # "<" begins a digest of a lambda, which early versions recorded.
        yield setting, then, now, "note" if str(then).startswith("<") else effect


def _same(saved: Any, current: Any) -> bool:
    """Return whether kernels treat two values as equal. They use fp32, so ``d**-0.5`` equals ``1 / sqrt(d)``."""
    if isinstance(saved, float) and isinstance(current, float):
        return math.isclose(saved, current, rel_tol=2**-24)
    return saved == current


def _class(module: Semantics) -> str:
    kind = "Dropout or Identity" if module.kind == "Dropout" else module.kind
    return f"{'torch.nn' if module.library == 'torch' else 'te'}.{kind}"


def _unpadded(mask: Any) -> str:
    return "_".join(part for part in str(mask).replace(",", "_").split("_") if part != "padding") or "no_mask"
