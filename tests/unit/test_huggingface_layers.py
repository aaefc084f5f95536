"""Test layers whose layout or function differs from the other layers or from ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint.lazy_tensors import open_safetensors
from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
from tests.unit.huggingface_models import MODELS, TeModel, make_huggingface

Change = Callable[[Any, TeModel], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return folders of small models, by name and changed options."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    made: dict[str, Path] = {}

    def make(name: str, **settings_of_test: Any) -> Path:
        key = f"{name} {settings_of_test}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("models") / "model"
            if settings_of_test:
                kind, settings = MODELS[name]
                config = getattr(transformers, kind)(**{**settings, **settings_of_test})
                torch.manual_seed(3)
                transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made[key])
            else:
                make_huggingface(name, seed=2).save_pretrained(made[key])
        return made[key]

    return make


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the files."""
    return {name: lazy.full() for name, lazy in open_safetensors(folder)[0].items()}


def model(te: Any, folder: Path, change: Change | None = None, **layers: Any) -> TeModel:
    """Return the TransformerEngine model of a folder, changed."""
    made = TeModel(te, hf.read_config(folder), fuse_qkv_params=True, **layers).eval()
    if change is not None:
        change(te, made)
    return made


def last_layer_otherwise(te: Any, made: TeModel) -> None:
    """Store query, key and value rows as blocks in one layer only."""
    made.layers[-1] = made.layer(
        te, 1, None, {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "device": "cpu"}
    )


def test_each_layer_keeps_its_layout(te: Any, folders: Callable[..., Path], tmp_path: Path) -> None:
    """Bug class: a layer was converted with the layout of a different layer without an error."""
    folder = folders("llama")
    tokens = torch.arange(16).view(2, 8)
    usual, other = model(te, folder), model(te, folder, last_layer_otherwise)
    for one in (usual, other):
        hf.load_huggingface(folder, one)
    names = [f"layers.{n}.self_attention.layernorm_qkv.weight" for n in range(2)]
    same = [torch.equal(usual.get_parameter(name), other.get_parameter(name)) for name in names]
    assert same == [True, False], "two layers are not equal"
    with torch.no_grad():
        assert torch.equal(usual(tokens), other(tokens))
    hf.save_huggingface(tmp_path / "saved", other, config=folder)
    checkpoint.save(tmp_path / "checkpoint", other)
    arguments = [str(tmp_path / "checkpoint"), str(tmp_path / "exported"), "--like", str(folder)]
    assert main(["ckpt", "export", *arguments]) == 0
    expected = tensors(folder)
    for name in ("saved", "exported"):
        result = tensors(tmp_path / name)
        assert result.keys() == expected.keys() and all(
            torch.equal(result[key], expected[key]) for key in expected
        )


def tie(te: Any, made: TeModel) -> None:
    """Tie two weights that the files store separately."""
    made.head.weight = made.embedding.weight


def turn(te: Any, made: TeModel) -> None:
    """Return a rotary embedding with changed values."""
    made.rotary.inv_freq.mul_(0.25)


def turn_half(te: Any, made: TeModel) -> None:
    """Return a rotary embedding of half of a head."""
    about = made.a.te_rotary_kwargs()
    made.rotary = te.attention.RotaryPositionEmbedding(**about, rotary_percent=0.5)


