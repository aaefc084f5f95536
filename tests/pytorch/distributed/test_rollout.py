"""``te_fsdp.huggingface.iter_weights`` streams a sharded model's weights to inference engines, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointing import rollout
from test_huggingface_load import TRAINED

from tests.unit.huggingface_models import make_huggingface


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", TRAINED)
def test_streams_equal_files(pool, tmp_path, case):
    """Check every format and receiver on every mesh. A later stream sends only changes."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    name, options = TRAINED[case]
    make_huggingface(name).save_pretrained(tmp_path / "model")
    arguments = {"folder": str(tmp_path / "model"), "case": options, "target": str(tmp_path / "saved")}
    for found in pool.run(rollout.streams, 4, **arguments):
        assert found["native"] == found["bf16"] == found["unchanged"] == [], found
        assert found["control"] > 0.5 and found["buckets"] > 2, found
        wrong, same_names, counts = found["receiver 1"]
        assert wrong == [] and same_names and counts[1] > 0 == counts[0] + counts[2] + counts[3], found
        wrong, same_names, counts = found["receiver [0, 1, 2, 3]"]
        assert wrong == [] and same_names and min(counts) > 0, found
        assert found["fp8"]["wrong"] == [] and found["fp8"]["quantized"] > 10, found
        assert found["changed"][0] == [] and found["changed"][1] > 0.9, found
        assert found["one changed"] == ["model.norm.weight"], found


DENSE = {"axes": {"dp_shard": 2, "tp": 2}, "layers": {"fuse_qkv_params": True}}
EXPERTS = {"axes": {"dp_shard": 2, "ep": 2}, "layers": {"fuse_qkv_params": True}}
OTHER_FAMILIES = {"mistral": DENSE, "gpt2": DENSE, "qwen2-moe": EXPERTS, "qwen3-moe": EXPERTS}


@pytest.mark.ranks(4)
def test_streams_of_remaining_model_families(pool, tmp_path):
    """Families that the cases above lack: the stream is the loaded folder, and after a step the saved one."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    folders = {}
    for name, case in OTHER_FAMILIES.items():
        make_huggingface(name).save_pretrained(tmp_path / name)
        folders[name] = str(tmp_path / name), case
    for found in pool.run(rollout.families, 4, folders=folders, target=str(tmp_path / "saved")):
        assert found.keys() == OTHER_FAMILIES.keys()
        for family, one in found.items():
            assert one["loaded"] == one["saved"] == [] and one["trained"] > 0.8, (family, one)


BLOCKS = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
BUCKET = 2 << 20


@pytest.mark.ranks(4)
@pytest.mark.arch("9.0")
@pytest.mark.parametrize("interleaved", [False, True])
def test_streamed_fp8_bytes_equal_the_unsharded_model(pool, tmp_path, interleaved):
    """Bytes and scales of Float8BlockScaling weights after 20 steps are those of the unsharded model.

    Query, key and value that are interleaved by heads of 64 rows share blocks: they are quantized again.
    """
    for found in pool.run(
        rollout.fp8_bytes,
        4,
        config=BLOCKS,
        axes={"dp_shard": 2, "tp": 2},
        steps=20,
        interleaved=interleaved,
        bucket=BUCKET,
        target=str(tmp_path / "saved"),
    ):
        assert len(found["same"]) == (8 if interleaved else 14) and not found["control"], found
        assert (
            found["different"]
            == 2 * ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] * interleaved
        )
        peak, of_all = found["peaks"]
        # Query, key and value that are quantized again exceed a bucket: four bytes a value, in two copies and the
        # temporaries of the quantization.
        assert 0 < peak <= (10 * 3 * 512 * 513 if interleaved else BUCKET), found
        assert interleaved or peak < found["bytes"] / 2, found
        assert of_all > found["bytes"], "the control: one bucket for all weights"


PAGE = Path(__file__).resolve().parents[3] / "docs/rollout.md"


@pytest.mark.ranks(2)
def test_documented_transfer_to_an_inference_engine(pool, tmp_path):
    """Check that the functions of docs/rollout.md send every tensor to an engine outside of the job."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    make_huggingface("qwen3").save_pretrained(tmp_path / "model")
    case = {"axes": {"dp_shard": 2}, "layers": {"fuse_qkv_params": True}}
    arguments = {"folder": str(tmp_path / "model"), "case": case, "page": PAGE.read_text()}
    for found in pool.run(rollout.transfer_through_a_group, 2, **arguments):
        assert found["wrong"] == [] and found["sent"] > 30, found
