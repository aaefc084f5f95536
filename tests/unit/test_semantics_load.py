"""Test loads into models with equal tensor names but different settings, as documented."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import manifest, saving
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import SETTINGS, differences, from_json, semantics_of

Build = Callable[..., nn.Module]
#: How both models are made, the arguments of one, and those of the other.
Pair = tuple[Build, dict[str, Any], dict[str, Any]]

ROOT = Path(__file__).parents[2]
LAYER = {
    "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_gqa_groups": 2, "fuse_qkv_params": True,
    "activation": "swiglu", "normalization": "RMSNorm", "qk_norm_type": "L2Normalization", "device": "cpu",
}  # fmt: skip
FEW, MANY = ({"num_attention_heads": h, "num_gqa_groups": h // 4, "kv_channels": 32 // h} for h in (4, 8))
CLAMPED = {"activation": "clamped_swiglu"}
DECODER = {"layer_type": "decoder"}


def page() -> dict[str, str]:
    """Return the documentation of each setting."""
    text = (ROOT / "docs" / "checkpoint_internals.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (error|strict|note|names) \|", text, re.M)
    return {name: effect for names, effect in rows for name in re.findall(r"`(\w+)`", names)}


class Attention(nn.Module):
    """Attention without weights, and a parameter to load."""

    def __init__(self, te: Any, **kwargs: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.attention = te.DotProductAttention(4, 8, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)) for part in self.qkv(x).chunk(3, -1))
        return self.attention(q, k[:5], v[:5], attention_mask=None)


class Norm(nn.Module):
    """A norm outside of known libraries."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps


class Rotary(nn.Module):
    """A rotary embedding whose frequencies are not stored in a checkpoint."""

    def __init__(self, te: Any, **kwargs: Any) -> None:
        super().__init__()
        self.rope = te.attention.RotaryPositionEmbedding(8, **kwargs)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rope(12) * self.scale


def layer(te: Any, **kwargs: Any) -> nn.Module:
    return te.TransformerLayer(**{**LAYER, **kwargs})


def after_linear(make: Build, te: Any, **kwargs: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), make(te, **kwargs))


def op(name: str) -> Build:
    return functools.partial(after_linear, lambda te, **kwargs: getattr(te.ops, name)(**kwargs))


def torch_op(name: str, *args: Any) -> Build:
    return functools.partial(after_linear, lambda te, **kwargs: getattr(nn, name)(*args, **kwargs))


def ending(te: Any, **last: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), *(make() for make in last.values()))


def apply(te: Any, model: nn.Module) -> torch.Tensor:
    """Run a forward that depends on every setting: positions, more keys than queries, values beyond limits."""
    x = 3 * torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(5))
    if not isinstance(model, te.TransformerLayer):
        return model(x)
    kwargs: dict[str, Any] = {"rotary_pos_emb": te.attention.RotaryPositionEmbedding(model.kv_channels)(9)}
    if model.layer_type == "decoder":
        kwargs["encoder_output"] = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(6))
    return model(x, **kwargs)