REFUSED: dict[str, tuple[Change, str, str]] = {
    "tied here alone": (tie, r"1 only in the checkpoint \(head.weight\)", "missing: head.weight"),
    "turned": (turn, *["rotary_base: 500.0, not of the frequencies by {'rope_theta': 500.0}"] * 2),
    "turned by half": (turn_half, *["rotary_base: 500.0, not of the frequencies by"] * 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_differ_from_config_json_are_rejected(
    te: Any, folders: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Load, save and export raise, change nothing and write nothing."""
    folder, (change, text, out) = folders("llama"), REFUSED[name]
    here = model(te, folder, change)
    before = [parameter.detach().clone() for parameter in here.parameters()]
    with pytest.raises(CheckpointError, match=text):
        hf.load_huggingface(folder, here)
    assert all(map(torch.equal, before, here.parameters()))
    with pytest.raises(CheckpointError, match=out):
        hf.save_huggingface(tmp_path / "saved", here, config=folder)
    checkpoint.save(tmp_path / "checkpoint", here)
    arguments = [str(tmp_path / "checkpoint"), str(tmp_path / "saved"), "--like", str(folder)]
    assert main(["ckpt", "export", *arguments]) == 1
    assert out in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", ["qwen2", "llama-attention-bias", "llama"])
def test_parameters_missing_in_the_files_are_not_trained(
    te: Any, folders: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """TransformerEngine's layers have additional biases. The model can still be saved after a step."""
    folder = folders(name)
    here = model(te, folder)
    here.embedding.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(here.parameters(), lr=0.1, weight_decay=0.1)
    assert all(p.requires_grad for n, p in here.named_parameters() if n.endswith("_bias"))
    hf.load_huggingface(folder, here, optimizer)
    frozen = [n for n, p in here.named_parameters() if not p.requires_grad]
    assert all(n.endswith("bias") for n in frozen if n != "embedding.weight") and "embedding.weight" in frozen
    assert (
        (len(frozen) > 1) == (name != "llama") == ("biases that it lacks are zero, and stay" in caplog.text)
    )
    here(torch.arange(16).view(2, 8)).square().mean().backward()
    optimizer.step()
    hf.save_huggingface(tmp_path / "trained", here, optimizer, config=folder)
    before, after = tensors(folder), tensors(tmp_path / "trained")
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    assert before.keys() == after.keys() and len(moved) >= len(before) - 2


ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}


def test_scaled_rotary_frequencies_round_trip(
    te: Any, folders: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Correct frequencies are loaded, saved and exported. The constructor's unscaled ones are rejected."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    plain, folder = folders("llama"), folders("llama", rope_parameters=ROPE)
    here = model(te, plain)
    with pytest.raises(CheckpointError, match=r"rotary_base: 500.0, not of the frequencies by .*llama3"):
        hf.load_huggingface(folder, here)
    checkpoint.save(tmp_path / "plain", here)
    here.rotary.inv_freq.copy_(LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq)
    hf.load_huggingface(folder, here)
    hf.save_huggingface(tmp_path / "saved", here, config=folder)
    checkpoint.save(tmp_path / "scaled", here)
    codes = {}
    for name in ("plain", "scaled"):
        target = tmp_path / f"{name}-exported"
        codes[name] = main(["ckpt", "export", str(tmp_path / name), str(target), "--like", str(folder)])
    assert codes == {"plain": 1, "scaled": 0}
    assert "not of the frequencies by" in capsys.readouterr().err


def test_torch_attention_layers_are_rejected_by_name(
    te: Any, folders: Callable[..., Path], tmp_path: Path
) -> None:
    """torch attention under TransformerEngine's names gives an error that names it."""

    def replace(te: Any, made: TeModel) -> None:
        for item in made.layers:
            item.self_attention = nn.MultiheadAttention(32, 4)

    with pytest.raises(
        CheckpointError,
        match="class: torch.nn.MultiheadAttention, not te.Multihead|unknown options of the layers",
    ):
        hf.save_huggingface(tmp_path / "saved", model(te, folders("llama"), replace), config=folders("llama"))


def test_export_of_incomplete_state_dicts_suggests_save_huggingface(
    te: Any, folders: Callable[..., Path], tmp_path: Path
) -> None:
    """The error names the call that takes a model, whichever arguments are missing."""
    folder = folders("llama")
    here = model(te, folder)
    weights, blocks = here.state_dict(), hf.TeBlocks.of(here)
    for call in (
        lambda: hf.export_huggingface(weights),
        lambda: hf.export_huggingface(weights, tmp_path / "x"),
        lambda: hf.export_huggingface(here, tmp_path / "x", config=folder, blocks=blocks),
    ):
        with pytest.raises(
            CheckpointError, match=r"te_fsdp.checkpoint.save_huggingface\(path, model, config="
        ):
            call()
    with pytest.raises(CheckpointError, match="expected a path or a URL, got NoneType"):
        hf.export_huggingface(weights, config=folder, blocks=blocks)
    with pytest.raises(CheckpointError, match="Hugging Face model: TeModel, not tensors by name"):
        hf.load_huggingface(here, here, config=folder)
    assert not list(tmp_path.iterdir())


def test_save_huggingface_rejects_object_storage(
    te: Any, folders: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug class: a URL became a local directory. A file:// URL is the local path."""
    folder = folders("llama")
    here = model(te, folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^memory://bucket/model: cannot be written on object storage"):
        hf.save_huggingface("memory://bucket/model", here, config=folder)
    with pytest.raises(CheckpointError, match=r"^memory://bucket/model: cannot be written on object storage"):
        blocks = hf.TeBlocks.of(here)
        hf.export_huggingface(here.state_dict(), "memory://bucket/model", config=folder, blocks=blocks)
    assert not list(tmp_path.iterdir())
    hf.save_huggingface(f"file://{tmp_path}/local", here, config=folder)
    assert [path.name for path in tmp_path.iterdir()] == ["local"]
