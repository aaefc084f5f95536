"""Bodies: streams of a sharded model's weights for inference engines."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpointing.huggingface import Case

TOKENS = (2, 8)


class PeakMemory(TorchDispatchMode):
    """The peak of the bytes of tensors that were allocated within the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor}
        self._forget_ended()
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and (storage := tensor.untyped_storage())._cdata not in given:
                self.living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._bytes() > self.peak:
            time.sleep(0.02)  # gloo's thread releases a message shortly after its collective has ended
            self._forget_ended()
            self.peak = max(self.peak, self._bytes())
        return out

    def _forget_ended(self) -> None:
        self.living = {key: item for key, item in self.living.items() if not item[0].expired()}

    def _bytes(self) -> int:
        return sum(size for _, size in self.living.values())


def trained(folder: str, case: dict[str, Any], steps: int = 1) -> tuple[Any, Any, Any]:
    """Return a model of a folder on its mesh after some steps, its optimizer, and a function that makes a step."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    from te_fsdp.checkpoint.portable import huggingface as hf

    made = Case(**case)
    model, optimizer = made.build(folder)
    hf.load_huggingface(folder, model, optimizer)
    tokens = torch.randint(0, 40, TOKENS, generator=torch.Generator().manual_seed(0)).to(harness.device())

    def step() -> None:
        with te.autocast(enabled=made.quantized, recipe=Float8CurrentScaling()):
            loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        step()
    return model, optimizer, step


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def different(streamed: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return names that are missing, or whose shape, dtype or bits differ."""
    return [
        name
        for name in sorted(streamed.keys() | expected.keys())
        if name not in streamed
        or name not in expected
        or streamed[name].shape != expected[name].shape
        or streamed[name].dtype != expected[name].dtype
        or not torch.equal(tensor_bytes(streamed[name]), tensor_bytes(expected[name]))
    ]


def streams(folder: str, case: dict[str, Any], target: str) -> dict[str, Any]:
    """Compare streams of each format and receiver with the files of ``save_huggingface``."""
    from te_fsdp import huggingface as rollout
    from te_fsdp.checkpoint.lazy_tensors import open_safetensors
    from te_fsdp.checkpoint.portable import huggingface as hf
    from te_fsdp.errors import OrderError

    model, optimizer, step = trained(folder, case)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, dtype in (("native", None), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        hf.save_huggingface(f"{target}-{name}", model, optimizer, config=folder, dtype=dtype)
        result = open_safetensors(Path(f"{target}-{name}"))[0]
        files[name] = {key: tensor.full() for key, tensor in result.items()}
    options: dict[str, Any] = {"config": folder, "bucket_bytes": 20_000}

    def stream(**more: Any) -> Any:
        return rollout.iter_weights(model, optimizer, **options, **more)

    first = stream()
    outcome: dict[str, Any] = {"native": different(dict(first), files["native"])}
    outcome["bf16"] = different(dict(stream(format="bf16")), files["bf16"])
    # Files in a different dtype: the comparison can fail.
    outcome["control"] = len(different(dict(stream(format="bf16")), files["fp32"])) / len(files["fp32"])
    outcome["buckets"] = len(first.buckets)
    outcome["unchanged"] = list(dict(stream(since=first)))
    for receiver in (1, list(range(dist.get_world_size()))):
        got = dict(stream(receiver=receiver))
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, [name for name, tensor in got.items() if tensor is not None])
        own = {name: files["native"][name] for name in seen[dist.get_rank()]}
        wrong = different({name: tensor for name, tensor in got.items() if tensor is not None}, own)
        outcome[f"receiver {receiver}"] = wrong, list(got) == list(files["native"]), [len(s) for s in seen]
    outcome["fp8"] = _fp8(dict(stream(format="fp8-block")), files["fp32"])
    step()
    again = stream(since=first)
    sent = dict(again)
    hf.save_huggingface(f"{target}-later", model, optimizer, config=folder)
    later = {key: item.full() for key, item in open_safetensors(Path(f"{target}-later"))[0].items()}
    outcome["changed"] = different({**files["native"], **sent}, later), len(sent) / len(later)
    with torch.no_grad():
        parameter = model.norm.weight
        # Values come from the main weight if the optimizer has one.
        value = optimizer.state[parameter].get("master_param", parameter)
        (value.to_local() if hasattr(value, "to_local") else value).mul_(2.0)
    outcome["one changed"] = list(dict(stream(since=again)))
    for write in (step, torch.no_grad()(lambda: torch._foreach_mul_(list(model.parameters()), 1.0))):
        begun = stream()
        next(begun)
        write()
        with pytest.raises(OrderError, match="weights as they were when the stream began"):
            list(begun)
    return outcome


def families(folders: dict[str, tuple[str, dict[str, Any]]], target: str) -> dict[str, dict[str, Any]]:
    """Compare a stream of each family with the folder that was loaded, and after a step with ``save_huggingface``."""
    from te_fsdp import huggingface as rollout
    from te_fsdp.checkpoint.lazy_tensors import open_safetensors
    from te_fsdp.checkpoint.portable import huggingface as hf

    def read(folder: str) -> dict[str, torch.Tensor]:
        return {key: item.full() for key, item in open_safetensors(Path(folder))[0].items()}

    outcomes: dict[str, dict[str, Any]] = {}
    for family, (folder, case) in folders.items():
        model, optimizer, step = trained(folder, case, steps=0)
        options: dict[str, Any] = {"config": folder, "bucket_bytes": 20_000}
        before = dict(rollout.iter_weights(model, optimizer, **options))
        step()
        after = dict(rollout.iter_weights(model, optimizer, **options))
        hf.save_huggingface(f"{target}-{family}", model, optimizer, config=folder)
        outcomes[family] = {
            "loaded": different(before, read(folder)),
            "saved": different(after, read(f"{target}-{family}")),
            "trained": len(different(after, before)) / len(after),
        }
    return outcomes


