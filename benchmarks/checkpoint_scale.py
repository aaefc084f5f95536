"""What a checkpoint of a very large job costs beside its data, from shapes alone: one process, no data, no ranks.

    python benchmarks/checkpoint_scale.py --measured 32 --ranks 1024

The parameters are those of Llama 3.1 405B with AdamW's state, cut over all ranks along dim 0. What a rank plans, and
what rank 0 makes of the plans of all, is run for some of the ranks and counted per stored piece; bytes and seconds of
all ranks are in proportion.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from te_fsdp import _torch
from te_fsdp.checkpoint import writing
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.manifest import DCP_METADATA
from te_fsdp.checkpoint.portable.dcp import unpickle_metadata
from te_fsdp.checkpoint.sums import SummingWriter, without_collector

HIDDEN, FFN, KV, LAYERS, VOCABULARY = 16384, 53248, 2048, 126, 128256


def shapes() -> dict[str, tuple[int, ...]]:
    """Of every parameter, by name."""
    layer = {
        "self_attention.layernorm_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.layernorm_qkv.query_weight": (HIDDEN, HIDDEN),
        "self_attention.layernorm_qkv.key_weight": (KV, HIDDEN),
        "self_attention.layernorm_qkv.value_weight": (KV, HIDDEN),
        "self_attention.proj.weight": (HIDDEN, HIDDEN),
        "layernorm_mlp.layer_norm_weight": (HIDDEN,),
        "layernorm_mlp.fc1_weight": (2 * FFN, HIDDEN),
        "layernorm_mlp.fc2_weight": (HIDDEN, FFN),
    }
    found = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    ends = {
        "embedding.weight": (VOCABULARY, HIDDEN),
        "norm.weight": (HIDDEN,),
        "head.weight": (VOCABULARY, HIDDEN),
    }
    return {**found, **ends}


def entries(rank: int, ranks: int) -> dict[str, Entry]:
    """What one rank holds: rows of weights and moments, and every step."""
    found = {}
    for name, shape in shapes().items():
        rows = -(-shape[0] // ranks)
        first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        pieces: tuple[Piece, ...] = ()
        if first < last:
            part = torch.empty((last - first, *shape[1:]), device="meta")
            pieces = (Piece((first, *(0,) * (len(shape) - 1)), part),)
        for key in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            found[key] = Entry(shape, torch.float32, pieces)
        step = Piece((), torch.empty((), device="meta"))
        found[f"optimizer.state.{name}.step"] = Entry((), torch.float32, (step,))
    return found


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and the result."""
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def manifest_bytes() -> int:
    """Of the two large parts of the manifest; the same for any number of ranks."""
    tensor = {name: {"shape": list(shape), "dtype": "float32"} for name, shape in shapes().items()}
    weights = {name: {**one, "layout": "plain", "format": None} for name, one in tensor.items()}
    state = {
        n: {"exp_avg": t, "exp_avg_sq": t, "step": {"shape": [], "dtype": "float32"}}
        for n, t in tensor.items()
    }
    return len(json.dumps([weights, state, list(tensor)]))


def measure(measured: int, ranks: int) -> dict[str, Any]:
    """Numbers of all ranks, from some."""
    messages, seconds = [], 0.0
    for rank in range(measured):
        spent, items = timed(lambda rank=rank: writing.plan_items(entries(rank, measured)))
        messages.append(pickle.dumps(SavePlan(items)))
        seconds += spent
    with tempfile.TemporaryDirectory() as directory, without_collector():
        unpickled, plans = timed(lambda: [pickle.loads(message) for message in messages])
        together, (final, metadata) = timed(lambda: writing.global_plan(plans))
        writer = SummingWriter(Path(directory), "0" * 32)
        writer.mark = "0" * 73
        dumped, _ = timed(lambda: writer.finish(metadata, _results(final)))
        data = Path(directory, DCP_METADATA).read_bytes()
        loaded, _ = timed(lambda: unpickle_metadata(data))
    pieces = len(metadata.storage_data)
    own = entries(0, measured)
    signature = writing._signature(own)
    again = min(timed(lambda: writing._signature(own) == signature)[0] for _ in range(3))
    # Steps are written once, by some rank.
    all_pieces = sum(3 * min(ranks, shape[0]) + 1 for shape in shapes().values())
    scale = all_pieces / pieces
    return {
        "ranks": ranks,
        "measured on ranks": measured,
        "stored pieces": all_pieces,
        "files": ranks + 2,
        "manifest bytes": manifest_bytes(),
        f"{DCP_METADATA} bytes": round(len(data) * scale),
        "bytes of checksums": 12 * all_pieces,
        "first save": {
            "seconds of planning on a rank": seconds / measured,
            "bytes of a rank's plan": len(messages[0]),
            "seconds of planning on rank 0": (unpickled + together) * scale,
            "seconds of metadata on rank 0": dumped * scale,
        },
        "later saves": {"seconds of planning on a rank": again, "bytes of a rank's message": 40},
        "seconds of reading the metadata, on every rank of a load": loaded * scale,
    }


def _results(plans: list[SavePlan]) -> list[list[WriteResult]]:
    """What the ranks tell of what they have written."""
    place = _torch.place_class()
    return [
        [
            WriteResult(i.index, 1 << 20, place(f"__{r}_0.distcp", n << 20, 1 << 20))
            for n, i in enumerate(p.items)
        ]
        for r, p in enumerate(plans)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--measured", type=int, default=32, help="ranks that are really planned (3 MiB each)")
    options = parser.parse_args()
    print(json.dumps(measure(options.measured, options.ranks), indent=1))


if __name__ == "__main__":
    main()
