"""Check that Hugging Face models equal ``te.TransformerLayer`` models with the same weights."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_fsdp.checkpoint.lazy_tensors import open_safetensors
from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.checkpoint.portable.huggingface_map import Group
from te_fsdp.errors import CheckpointError
from tests.unit.huggingface_models import MODELS, SIZES, TeModel, make_huggingface, to_te

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
import safetensors.torch

LAYERS: dict[str, dict[str, Any]] = {
    "split": {},
    "interleaved": {"fuse_qkv_params": True},
    "stacked": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "zero-centered": {"fuse_qkv_params": True, "zero_centered_gamma": True},
}
# Every option with both styles; the other models with one each, all options among them.
CASES = [(model, layer) for model in ("llama", "gpt2") for layer in LAYERS]
CASES += [("llama-tied-biased", "interleaved"), ("llama-attention-bias", "stacked"), ("mistral", "split")]
CASES += [("qwen2", "interleaved"), ("qwen3", "zero-centered"), ("gpt2-untied", "interleaved")]
CASES += [("gemma", "zero-centered"), ("gemma", "stacked"), ("gemma", "split")]
CASES += [("mixtral", "stacked"), ("qwen2-moe", "interleaved"), ("qwen3-moe", "zero-centered")]
TOKENS = torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    result = model(TOKENS)
    return getattr(result, "logits", result)


def rounding(original: nn.Module) -> tuple[torch.Tensor, float]:
    """Return logits in float64 and the allowed float32 difference.

    The Hugging Face model's own float32 error is measured. TransformerEngine's layer does the same sums in another
    order; the largest of 1320 such errors varies by less than four times.
    """
    exact = logits(copy.deepcopy(original).double())
    error = (logits(original) - exact).abs().max().item()
    assert 0 < error < 1e-4 * exact.abs().max().item()
    return exact, 4 * error


def difference(model: nn.Module, exact: torch.Tensor) -> float:
    return (logits(model) - exact).abs().max().item()


@pytest.fixture(scope="module")
def originals() -> dict[str, nn.Module]:
    return {name: make_huggingface(name) for name in MODELS}


def build(te: Any, original: nn.Module, layer: str) -> tuple[TeModel, hf.TeBlocks]:
    model = TeModel(te, hf.read_config(original.config), config=original.config, **LAYERS[layer])
    return model, hf.TeBlocks.of(model)


def fill(model: nn.Module, tensors: Any) -> nn.Module:
    """Fill entries that load_state_dict does not find, if they are pickles or frequencies, not parameters."""
    outcome = model.load_state_dict(dict(tensors), strict=False)
    assert not outcome.unexpected_keys
    assert all(key.endswith(("_extra_state", "inv_freq")) for key in outcome.missing_keys), outcome
    return model


@pytest.mark.parametrize(("name", "layer"), CASES, ids=["-".join(case) for case in CASES])
def test_huggingface_round_trip_gives_the_same_logits(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, name: str, layer: str
) -> None:
    original = originals[name]
    exact, bound = rounding(original)
    folder, back = tmp_path / "original", tmp_path / "back"
    original.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()

    model, blocks = build(te, original, layer)
    fill(model, hf.import_huggingface(folder, blocks=blocks))
    assert difference(model, exact) <= bound
    if not any(key.endswith("experts.down_proj") for key in original.state_dict()):
        # Experts have other names in the files than in the memory of transformers 5.
        in_memory = dict(hf.import_huggingface(original.state_dict(), config=original.config, blocks=blocks))
        assert all(torch.equal(in_memory[k], v) for k, v in model.named_parameters()), (
            "of the state dict, too"
        )

    hf.save_huggingface(back, model, config=folder, max_file_bytes=20_000)
    hf.export_huggingface(model.state_dict(), tmp_path / "state", config=folder, blocks=blocks)
    assert json.loads((back / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    exported, info = type(original).from_pretrained(
        back, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    theirs = original.state_dict()
    assert exported.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in exported.state_dict().items())
    assert torch.equal(logits(exported), logits(original))
    files = [json.loads((f / "model.safetensors.index.json").read_text()) for f in (folder, back)]
    assert files[0]["weight_map"].keys() == files[1]["weight_map"].keys()
    from_state = open_safetensors(tmp_path / "state")[0]
    assert all(
        torch.equal(lazy.full(), from_state[key].full()) for key, lazy in open_safetensors(back)[0].items()
    )


def swap(group: Group) -> Group:
    """Return the group with its last two parts swapped."""
    names = group.huggingface.names
    return replace(group, huggingface=replace(group.huggingface, names=(*names[:-2], names[-1], names[-2])))


def mistaken(weights: hf.WeightMap, mistake: str) -> hf.WeightMap:
    """Return the map with an error that does not change shapes."""
    groups = []
    for group in weights.groups:
        name = group.te.names[0]
        if (mistake == "gate and up swapped" and "fc1_weight" in name) or (
            mistake == "key and value swapped" and "qkv.weight" in name
        ):
            group = swap(group)
        elif mistake == "not interleaved" and group.te.groups > 1:
            group = replace(group, te=replace(group.te, groups=1))
        elif mistake == "gammas as they are":
            group = replace(group, te=replace(group.te, zero_centered=False))
        elif mistake == "not transposed" and "self_attention.proj.weight" in name:
            group = replace(group, huggingface=replace(group.huggingface, transposed=False))
        groups.append(group)
    assert tuple(groups) != weights.groups, "no mistake made"
    return replace(weights, groups=tuple(groups))


MISTAKES = [
    ("llama", "interleaved", "gate and up swapped"),
    ("llama", "interleaved", "key and value swapped"),
    ("llama", "interleaved", "not interleaved"),
    ("llama", "zero-centered", "gammas as they are"),
    ("gpt2", "interleaved", "not interleaved"),
    ("gpt2", "stacked", "not transposed"),
]


@pytest.mark.parametrize(("name", "layer", "mistake"), MISTAKES)
def test_control_wrong_mapping_changes_logits(
    te: Any, originals: dict[str, nn.Module], name: str, layer: str, mistake: str
) -> None:
    exact, bound = rounding(originals[name])
    model, blocks = build(te, originals[name], layer)
    weights = hf.WeightMap.build(originals[name].config, blocks)
    state = originals[name].state_dict()
    assert difference(fill(model, to_te(weights, state)), exact) <= bound
    assert difference(fill(model, to_te(mistaken(weights, mistake), state)), exact) > 1000 * bound


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("llama", {"rotary_pos_interleaved": True}),
        ("llama", {"layernorm_epsilon": 1e-2}),
        ("mistral", {"window_size": (3, 0)}),
        ("qwen3", {"qk_norm_before_rope": False}),
        ("gpt2", {"activation": "relu"}),
    ],
    ids=str,
)
def test_control_different_layer_option_changes_logits(
    te: Any, originals: dict[str, nn.Module], name: str, option: dict[str, Any]
) -> None:
    exact, bound = rounding(originals[name])
    model = TeModel(te, hf.read_config(originals[name].config), **option)
    state = hf.import_huggingface(originals[name].state_dict(), config=originals[name].config)
    assert difference(fill(model, state), exact) > 100 * bound


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("llama", {"rotary_pos_interleaved": True}, "rotary_pos_interleaved: True, not False"),
        ("llama", {"layernorm_epsilon": 1e-2}, "eps: 0.01, not 1e-05"),
        ("llama", {"activation": "geglu"}, "activation: geglu, not swiglu"),
        ("llama", {"num_attention_heads": 8, "num_gqa_groups": 4, "kv_channels": 4}, "heads: 8, not 4"),
        ("mistral", {"window_size": (3, 0)}, r"window_size: \[3, 0\], not \[2, 0\]"),
        ("llama", {"parallel_attention_mlp": True}, "parallel_attention_mlp: True, not False"),
        ("qwen3", {"qk_norm_before_rope": False}, "qk_norm_before_rope: False, not True"),
        ("gpt2", {"self_attn_mask_type": "no_mask"}, "self_attn_mask_type: no_mask, not causal"),
    ],
    ids=str,
)
def test_different_layer_option_is_rejected(
    te: Any, originals: dict[str, nn.Module], name: str, option: dict[str, Any], text: str
) -> None:
    config = originals[name].config
    model = TeModel(te, hf.read_config(config), **option)
    with pytest.raises(CheckpointError, match=rf"a different function: .*{text} \(layers\.0"):
        hf.load_huggingface(originals[name].state_dict(), model, config=config)
    with pytest.raises(CheckpointError, match=rf"a different function: .*{text} \(layers\.0"):
        hf.save_huggingface("nowhere", model, config=config)


@pytest.mark.parametrize("name", MODELS)
def test_model_specific_layers_load_with_the_same_logits(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, name: str
) -> None:
    exact, bound = rounding(originals[name])
    model, _ = build(te, originals[name], "interleaved")
    originals[name].save_pretrained(tmp_path)
    hf.load_huggingface(tmp_path, model)
    assert difference(model, exact) <= bound


def test_load_huggingface_fills_a_model(te: Any, originals: dict[str, nn.Module], tmp_path: Path) -> None:
    original = originals["llama-tied-biased"]
    original.save_pretrained(tmp_path)
    exact, bound = rounding(original)
    model, _ = build(te, original, "zero-centered")
    hf.load_huggingface(tmp_path, model)
    assert difference(model, exact) <= bound
    assert model.head.weight is model.embedding.weight

    before = {key: value.clone() for key, value in model.named_parameters()}
    other = TeModel(te, replace(hf.read_config(tmp_path), ffn=40, tied=False))
    with pytest.raises(CheckpointError) as error:
        hf.load_huggingface(tmp_path, other)
    assert "fc1_weight: saved (128, 32), model has (80, 32)" in str(error.value)
    with pytest.raises(
        CheckpointError,
        match=r"only in the checkpoint \(out\.weight\)",
    ):
        hf.load_huggingface(tmp_path, model, names=hf.TeNames(head="out.weight"))
    broken = original.state_dict()
    broken["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[3\]"):
        hf.load_huggingface(broken, model, config=original.config)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters()), "nothing changed"


class OwnNorm(nn.Module):
    """A user-defined norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def test_unknown_layer_options_are_rejected(te: Any, originals: dict[str, nn.Module]) -> None:
    with pytest.raises(CheckpointError, match=r"begins with layers\.0\..*names=TeNames\(\.\.\.\)"):
        hf.TeBlocks.of(nn.Linear(2, 2))
    # The norm of a user's own class: only the user knows.
    model = TeModel(te, hf.read_config(originals["llama"].config))
    model.norm = OwnNorm(32)
    with pytest.raises(CheckpointError, match=r"unknown options of the layers: final_norm_zero_centered"):
        hf.load_huggingface(originals["llama"].state_dict(), model, config=originals["llama"].config)
    told = hf.TeBlocks(final_norm_zero_centered=False)
    hf.load_huggingface(originals["llama"].state_dict(), model, config=originals["llama"].config, blocks=told)