class Each(nn.Module):
    """Goes through modules that have names."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def named(te: Any, *, names: str, each: bool = False) -> nn.Module:
    """Return the same modules under the same names, in an order."""
    made = {"linear": nn.Linear(32, 32), "tanh": nn.Tanh(), "gelu": nn.GELU()}
    parts = {name: made[name] for name in names.split()}
    return Each(parts) if each else nn.Sequential(OrderedDict(parts))


ORDERS = ({"names": "linear tanh gelu"}, {"names": "linear gelu tanh"})
NO_MASK = {"attn_mask_type": "no_mask"}
NEAR = {**NO_MASK, "window_size": (1, 1)}
EIGHT = {"pretrained_max_position_embeddings": 8}
WINDOW = {"enc_dec_window_size": (2, 2), **DECODER}
#: By the setting that differs.
PAIRS: dict[str, Pair] = {
    "eps": (layer, {}, {"layernorm_epsilon": 1e-1}),
    "zero_centered_gamma": (layer, {}, {"zero_centered_gamma": True}),
    "activation": (layer, {}, {"activation": "geglu"}),
    "activation_params": (layer, CLAMPED, {**CLAMPED, "activation_params": {"limit": 0.1}}),
    "approximate": (torch_op("GELU"), {}, {"approximate": "tanh"}),
    "limit": (op("ClampedSwiGLU"), {}, {"limit": 0.1}),
    "alpha": (op("ClampedSwiGLU"), {}, {"alpha": 1.0}),
    "glu_linear_offset": (op("ClampedSwiGLU"), {}, {"glu_linear_offset": 0.0}),
    "glu_interleave_size": (op("SwiGLU"), {}, {"glu_interleave_size": 8}),
    "beta1": (op("SiTUGLU"), {}, {"beta1": 1.0}),
    "beta2": (op("SiTUGLU"), {}, {"beta2": 0.1}),
    "scale": (op("ConstantScale"), {"scale": 1.0}, {"scale": 2.0}),
    "shape": (op("Reshape"), {"shape": (6, 64)}, {"shape": (12, 32)}),
    "num_attention_heads": (layer, FEW, MANY),
    "num_gqa_groups": (layer, FEW, MANY),
    "kv_channels": (layer, FEW, MANY),
    "qkv_weight_interleaved": (layer, {}, {"qkv_weight_interleaved": False}),
    "softmax_scale": (Attention, {}, {"softmax_scale": 1.0}),
    "softmax_type": (Attention, {}, {"softmax_type": "off-by-one"}),
    "softcap": (layer, {}, {"softcap": 0.1}),
    "attn_mask_type": (Attention, {}, NO_MASK),
    "self_attn_mask_type": (layer, {}, {"self_attn_mask_type": "no_mask"}),
    "enc_dec_attn_mask_type": (layer, DECODER, {**DECODER, "enc_dec_attn_mask_type": "causal"}),
    "window_size": (layer, {}, {"window_size": (1, 0)}),
    "enc_dec_window_size": (layer, DECODER, WINDOW),
    "bottom_right_diagonal": (Attention, NEAR, {**NEAR, "bottom_right_diagonal": False}),
    "enc_dec_bottom_right_diagonal": (layer, WINDOW, {**WINDOW, "enc_dec_bottom_right_diagonal": False}),
    "rotary_pos_interleaved": (layer, {}, {"rotary_pos_interleaved": True}),
    "interleaved": (Rotary, {}, {"interleaved": True}),
    "seq_len_interpolation_factor": (
        Rotary, EIGHT, {**EIGHT, "seq_len_interpolation_factor": 2}
    ),
    "pretrained_max_position_embeddings": (
        Rotary, {"seq_len_interpolation_factor": 2}, {**EIGHT, "seq_len_interpolation_factor": 2}
    ),
    "qk_norm_type": (layer, {}, {"qk_norm_type": None}),
    "qk_norm_eps": (layer, {}, {"qk_norm_eps": 1.0}),
    "parallel_attention_mlp": (layer, {}, {"parallel_attention_mlp": True}),
    "apply_residual_connection_post_layernorm": (layer, {}, {"apply_residual_connection_post_layernorm": True}),
    "class": (ending, {"last": nn.SiLU}, {"last": nn.GELU}),
    "order": (named, *ORDERS),
    "keys": (functools.partial(named, each=True), *ORDERS),
    "num_heads": (torch_op("MultiheadAttention", 32), {"num_heads": 4}, {"num_heads": 2}),
    "qkv_format": (Attention, {}, {"qkv_format": "bshd"}),
    "attn_input_format": (layer, {}, {"attn_input_format": "bshd"}),
    "batch_first": (torch_op("MultiheadAttention", 32, 4), {}, {"batch_first": True}),
    "padding_idx": (torch_op("Embedding", 4, 4), {}, {"padding_idx": 0}),
    "hidden_dropout": (layer, {}, {"hidden_dropout": 0.5}),
    "attention_dropout": (layer, {}, {"attention_dropout": 0.5}),
    "drop_path_rate": (layer, {}, {"drop_path_rate": 0.5}),
    "p": (op("Dropout"), {"p": 0.1}, {"p": 0.2}),
    "dropout": (torch_op("MultiheadAttention", 32, 4), {}, {"dropout": 0.1}),
    "momentum": (torch_op("BatchNorm1d", 2), {}, {"momentum": 0.2}),
    "label_smoothing": (torch_op("CrossEntropyLoss"), {}, {"label_smoothing": 0.1}),
}  # fmt: skip
#: The same function, described differently.
EQUALS: dict[str, Pair] = {
    "nothing": (layer, {}, {}),
    "a window that the mask implies": (layer, {}, {"window_size": (-1, 0)}),
    "groups that are heads": (layer, {"num_gqa_groups": None}, {"num_gqa_groups": 4}),
    "defaults of an activation": (
        layer,
        CLAMPED,
        {**CLAMPED, "activation_params": {"limit": 7.0, "alpha": 1.702}},
    ),
    "a diagonal that the mask implies": (Attention, NO_MASK, {**NO_MASK, "bottom_right_diagonal": True}),
    "a mask of the other attention": (layer, {}, {"enc_dec_attn_mask_type": "causal"}),
    "the scale of a head": (Attention, {}, {"softmax_scale": 8**-0.5}),
    "layer numbers and speed": (layer, {}, {"layer_number": 7, "fuse_wgrad_accumulation": True}),
    "memory": (torch_op("ReLU"), {}, {"inplace": True}),
}
NOTES: dict[str, Pair] = {
    "padding": (layer, {}, {"self_attn_mask_type": "padding_causal"}),
    "Identity": (ending, {"last": nn.Identity}, {"last": nn.Dropout}),
    "torch": (
        lambda te, stock: (nn if stock else te).RMSNorm(32, eps=1e-5, device="cpu"),
        {"stock": 1},
        {"stock": 0},
    ),
    "a class of the user": (lambda te, cls: cls(32, eps=1e-5), {"cls": Norm}, {"cls": nn.RMSNorm}),
    "a module more": (ending, {}, {"last": nn.Flatten}),
}


#: Of modules that are called otherwise, or that the emulation does not run.
OTHER_INPUTS = {
    "batch_first", "padding_idx", "momentum", "label_smoothing", "num_heads", "dropout", "qkv_format", "beta1", "beta2",
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(te: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[nn.Module, Path]]:
    """Return a model and its checkpoint, cached by construction arguments."""
    done: dict[str, tuple[nn.Module, Path]] = {}

    def make(build: Build, kwargs: dict[str, Any]) -> tuple[nn.Module, Path]:
        key = f"{id(build)} {kwargs}"
        if key not in done:
            torch.manual_seed(0)
            model, path = build(te, **kwargs).eval(), tmp_path_factory.mktemp("saved") / "a"
            for parameter in model.parameters():
                nn.init.normal_(parameter)  # zeros and ones of biases and norms do not count
            checkpoint.save(path, model)
            done[key] = model, path
        return done[key]

    return make


def test_checkpoint_page_lists_every_setting() -> None:
    known = {name: setting.effect for name, setting in SETTINGS.items()}
    extra = {"class": "error", "recipes": "note", "settings": "strict"}
    assert page() == known | extra
    hard = {
        "normalization",
        "attention_type",
        "layer_type",
        "output_layernorm",
    }  # other names of parameters as well
    unlikely = {"scale_bias", "tanh_clamp_scale", "num_householder", "qk_norm_before_rope", "rotary_base"}
    noted = {"scale_grad_by_freq", "ignore_index", "reduction"}
    names = {name for name, effect in page().items() if effect == "names"}
    assert set(page()) - set(PAIRS) == names | hard | unlikely | noted | {"recipes", "settings"}


def needs_2_20(te: Any) -> None:
    if not hasattr(te.ops, "SiTUGLU"):
        pytest.skip("TransformerEngine before 2.20 has no such setting")


@pytest.mark.parametrize("name", PAIRS)
def test_load_rejects_or_logs_each_different_setting(
    te: Any, saved: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name in ("beta1", "beta2", "softcap"):
        needs_2_20(te)
    build, one, other = PAIRS[name]
    model, path = saved(build, one)
    torch.manual_seed(1)
    here = build(te, **other).eval()
    before = [parameter.detach().clone() for parameter in here.parameters()]
    effect = page().get(name, "error")
    if effect == "note":
        loaded = checkpoint.load(path, here)
        assert loaded.is_complete and any(f"{name}: saved " in note for note in loaded.notes)
        assert caplog.text.count(f"{name}: saved ") == 1
    else:
        with pytest.raises(
            CheckpointError, match=rf"{name}: saved .*, model has .*Nothing was loaded.*allow="
        ):
            checkpoint.load(path, here, strict=effect == "strict")
        with pytest.raises(CheckpointError, match=f"{name}: saved "):
            checkpoint.load(path, here)
        assert all(map(torch.equal, before, here.parameters())), "nothing was changed"
        loaded = checkpoint.load(path, here, allow=["*"])
        assert any(key.rpartition(".")[2] == name for key in loaded.left)
    if name not in OTHER_INPUTS:
        with torch.no_grad():
            outputs = [apply(te, m) for m in (model, here)]
        same = outputs[0].shape == outputs[1].shape and torch.equal(*outputs)
        assert same == (effect == "note"), "whether the function is the same"


@pytest.mark.parametrize("name", EQUALS)
def test_load_accepts_equivalent_settings(te: Any, saved: Any, name: str) -> None:
    build, one, other = EQUALS[name]
    here = build(te, **other).eval()
    loaded = checkpoint.load(saved(build, one)[1], here)
    assert loaded.is_complete and not loaded.notes and not loaded.converted


@pytest.mark.parametrize("name", NOTES)
def test_load_logs_harmless_differences(te: Any, saved: Any, name: str) -> None:
    build, one, other = NOTES[name]
    loaded = checkpoint.load(saved(build, one)[1], build(te, **other).eval())
    assert loaded.is_complete and len(loaded.notes) == 1


class Scaled(nn.Module):
    """A user-defined module whose attributes affect its output."""

    def __init__(self, te: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner = te.Linear(32, 32, device="cpu")
        vars(self).update(kwargs)


def encoder(te: Any, activation: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, activation=activation)


def test_load_compares_activation_functions_by_name(te: Any, saved: Any) -> None:
    """Functions are compared by name. Partials and lambdas are not recorded, and a note reports it."""
    gelu, relu = nn.functional.gelu, nn.functional.relu
    path = saved(encoder, {"activation": gelu})[1]
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="activation: saved gelu, model has relu"):
            checkpoint.load(path, encoder(te, relu), strict=strict)
    assert not checkpoint.load(path, encoder(te, gelu)).notes
    for other in (functools.partial(gelu, approximate="none"), lambda x: gelu(x)):
        (note,) = checkpoint.load(path, encoder(te, other)).notes
        assert note == "recorded on one side only, not compared: activation"
    path = saved(encoder, {"activation": functools.partial(gelu, approximate="none")})[1]
    assert not checkpoint.load(path, encoder(te, lambda x: gelu(x))).notes


def test_load_compares_attributes_of_user_defined_modules(
    te: Any, saved: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A different function is an error, a different value is logged; wrappers and private attributes are ignored."""
    gelu, relu = nn.functional.gelu, nn.functional.relu
    same = {"act": gelu, "factor": 0.5, "_rank": 0, "forward": nn.Identity.forward, "table": torch.ones(1)}
    path = saved(Scaled, same)[1]
    assert not checkpoint.load(path, Scaled(te, **{**same, "_rank": 1, "forward": nn.Linear.forward})).notes
    loaded = checkpoint.load(path, Scaled(te, **{**same, "factor": 0.25, "more": 1}))
    assert loaded.is_complete and loaded.notes == ["factor: saved 0.5, model has 0.25"]
    other = Scaled(te, **{**same, "act": relu})
    with pytest.raises(CheckpointError, match="act: saved function gelu, model has function relu"):
        checkpoint.load(path, other)
    assert "act" in checkpoint.load(path, other, strict=False).left
    assert checkpoint.load(path, other, allow=["act"]).left
    assert main(["ckpt", "diff", str(path), str(saved(Scaled, {**same, "act": relu})[1])]) == 1
    assert "act: function gelu / function relu" in capsys.readouterr().out


