"""Overhead of a checkpoint of a very large job, from shapes only: one process, no data, no ranks.

    python benchmarks/checkpoint_scale.py --model dense --measured 8 --ranks 1024 16384
    python benchmarks/checkpoint_scale.py --model moe --measured 64 --ranks 1024 16384

The parameters are those of Llama 3.1 405B, or of DeepSeek-V3 (671B, 256 experts over 64 ranks), with AdamW's state,
sharded over all ranks along dim 0 (experts: over the ranks that share them). The plans of some ranks, and their merge
on rank 0, are run and measured per stored piece. Bytes and seconds of all ranks are extrapolated. The index, which
every rank of a load reads, has all pieces of all ranks. A separate process reads it as one of as many ranks, and as
one of 3/4 of them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_fsdp.checkpoint import index, planner, reading
from te_fsdp.checkpoint.manifest import DCP_METADATA, INDEX, dtype_name
from te_fsdp.checkpoint.reader import empty_manifest
from te_fsdp.checkpoint.shard_files import without_collector
from te_fsdp.checkpoint.tensor_entries import Piece, TensorEntry

#: Experts' weights have a leading dim, over which ranks of expert parallelism share them.
EXPERTS, EXPERT_RANKS = 256, 64
Shapes = dict[str, tuple[int, ...]]


def dense() -> Shapes:
    """Return the shape of every parameter of Llama 3.1 405B, by name."""
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
    results = {f"layers.{n}.{name}": shape for n in range(126) for name, shape in layer.items()}
    ends = {
        "embedding.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocabulary, hidden),
    }
    return {**results, **ends}


def moe() -> Shapes:
    """Return the shapes of DeepSeek-V3: three dense layers, then 58 with experts."""
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
    results = {f"layers.{n}.{name}": shape for n, layer in enumerate(layers) for name, shape in layer.items()}
    ends = {
        "embedding.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocabulary, hidden),
    }
    return {**results, **ends}


def places(shape: tuple[int, ...], rank: int, ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and shapes of a rank's shards."""
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


def entries(shapes: Shapes, rank: int, ranks: int) -> dict[str, TensorEntry]:
    """Return the entries of one rank: rows of weights and moments, and every step."""
    results = {}
    for name, shape in shapes.items():
        boxes = places(shape, rank, ranks)
        pieces = tuple(Piece(begin, torch.empty(sizes, device="meta")) for begin, sizes in boxes)
        for key in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            results[key] = TensorEntry(shape, torch.float32, pieces)
        step = Piece((), torch.empty((), device="meta"))
        results[f"optimizer.state.{name}.step"] = TensorEntry((), torch.float32, (step,))
    return results