def test_export_of_a_state_dict_requires_layer_options(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path
) -> None:
    config = originals["llama"].config
    model = TeModel(te, hf.read_config(config), fuse_qkv_params=True)
    with pytest.raises(
        CheckpointError,
        match=r"unknown options of the layers: qkv_weight_interleaved, zero_centered_gamma, final",
    ):
        hf.export_huggingface(model.state_dict(), tmp_path / "x", config=config)
    sharded = dict(model.state_dict())
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    sharded["norm.weight"] = DTensor.from_local(sharded["norm.weight"], mesh, run_check=False)
    with pytest.raises(
        CheckpointError, match=r"unknown options.*Fix: use te_fsdp\.checkpoint\.save_huggingface\(path, model"
    ):
        hf.export_huggingface(sharded, tmp_path / "x", config=config)
    with pytest.raises(CheckpointError, match=r"norm.weight is a DTensor.*save_huggingface\(path, model"):
        hf.export_huggingface(sharded, tmp_path / "x", config=config, blocks=hf.TeBlocks.of(model))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["model", "state dict"])
def test_biases_without_a_hugging_face_parameter_are_rejected(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, call: str
) -> None:
    config = originals["qwen2"].config
    model = TeModel(te, hf.read_config(config))
    with torch.no_grad():
        model.layers[1].layernorm_mlp.fc2_bias[3] = 1e-9
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.layernorm_mlp\.fc2_bias: values that .* no parameter for"
    ):
        if call == "model":
            hf.save_huggingface(tmp_path / "x", model, config=config)
        else:
            hf.export_huggingface(
                model.state_dict(), tmp_path / "x", config=config, blocks=hf.TeBlocks.of(model)
            )
    assert not list(tmp_path.iterdir())