def test_load_lists_all_setting_differences_in_one_error(te: Any, saved: Any) -> None:
    """Modules of many layers appear as a pattern, single ones by their names; allowed differences do not appear."""

    def stack(te: Any, **kwargs: Any) -> nn.Module:
        return nn.ModuleDict(
            {"layers": nn.ModuleList([layer(te) for _ in range(4)]), "norm": nn.LayerNorm(32, **kwargs)}
        )

    path, here = saved(stack, {})[1], stack(te, eps=1e-3)
    for item in here["layers"]:
        item.layernorm_mlp.zero_centered_gamma = True
    here["layers"][2].layernorm_mlp.eps = 1e-3
    gamma = r"zero_centered_gamma: saved False, model has True \(layers.\*.layernorm_mlp: 4 modules\)"
    every = rf"fit: {gamma}; eps: saved 1e-05, model has 0.001 \(layers.2.layernorm_mlp, norm\). Nothing"
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=every):
            checkpoint.load(path, here, strict=strict)
    with pytest.raises(
        CheckpointError, match=r"a does not fit: eps: saved 1e-05, model has 0.001 \(norm\). Nothing"
    ):
        checkpoint.load(path, here, allow=["layers.*"])
    loaded = checkpoint.load(path, here, allow=["layers.*", "norm.eps"])
    assert loaded.left["norm.eps"] == "saved 1e-05, model has 0.001" and len(loaded.left) == 6
    assert here["norm"].eps == 1e-3, "a model keeps its settings"