def pieces_of(shape: tuple[int, ...], ranks: int) -> int:
    """Return the number of stored shards of a tensor."""
    if len(shape) == 3:
        return shape[0] * pieces_of(shape[1:], ranks // EXPERT_RANKS)
    return -(-shape[0] // -(-shape[0] // ranks))


#: Shapes by model name; the mark of a save; bytes of a piece in addition to its elements.
MODELS, MARK, FRAME = {"dense": dense, "moe": moe}, f"te_fsdp-{'0' * 32}-{'0' * 32}", 1100


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds, and the result."""
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def manifest_bytes(shapes: Shapes) -> int:
    """Return the bytes of the manifest's two large parts, which do not depend on the number of ranks."""
    tensor = {name: {"shape": list(shape), "dtype": "float32"} for name, shape in shapes.items()}
    weights = {name: {**item, "layout": "plain", "format": None} for name, item in tensor.items()}
    state = {
        n: {"exp_avg": t, "exp_avg_sq": t, "step": {"shape": [], "dtype": "float32"}}
        for n, t in tensor.items()
    }
    return len(json.dumps([weights, state, list(tensor)]))


def measure(model: str, measured: int, all_ranks: list[int]) -> dict[str, Any]:
    """Extrapolate the numbers of all ranks from some of them."""
    shapes = MODELS[model]()
    messages, seconds, places = [], 0.0, []
    for rank in range(measured):
        own = entries(shapes, rank, measured)
        spent, message = timed(lambda own=own: pickle.dumps(planner.pieces_held_by_rank(own)))
        messages.append(message)
        seconds += spent
        count = sum(len(entry.pieces) for entry in own.values())
        places.append(np.stack([np.arange(count), np.arange(count) << 20, np.full(count, 1 << 20)], axis=1))
    with without_collector():
        unpickled, seen = timed(lambda: [pickle.loads(message) for message in messages])
        together, parts = timed(lambda: planner.assign_writers(seen))
        replies, answers = timed(lambda: [pickle.dumps(part) for part in parts[1:]])
    tensors = parts[0].tensors or {}
    files = [planner.file_of(rank) for rank in range(measured)]
    told, places = timed(lambda: pickle.loads(pickle.dumps(places)))
    encoded, found_bytes = timed(lambda: index.encode(tensors, files, places, MARK))
    loaded, _ = timed(lambda: index.unpickle_metadata(found_bytes.metadata))
    stored = sum(len(tensor.boxes) for tensor in tensors.values())
    own = entries(shapes, 0, measured)
    signature = planner.signature_of(own)
    again = min(timed(lambda: planner.signature_of(own) == signature)[0] for _ in range(3))
    results: dict[str, Any] = {"measured on ranks": measured, "manifest bytes": manifest_bytes(shapes)}
    for ranks in all_ranks:
        # Steps are written once, by one rank, but every rank reports them.
        all_stored = sum(3 * pieces_of(shape, ranks) + 1 for shape in shapes.values())
        scale = all_stored / stored
        results[f"{ranks} ranks"] = {
            "stored pieces": all_stored,
            "files": ranks + 3,
            f"{DCP_METADATA} bytes": round(len(found_bytes.metadata) * scale),
            "bytes of checksums": 12 * all_stored,
            "first save, seconds on a rank": seconds / measured,
            "first save, bytes of a rank's message, and of the answer": (len(messages[0]), len(answers[0])),
            "first save, seconds of planning on rank 0": (unpickled + together + replies) * scale,
            "first save, seconds of index and metadata on rank 0": (told + encoded) * scale,
            "later saves, seconds on a rank": again,
            "later saves, bytes of a rank's messages": 40 + 20 * len(parts[0].groups),
            f"seconds of reading {DCP_METADATA} as a whole": loaded * scale,
            **measure_index(model, ranks),
        }
    return results


def all_pieces(shapes: Shapes, ranks: int) -> Iterator[tuple[str, tuple[int, ...], index.Rows]]:
    """Return the rows of the index of each tensor, as in a save of ``ranks`` ranks."""
    ends, everyone = np.zeros(ranks, dtype=np.int64), np.arange(ranks)
    for name, shape in shapes.items():
        last = shape[1:] if len(shape) == 3 else shape
        own = shape[0] // EXPERT_RANKS if len(shape) == 3 else 1
        group, each = (
            (everyone // EXPERT_RANKS, ranks // EXPERT_RANKS) if len(shape) == 3 else (everyone, ranks)
        )
        height = -(-last[0] // each)
        first = np.minimum(group * height, last[0])
        rows = np.minimum(first + height, last[0]) - first
        for key in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            results = []
            for expert in range(own):
                length = rows * int(np.prod(last[1:])) * 4 + FRAME
                lead = [(everyone % EXPERT_RANKS) * own + expert] if len(shape) == 3 else []
                zeros, ones = [0 * everyone for _ in last[1:]], [0 * everyone + 1 for _ in lead]
                sizes = [0 * everyone + n for n in last[1:]]
                results.append(
                    np.stack([everyone, ends, length, *lead, first, *zeros, *ones, rows, *sizes], axis=1)
                )
                ends = ends + np.where(rows > 0, length, 0)
            # In the order of the ranks, then of the experts.
            together = np.stack(results, axis=1).reshape(ranks * own, -1)
            yield key, shape, together[np.repeat(rows > 0, own)]
        step = f"optimizer.state.{name}.step"
        yield step, (), np.array([[0, ends[0], FRAME + 4]])
        ends[0] += FRAME + 4


def measure_index(model: str, ranks: int) -> dict[str, Any]:
    """Return the size of the index of all ranks, and the cost of reading it."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        files = [planner.file_of(rank) for rank in range(ranks)]
        # As index.encode, without DCP's metadata, which would not fit into memory.
        heads, packed, block = [], [], []
        for key, shape, rows in all_pieces(MODELS[model](), ranks):
            if not block:
                heads.append([])
            heads[-1].append((key, shape, dtype_name(torch.float32), len(rows)))
            block.append(rows)
            if sum(map(len, block)) >= index._ROWS:
                packed.append(index.compress_rows(block))
                block = []
        packed += [index.compress_rows(block)] if block else []
        packed.append(json.dumps({"files": files, "blocks": heads}).encode())
        manifest = empty_manifest()
        manifest.save_id = "0" * 32
        mark = manifest.identity
        index.Encoded(mark.encode(), mark, packed).write(Path(directory), manifest)
        Path(directory, "manifest").write_bytes(pickle.dumps(manifest))
        results[f"{INDEX} bytes"] = Path(directory, INDEX).stat().st_size
        for name, readers in (("as many ranks", ranks), ("3/4 as many", ranks * 3 // 4)):
            command = [
                sys.executable,
                __file__,
                "--model",
                model,
                "--read",
                directory,
                "--ranks",
                str(readers),
            ]
            ran = subprocess.run(command, check=True, capture_output=True, text=True)
            results[f"load on {name}, seconds, MiB more, pieces of a rank"] = json.loads(ran.stdout)
    return results


def read(model: str, directory: Path, ranks: int) -> list[float]:
    """Measure the load plan of a middle rank among this number of ranks: CPU seconds, peak MiB, pieces."""
    manifest, rank = pickle.loads((directory / "manifest").read_bytes()), ranks // 2 + 1
    own = entries(MODELS[model](), rank, ranks)
    wanted = [(key, *piece.chunk) for key, entry in own.items() for piece in entry.pieces]
    memory()
    before = memory()
    spent, result = timed(
        lambda: reading.pieces_to_read(directory, manifest, index.read_index(directory, manifest), wanted)
    )
    return [round(spent, 2), round((memory() - before) / 1024), sum(map(len, result.values()))]


def memory() -> int:
    """Return the peak KiB of this process since the previous call, and reset Linux's counter."""
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak.split()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(*MODELS,), default="dense")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--measured", type=int, default=64, help="ranks that are really planned (3 MiB each)")
    parser.add_argument(
        "--read", type=Path, help="read the index in this directory, as one of the given ranks"
    )
    options = parser.parse_args()
    if options.read is not None:
        print(json.dumps(read(options.model, options.read, *options.ranks)))
    else:
        print(json.dumps(measure(options.model, options.measured, options.ranks), indent=1))


if __name__ == "__main__":
    main()