def test_folders_on_object_storage_are_rejected(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, monkeypatch: Any
) -> None:
    """Folders cannot be written on object storage. No directory is created in the current one instead."""
    monkeypatch.chdir(tmp_path)
    config = originals["llama"].config
    model, blocks = build(te, originals["llama"], next(iter(LAYERS)))
    with pytest.raises(CheckpointError, match="memory://bucket/x: cannot be written on object storage"):
        hf.save_huggingface("memory://bucket/x", model, config=config)
    with pytest.raises(CheckpointError, match="memory://bucket/x: cannot be written on object storage"):
        hf.export_huggingface(model.state_dict(), "memory://bucket/x", config=config, blocks=blocks)
    assert list(tmp_path.iterdir()) == []
    hf.save_huggingface(f"file://{tmp_path}/x", model, config=config)
    assert (tmp_path / "x" / "config.json").exists()


def test_each_norm_keeps_its_own_centering(te: Any, originals: dict[str, nn.Module], tmp_path: Path) -> None:
    """Norms that differ from the layers' norms keep their own setting."""
    config, folder = originals["mixtral"].config, tmp_path / "mixtral"
    originals["mixtral"].save_pretrained(folder)
    exact, bound = rounding(originals["mixtral"])
    model = TeModel(te, hf.read_config(config), config=config, zero_centered_gamma=True)
    model.norm = te.RMSNorm(32, eps=model.norm.eps)
    model.layers[1].mlp_norm = te.RMSNorm(32, eps=model.norm.eps)
    hf.load_huggingface(folder, model)
    assert difference(model, exact) <= bound
    hf.save_huggingface(tmp_path / "back", model, config=config)
    before, after = (open_safetensors(path)[0] for path in (folder, tmp_path / "back"))
    assert all(torch.equal(lazy.full(), after[name].full()) for name, lazy in before.items())


