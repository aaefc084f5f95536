"""The folder of a Hugging Face model on a mesh.

Each rank keeps its own shards. The folder is also written from a mesh.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpointing import huggingface

from te_fsdp.checkpoint.lazy_tensors import InMemory, write_folder
from te_fsdp.checkpoint.portable import huggingface as hf
from tests.unit.huggingface_models import make_huggingface

CONFIG = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "attention_bias": True,
}


def write_model(
    folder: Path, dtype: torch.dtype = torch.float32, last: float = 1.0, **changes: object
) -> None:
    """Write a folder as save_pretrained would, of random weights. The last tensor is multiplied by ``last``."""
    generator, config = torch.Generator().manual_seed(0), CONFIG | changes
    shapes = hf.WeightMap.build(config).shapes(te=False)
    del shapes["lm_head.weight"]
    tensors = {n: (torch.randn(shape, generator=generator) * 0.2).to(dtype) for n, shape in shapes.items()}
    tensors[[*tensors][-1]] *= last
    folder.mkdir()
    write_folder(folder, {n: InMemory(t) for n, t in tensors.items()}, {}, lambda _: None, 40_000)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "tp": 2}], ids=["dp2-tp2", "tp2"])
def test_huggingface_folder_loads_onto_a_mesh(pool, request, tmp_path, axes):
    ranks = axes["dp_shard"] * axes["tp"]
    if ranks == 2 and request.getfixturevalue("device_type") == "cpu":
        pytest.skip("for machines with two GPUs; the CPU runs four ranks")
    write_model(tmp_path / "model")
    results = pool.run(
        huggingface.load_onto_mesh,
        ranks,
        folder=str(tmp_path / "model"),
        config=CONFIG,
        axes=axes,
        checkpoint=str(tmp_path / "checkpoint"),
    )
    for rank, outcome in enumerate(results):
        assert outcome["direct"] == outcome["through a checkpoint"] == [], f"rank {rank}"
        assert outcome["refusal"].startswith("on rank(s) 1: "), f"rank {rank}"
        # Biases that only TransformerEngine has are zero before and after.
        assert len(set(outcome["before"])) == outcome["parameters"] - 2 * 2, f"rank {rank}"
        # Some ten sums of about 100 terms in a different order, each within 100 * 2**-24 of the largest logit.
        assert outcome["error"] < 10 * 100 * 2**-24 * outcome["logit"], f"rank {rank}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "other",
    [{"dtype": torch.bfloat16}, {"attention_bias": False}, {"last": 2.0}, {}],
    ids=["dtype", "biases", "values", "equal"],
)
def test_different_folders_on_two_ranks_raise(pool, tmp_path, other):
    """The ranks loaded shards of both models, and froze different biases, without an error."""
    write_model(tmp_path / "a")
    write_model(tmp_path / "b", **other)
    folders = [str(tmp_path / name) for name in "ab"]
    for error, unchanged in pool.run(huggingface.load_different_folders, 2, folders=folders, config=CONFIG):
        assert error.startswith("load_huggingface: the ranks read different models" if other else "")
        assert unchanged == bool(other) == bool(error)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"num_hidden_layers": 1}, "on rank(s) 1: tensors that do not fit the map: unexpected"),
        ({"attention_bias": False}, "iter_weights: the ranks read different models"),
        ({"rms_norm_eps": 1e-6}, ""),  # the default
    ],
    ids=["layers", "biases", "equal"],
)
def test_different_configs_on_two_ranks_raise(pool, tmp_path, other, error):
    """The other rank waited for a message."""
    write_model(tmp_path / "a")
    write_model(tmp_path / "b", **other)
    folders, target = [str(tmp_path / name) for name in "ab"], str(tmp_path / "saved")
    options = {"folders": folders, "config": CONFIG, "target": target}
    for found, exists in pool.run(huggingface.save_with_different_configs, 2, **options):
        assert found.startswith(error) and bool(found) == bool(error) != exists


FUSED = {"fuse_qkv_params": True}
CENTERED = {**FUSED, "zero_centered_gamma": True}
STACKED = {**FUSED, "qkv_weight_interleaved": False}
TRAINED = {
    "llama-dp2-tp2": ("llama", {"axes": {"dp_shard": 2, "tp": 2}, "layers": STACKED}),
    "gemma-hsdp": (
        "gemma",
        {"axes": {"dp_replicate": 2, "dp_shard": 2}, "layers": CENTERED},
    ),
    # Its layers have biases that the folder lacks.
    "qwen2-dp2-tp2": ("qwen2", {"axes": {"dp_shard": 2, "tp": 2}, "layers": FUSED}),
    "mixtral-dp2-ep2": ("mixtral", {"axes": {"dp_shard": 2, "ep": 2}, "layers": FUSED}),
    "qwen3-fp8-dp2-tp2": ("qwen3", {"axes": {"dp_shard": 2, "tp": 2}, "layers": FUSED, "quantized": True}),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", TRAINED)
def test_trained_model_saves_as_a_huggingface_folder(pool, tmp_path, case):
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    name, options = TRAINED[case]
    make_huggingface(name).save_pretrained(tmp_path / "model")
    results = pool.run(
        huggingface.save_trained,
        4,
        folder=str(tmp_path / "model"),
        case=options,
        target=str(tmp_path / "trained"),
    )
    first = results[0]
    assert [outcome["reloaded"] for outcome in results] == [[]] * 4
    assert first["other than exported"] == [] and first["hidden"] == []
    assert first["trained"] > 0.9, "a different model than before"
    files = [name for name in first["files"] if name.endswith(".safetensors")]
    assert len(files) > 1 and {"config.json", "model.safetensors.index.json"} < set(first["files"])
    if "our error" in first:
        # Both do the same sums in fp32, in a different order; of 640 logits the largest errors are within four times.
        assert 0 < first["our error"] <= 4 * first["their error"] < 1e-4 * first["largest"]


@pytest.mark.ranks(2)
def test_write_failure_on_one_rank_raises_on_all_ranks(pool, tmp_path):
    write_model(tmp_path / "model")
    results = pool.run(
        huggingface.save_with_faults,
        2,
        folder=str(tmp_path / "model"),
        config=CONFIG,
        target=str(tmp_path / "trained"),
    )
    for outcome in results:
        assert outcome["errors"] == results[0]["errors"] and outcome["left"] == []
        assert outcome["errors"][0].startswith("on rank(s) 1: OSError: [Errno 28] No space left on device")
        for text in outcome["errors"][1:]:
            assert text.startswith("on rank(s) 1: RuntimeError: out of memory")
        assert len(outcome["errors"]) == 3
        assert "model.safetensors.index.json" in outcome["written"]


@pytest.mark.ranks(2)
def test_tp_sharded_gate_up_of_experts_raises(pool, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    make_huggingface("mixtral").save_pretrained(tmp_path / "model")
    for texts in pool.run(huggingface.errors_of_tp_sharded_gate_up, 2, folder=str(tmp_path / "model")):
        assert len(texts) == 2
        for text in texts:
            assert "sharded by tensor parallelism as one block (use expert parallelism): " in text
            assert "layers.1.experts.fc1.weight0" in text and "layers.0" not in text
