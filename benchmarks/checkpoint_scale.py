"""What a checkpoint of a very large job costs beside its data, from shapes alone: one process, no data, no ranks.

    python benchmarks/checkpoint_scale.py --model dense --measured 8 --ranks 1024 16384
    python benchmarks/checkpoint_scale.py --model moe --measured 64 --ranks 1024 16384

The parameters are those of Llama 3.1 405B, or of DeepSeek-V3 (671B, 256 experts over 64 ranks), with AdamW's state, cut
over all ranks along dim 0, experts over the ranks that share them. What a rank plans, and what rank 0 makes of the
plans of all, is run for some of the ranks and counted per stored piece; bytes and seconds of all are in proportion.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from te_fsdp import _torch
from te_fsdp.checkpoint import save_plan, writing
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.manifest import DCP_METADATA
from te_fsdp.checkpoint.portable.dcp import unpickle_metadata
from te_fsdp.checkpoint.sums import SummingWriter, without_collector

#: Experts' weights have a leading dim, over which ranks of expert parallelism share them.
EXPERTS, EXPERT_RANKS = 256, 64
Shapes = dict[str, tuple[int, ...]]


def dense() -> Shapes:
    """Of every parameter of Llama 3.1 405B, by name."""
    hidden, ffn, kv, vocabulary = 16384, 53248, 2048, 128256
    layer = {
        "self_attention.layernorm_qkv.layer_norm_weight": (hidden,),
        "self_attention.layernorm_qkv.query_weight": (hidden, hidden),
        "self_attention.layernorm_qkv.key_weight": (kv, hidden),
        "self_attention.layernorm_qkv.value_weight": (kv, hidden),
        "self_attention.proj.weight": (hidden, hidden),
        "layernorm_mlp.layer_norm_weight": (hidden,),
        "layernorm_mlp.fc1_weight": (2 * ffn, hidden),
        "layernorm_mlp.fc2_weight": (hidden, ffn),
    }
    found = {f"layers.{n}.{name}": shape for n in range(126) for name, shape in layer.items()}
    ends = {
        "embedding.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocabulary, hidden),
    }
    return {**found, **ends}


def moe() -> Shapes:
    """The same of DeepSeek-V3: three dense layers, then 58 with experts."""
    hidden, ffn, expert, vocabulary = 7168, 18432, 2048, 129280
    attention = {
        "norm.weight": (hidden,),
        "q_a.weight": (1536, hidden),
        "q_norm.weight": (1536,),
        "q_b.weight": (24576, 1536),
        "kv_a.weight": (576, hidden),
        "kv_norm.weight": (512,),
        "kv_b.weight": (32768, 512),
        "proj.weight": (hidden, 16384),
        "mlp_norm.weight": (hidden,),
    }
    mlp = {"fc1.weight": (2 * ffn, hidden), "fc2.weight": (hidden, ffn)}
    experts = {
        "router.weight": (EXPERTS, hidden),
        "shared.fc1.weight": (2 * expert, hidden),
        "shared.fc2.weight": (hidden, expert),
        "experts.fc1.weight": (EXPERTS, 2 * expert, hidden),
        "experts.fc2.weight": (EXPERTS, hidden, expert),
    }
    layers = [{**attention, **(mlp if n < 3 else experts)} for n in range(61)]
    found = {f"layers.{n}.{name}": shape for n, layer in enumerate(layers) for name, shape in layer.items()}
    ends = {
        "embedding.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocabulary, hidden),
    }
    return {**found, **ends}


def places(shape: tuple[int, ...], rank: int, ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Where the pieces that a rank holds begin, and their shapes."""
    lead: list[tuple[int, ...]] = [()]
    if len(shape) == 3:
        own = shape[0] // EXPERT_RANKS
        lead, rank, ranks = (
            [(rank % EXPERT_RANKS * own + n,) for n in range(own)],
            rank // EXPERT_RANKS,
            ranks // EXPERT_RANKS,
        )
        shape = shape[1:]
    rows = -(-shape[0] // ranks)
    first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
    rest = shape[1:]
    return [
        ((*n, first, *(0 for _ in rest)), (*(1 for _ in n), last - first, *rest))
        for n in lead
        if first < last
    ]


def entries(shapes: Shapes, rank: int, ranks: int) -> dict[str, Entry]:
    """What one rank holds: rows of weights and moments, and every step."""
    found = {}
    for name, shape in shapes.items():
        boxes = places(shape, rank, ranks)
        pieces = tuple(Piece(begin, torch.empty(sizes, device="meta")) for begin, sizes in boxes)
        for key in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            found[key] = Entry(shape, torch.float32, pieces)
        step = Piece((), torch.empty((), device="meta"))
        found[f"optimizer.state.{name}.step"] = Entry((), torch.float32, (step,))
    return found


def pieces_of(shape: tuple[int, ...], ranks: int) -> int:
    """How many pieces a tensor is stored in."""
    if len(shape) == 3:
        return shape[0] * pieces_of(shape[1:], ranks // EXPERT_RANKS)
    return -(-shape[0] // -(-shape[0] // ranks))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and the result."""
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def manifest_bytes(shapes: Shapes) -> int:
    """Of the two large parts of the manifest; the same for any number of ranks."""
    tensor = {name: {"shape": list(shape), "dtype": "float32"} for name, shape in shapes.items()}
    weights = {name: {**one, "layout": "plain", "format": None} for name, one in tensor.items()}
    state = {
        n: {"exp_avg": t, "exp_avg_sq": t, "step": {"shape": [], "dtype": "float32"}}
        for n, t in tensor.items()
    }
    return len(json.dumps([weights, state, list(tensor)]))


def measure(shapes: Shapes, measured: int, all_ranks: list[int]) -> dict[str, Any]:
    """Numbers of all ranks, from some."""
    messages, seconds, items = [], 0.0, []
    for rank in range(measured):
        own = entries(shapes, rank, measured)
        spent, message = timed(lambda own=own: pickle.dumps(save_plan.held(own)))
        messages.append(message)
        seconds += spent
        spent, made = timed(lambda own=own: writing.plan_items(own))
        items.append(made)
        seconds += spent
    with tempfile.TemporaryDirectory() as directory, without_collector():
        unpickled, seen = timed(lambda: [pickle.loads(message) for message in messages])
        together, (parts, _, metadata) = timed(lambda: save_plan.divide(seen))
        replies, answers = timed(lambda: [pickle.dumps(part) for part in parts])
        writer = SummingWriter(Path(directory), "0" * 32)
        writer.mark = "0" * 73
        written = [[own[at] for at in part.writes] for own, part in zip(items, parts, strict=True)]
        told, results = timed(partial(_sent, _results(written)))
        dumped, _ = timed(lambda: writer.finish(metadata, results))
        data = Path(directory, DCP_METADATA).read_bytes()
        loaded, _ = timed(lambda: unpickle_metadata(data))
    stored = len(metadata.storage_data)
    own = entries(shapes, 0, measured)
    signature = writing.signature_of(own)
    again = min(timed(lambda: writing.signature_of(own) == signature)[0] for _ in range(3))
    found: dict[str, Any] = {"measured on ranks": measured, "manifest bytes": manifest_bytes(shapes)}
    for ranks in all_ranks:
        # Steps are written once, by some rank; but each rank tells of them.
        all_stored = sum(3 * pieces_of(shape, ranks) + 1 for shape in shapes.values())
        scale = all_stored / stored
        found[f"{ranks} ranks"] = {
            "stored pieces": all_stored,
            "files": ranks + 2,
            f"{DCP_METADATA} bytes": round(len(data) * scale),
            "bytes of checksums": 12 * all_stored,
            "first save, seconds on a rank": seconds / measured,
            "first save, bytes of a rank's message, and of the answer": (len(messages[0]), len(answers[0])),
            "first save, seconds of planning on rank 0": (unpickled + together + replies) * scale,
            "first save, seconds of metadata on rank 0": (told + dumped) * scale,
            "later saves, seconds on a rank": again,
            "later saves, bytes of a rank's messages": 40 + 20 * len(parts[0].groups),
            "seconds of reading the metadata, on every rank of a load": loaded * scale,
        }
    return found


def _sent(value: Any) -> Any:
    """As it comes to another rank."""
    return pickle.loads(pickle.dumps(value))


def _results(written: list[list[WriteItem]]) -> list[list[WriteResult]]:
    """What the ranks tell of what they have written."""
    place = _torch.place_class()
    return [
        [WriteResult(i.index, 1 << 20, place(f"__{r}_0.distcp", n << 20, 1 << 20)) for n, i in enumerate(own)]
        for r, own in enumerate(written)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--measured", type=int, default=64, help="ranks that are really planned (3 MiB each)")
    options = parser.parse_args()
    shapes = dense() if options.model == "dense" else moe()
    print(json.dumps(measure(shapes, options.measured, options.ranks), indent=1))


if __name__ == "__main__":
    main()