def test_single_grouped_weight_of_experts_round_trips(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    config, folder = originals["mixtral"].config, tmp_path / "mixtral"
    originals["mixtral"].save_pretrained(folder)
    model = TeModel(te, hf.read_config(config), config=config)
    single = {"bias": False, "device": "cpu", "single_grouped_weight": True, "use_grouped_tensor": True}
    model.layers[1].experts.fc1 = te.GroupedLinear(4, 32, 128, **single)
    model.layers[1].experts.fc2 = te.GroupedLinear(4, 64, 32, **single)
    assert "layers.1.experts.fc1.weight" in dict(model.named_parameters())
    hf.load_huggingface(folder, model)
    hf.save_huggingface(tmp_path / "back", model, config=config)
    before, after = (open_safetensors(path)[0] for path in (folder, tmp_path / "back"))
    assert all(torch.equal(lazy.full(), after[name].full()) for name, lazy in before.items())


class Watch(TorchDispatchMode):
    """Record the peak memory of tensors created under it."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.living = {key: item for key, item in self.living.items() if not item[0].expired()}
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.living.values()))
        return out


def test_memory_is_limited_to_one_group_of_layers(te: Any, tmp_path: Path) -> None:
    sizes = {
        **SIZES,
        "num_hidden_layers": 12,
        "hidden_size": 64,
        "intermediate_size": 128,
        "model_type": "llama",
    }
    model = TeModel(te, hf.read_config(sizes), fuse_qkv_params=True, zero_centered_gamma=True)
    weights = hf.WeightMap.build(sizes)
    largest = max(4 * sum(math.prod(part) for part in group.parts) for group in weights.groups)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 6 * largest < whole / 2
    with Watch() as watch:
        hf.save_huggingface(tmp_path / "x", model, config=sizes)
    assert 0 < watch.most <= 5 * largest
    with Watch() as streamed:
        assert all(hf.import_huggingface(tmp_path / "x", blocks=hf.TeBlocks.of(model)))
    assert 0 < streamed.most <= 5 * largest
    with Watch() as control:
        kept = dict(hf.import_huggingface(tmp_path / "x", blocks=hf.TeBlocks.of(model)))
    assert kept and control.most > whole / 2, "what holds all of it is seen"


PAGE = Path(__file__).resolve().parents[2] / "docs/huggingface.md"


def test_huggingface_page_runs(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-llama"
    originals["llama-tied-biased"].save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))
    results: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), results)

    with torch.no_grad():
        expected = originals["llama-tied-biased"](torch.arange(16).view(2, 8)).logits
    _, bound = rounding(originals["llama-tied-biased"])
    assert (results["logits"] - expected).abs().max() <= 2 * bound  # both are rounded
    trained_config = json.loads((tmp_path / "my-llama-trained/config.json").read_text())
    assert trained_config == json.loads((folder / "config.json").read_text())
    assert (tmp_path / "my-llama-trained/tokenizer.json").exists()
    trained = safetensors.torch.load_file(tmp_path / "my-llama-trained/model.safetensors")
    before = safetensors.torch.load_file(folder / "model.safetensors")
    assert trained.keys() == before.keys() and all(torch.equal(trained[k], before[k]) for k in before)
    assert results["names"].head is None


def test_tied_weights_that_differ_in_the_files_are_rejected(te: Any, originals: dict[str, nn.Module]) -> None:
    # Only reading the values shows it.
    model = TeModel(te, hf.read_config(originals["llama-tied-biased"].config))
    before = {key: value.clone() for key, value in model.named_parameters()}
    broken = dict(originals["llama-tied-biased"].state_dict())
    broken["lm_head.weight"] = broken["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from"):
        hf.load_huggingface(broken, model, config=originals["llama-tied-biased"].config)
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters()), "nothing changed"


def test_main_weights_follow_loaded_weights(te: Any, originals: dict[str, nn.Module]) -> None:
    """Otherwise the next step would restore the old weights from the main weights."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    original = copy.deepcopy(originals["llama"]).bfloat16()
    model, _ = build(te, original, "split")
    model.bfloat16()  # fp32 weights have no main weights
    optimizer = FusedAdam(model.parameters(), lr=0.5, master_weights=True)

    def step() -> dict[str, torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    before = step()
    hf.load_huggingface(original.state_dict(), model, config=original.config)
    loaded = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.param_groups[0]["lr"] = 0.0
    after = step()
    assert all(torch.equal(after[name], loaded[name]) for name in loaded)
    assert not any(torch.equal(after[name], before[name]) for name in loaded)


RECIPES = {"current": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_load_huggingface_quantizes_each_weight_once(
    te: Any, originals: dict[str, nn.Module], tmp_path: Path, recipe: str
) -> None:
    """Each weight is quantized once from its unsharded value. Main weights get the values in the files."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.optimizers import FusedAdam

    original = copy.deepcopy(originals["llama"]).bfloat16()
    original.save_pretrained(tmp_path / "model")
    with te.quantized_model_init(recipe=getattr(recipes, RECIPES[recipe])()):
        model, oracle = (build(te, original, "stacked")[0].bfloat16() for _ in range(2))
    optimizer = FusedAdam(model.parameters(), lr=0.0, master_weights=True)
    hf.load_huggingface(tmp_path / "model", model, optimizer)
    weights = dict(hf.import_huggingface(tmp_path / "model", blocks=hf.TeBlocks.of(model)))
    quantized = 0
    for (name, got), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        with torch.no_grad():
            expected.copy_(weights[name])
        if isinstance(got, te.QuantizedTensor):
            quantized += 1
            assert torch.equal(optimizer.state[got]["master_param"], weights[name].float()), name
            assert not torch.equal(got.dequantize(), weights[name].to(got.dtype)), "the control: rounded"
            got, expected = got.dequantize(), expected.dequantize()
        assert torch.equal(got, expected), name
    assert quantized == 2 * 4
