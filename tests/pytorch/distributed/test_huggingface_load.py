"""A Hugging Face model's folder loads onto a mesh, each rank keeping its own pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpointing import huggingface

from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.checkpoint.portable.lazy import InMemory
from te_fsdp.checkpoint.portable.safetensors import write_folder

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


def write_model(folder: Path) -> None:
    """A folder as save_pretrained would write it, of random weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = hf.WeightMap.build(CONFIG).shapes(te=False)
    del shapes["lm_head.weight"]
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    folder.mkdir()
    write_folder(folder, {n: InMemory(t) for n, t in tensors.items()}, {}, lambda _: None, 40_000)
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "tp": 2}], ids=["dp2-tp2", "tp2"])
def test_load_onto_a_mesh(pool, request, tmp_path, axes):
    ranks = axes["dp_shard"] * axes["tp"]
    if ranks == 2 and request.getfixturevalue("device_type") == "cpu":
        pytest.skip("for machines with two GPUs; the CPU runs four ranks")
    write_model(tmp_path / "model")
    results = pool.run(
        huggingface.load_everywhere,
        ranks,
        env={"NVIDIA_TF32_OVERRIDE": "0"},
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
        # Some ten sums of about 100 terms in another order, each within 100 * 2**-24 of the largest logit.
        assert outcome["error"] < 10 * 100 * 2**-24 * outcome["logit"], f"rank {rank}"