def test_checkpoints_without_settings_are_rejected_where_settings_matter(
    te: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unrecorded settings that matter for the model are an error; other modules need none."""
    model, plain, torchs = layer(te), nn.Linear(4, 4), nn.LayerNorm(4)
    describe = saving._describe
    monkeypatch.setattr(saving, "_describe", lambda *args: replace(describe(*args), semantics=None))
    for name, item in (("a", model), ("plain", plain), ("torch", torchs)):
        checkpoint.save(tmp_path / name, item)
    assert (
        main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / "converted"), "--to", "checkpoint"]) == 0
    )
    asks = r'settings: saved none, model has activation swiglu, .*eps 1e-.*_gamma False.*allow=\["settings"\]'
    for name in ("a", "converted"):
        with pytest.raises(CheckpointError, match=asks):
            checkpoint.load(tmp_path / name, model)
    for way in ({"allow": "settings"}, {"strict": False}):
        assert "activation swiglu" in checkpoint.load(tmp_path / "a", model, **way).left["settings"]
    loaded = checkpoint.load(tmp_path / "plain", plain)
    assert loaded.is_complete and not loaded.notes
    loaded = checkpoint.load(tmp_path / "torch", torchs)
    assert loaded.is_complete and loaded.notes == ["settings: saved none, model has eps 1e-05"]


def test_plain_dcp_files_load_without_recorded_settings(te: Any, tmp_path: Path) -> None:
    model = layer(te)
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    dcp.save(weights, checkpoint_id=tmp_path / "a", no_dist=True)
    assert (
        main(["ckpt", "convert", str(tmp_path / "a"), str(tmp_path / "converted"), "--to", "checkpoint"]) == 0
    )
    for name in ("a", "converted"):
        loaded = checkpoint.load(tmp_path / name, model)
        assert loaded.is_complete
        assert any("settings: saved none, model has activation" in note for note in loaded.notes)


def test_settings_of_newer_te_versions_have_defaults(te: Any, saved: Any) -> None:
    """A missing setting has the value that the older version implies. An unknown one is logged."""
    needs_2_20(te)
    path = saved(layer, {})[1]
    old = manifest.Manifest.read(path)
    for item in old.semantics["kinds"]:
        item["settings"].pop("softcap", None)
    here = semantics_of(layer(te))
    assert differences(from_json(old.semantics), here) == []
    capped = layer(te)
    capped.softcap = 2.0
    result = differences(from_json(old.semantics), semantics_of(capped))
    assert [(d.name, d.then, d.now, d.effect) for d in result] == [("softcap", 0.0, 2.0, "error")]
    for item in old.semantics["kinds"]:
        item["settings"].pop("attention_type", None)
    result = differences(from_json(old.semantics), here)
    assert {d.effect for d in result} == {"note"} and {d.then for d in result} == {"not known"}