def _fp8(streamed: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compare FP8 tensors with values that are quantized by plain code."""
    wrong, quantized = [], 0
    for name, value in values.items():
        scale = streamed.get(f"{name}_scale_inv")
        if scale is None:
            if not torch.equal(streamed[name].cpu(), value.bfloat16()):
                wrong.append(name)
            continue
        quantized += 1
        rows, columns = value.shape
        for top in range(0, rows, 128):
            for left in range(0, columns, 128):
                block = value[top : top + 128, left : left + 128].float()
                factor = block.abs().max() / 448
                expected = (block / factor).to(torch.float8_e4m3fn)
                got = streamed[name][top : top + 128, left : left + 128].cpu()
                if not torch.equal(got.float(), expected.float()) or scale[top // 128, left // 128] != factor:
                    wrong.append(f"{name} at {top}, {left}")
    return {"wrong": wrong, "quantized": quantized, "tensors": len(streamed)}


def fp8_bytes(
    config: dict[str, Any], axes: dict[str, int], steps: int, interleaved: bool, bucket: int, target: str
) -> dict[str, Any]:
    """Train FP8 weights with 128 x 128 blocks; compare the stream with the unsharded model's bytes and scales.

    Its peak memory is that of buckets of ``bucket`` bytes, and of one bucket for all weights.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp
    from te_fsdp import huggingface as rollout
    from te_fsdp.checkpoint.portable import huggingface as hf
    from tests.unit.huggingface_models import TeModel

    def build(**place: Any) -> Any:
        options = {"fuse_qkv_params": True, "qkv_weight_interleaved": interleaved, "set_parallel_mode": True}
        with te.quantized_model_init(recipe=Float8BlockScaling()):
            return TeModel(te, hf.read_config(config), params_dtype=torch.bfloat16, **options, **place)

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build(device="meta", **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, units=[te.TransformerLayer])
    te_fsdp.materialize(model, seed=3)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 40, (1, 128), generator=generator).to(harness.device())
        with te.autocast(recipe=Float8BlockScaling()):
            model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def stream(bucket_bytes: int = bucket) -> Any:
        options: dict[str, Any] = {"format": "fp8-block", "bucket_bytes": bucket_bytes}
        return rollout.iter_weights(model, optimizer, config=config, **options)

    peaks = []
    for bucket_bytes in (bucket, 1 << 30):
        with PeakMemory() as memory:
            for _ in stream(bucket_bytes):
                pass
        peaks.append(memory.peak)
    kept = {name: tensor.cpu() for name, tensor in stream()}
    te_fsdp.checkpoint.save(target, model)
    whole = build(device=harness.device())
    te_fsdp.checkpoint.load(target, whole)
    _, again = rollout.quantize_blocks(whole.layers[0].layernorm_mlp.fc2_weight.dequantize().float())
    return {
        **_against_bytes(whole, kept),
        # Weights that are quantized again have other scales: the comparison can fail.
        "control": torch.equal(again.cpu(), kept["model.layers.0.mlp.down_proj.weight_scale_inv"]),
        "peaks": peaks,
        "bytes": sum(tensor.nbytes for tensor in kept.values()),
    }


def _against_bytes(whole: Any, kept: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the streamed weights with the bytes and scales of an unsharded model, and the different ones."""
    results: dict[str, list[str]] = {"same": [], "different": []}
    for number, layer in enumerate(whole.layers):
        parts = {
            layer.self_attention.layernorm_qkv.weight: [f"self_attn.{part}_proj" for part in "qkv"],
            layer.self_attention.proj.weight: ["self_attn.o_proj"],
            layer.layernorm_mlp.fc1_weight: ["mlp.gate_proj", "mlp.up_proj"],
            layer.layernorm_mlp.fc2_weight: ["mlp.down_proj"],
        }
        for weight, names in parts.items():
            keys = [f"model.layers.{number}.{name}.weight" for name in names]
            rows, columns = (math.ceil(size / 128) for size in weight.shape)
            data = torch.cat([kept[key] for key in keys]).view(torch.uint8)
            scales = torch.cat([kept[f"{key}_scale_inv"] for key in keys])
            equal = torch.equal(data, weight._rowwise_data.cpu())
            equal &= torch.equal(scales, weight._rowwise_scale_inv[:rows, :columns].cpu())
            results["same" if equal else "different"] += names
    return results


def transfer_through_a_group(folder: str, case: dict[str, Any], page: str) -> dict[str, Any]:
    """Run the functions of the page: rank 0 sends to an engine, here a thread with its own end of a group."""
    import re
    import threading

    from te_fsdp import huggingface as rollout

    code = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def send_weights" in b)
    functions: dict[str, Any] = {}
    exec(code, functions)
    model, optimizer, _ = trained(folder, case)
    received: dict[str, torch.Tensor] = {}
    group = engine = None
    if dist.get_rank() == 0:
        store = dist.HashStore()

        def receive() -> None:
            end = dist.ProcessGroupGloo(store, 1, 2)
            received.update(functions["receive_weights"](end, "cpu"))

        engine = threading.Thread(target=receive)
        engine.start()
        group = dist.ProcessGroupGloo(store, 0, 2)
    stream = rollout.iter_weights(model, optimizer, config=folder, format="fp8-block", receiver=0)
    functions["send_weights"](stream, group)
    if engine is not None:
        engine.join(60)
    expected = dict(rollout.iter_weights(model, optimizer, config=folder, format="fp8-block"))
    return {"wrong": different(received, expected) if engine is not None else [], "sent": len(expected)}
