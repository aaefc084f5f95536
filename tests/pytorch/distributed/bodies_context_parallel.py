"""Bodies of attention over ``cp``, compared with one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from parity.runs import Findings, shards
from torch import nn

SEQUENCE, BATCH, HIDDEN, HEADS, GROUPS = 16, 4, 64, 8, 4
STEPS, RATE = 2, 0.02
# Attention takes 16 bits: both sides compute in bf16 (2^-8 of each value), and round at other places: cp adds up
# partial outputs that were rounded. FP8 quantizes activations with the amax of a rank's tokens (2^-3 of a value at
# most, 2^-5 of a norm, several in a row). Wrong positions, chunks or scales of gradients differ more.
RTOL = {"none": 0.02, "current": 0.1}
WHY = "bf16, or FP8, rounded at other places"


def _large(tensor: torch.Tensor) -> torch.Tensor:
    """Return weights with which attention contributes much of the output."""
    return nn.init.normal_(tensor, std=0.08)


class Model(nn.Module):
    """A dense layer and an attention layer with rotary positions; activations are (sequence, batch, hidden)."""

    def __init__(self, device: Any, causal: bool = True, **kwargs: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        kwargs |= {"device": device, "params_dtype": torch.bfloat16}
        # An unsplit layer sees full sequences.
        dense = not kwargs.get("sequence_parallel")
        self.dense = (
            te.Linear(HIDDEN, HIDDEN, device=device, params_dtype=torch.bfloat16) if dense else nn.Identity()
        )
        mask = "causal" if causal else "no_mask"
        self.layer = te.TransformerLayer(
            HIDDEN, 2 * HIDDEN, HEADS, num_gqa_groups=GROUPS, set_parallel_mode=True,
            self_attn_mask_type=mask, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
            normalization="RMSNorm", activation="swiglu", init_method=_large, output_layer_init_method=_large, **kwargs,
        )  # fmt: skip
        self.rotary = te.RotaryPositionEmbedding(HIDDEN // HEADS)

    def forward(self, x: torch.Tensor, length: int = SEQUENCE) -> torch.Tensor:
        return self.layer(self.dense(x), rotary_pos_emb=self.rotary(length).to(x.device))


def _built(device: Any, recipe: str, **kwargs: Any) -> tuple[Model, Any]:
    """Return a model with weights in a recipe's format, and the context of its forward."""
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    torch.manual_seed(5)
    if recipe == "none":
        return Model(device, **kwargs), nullcontext
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        model = Model(device, **kwargs)
    return model, lambda: te.autocast(recipe=recipe_of(recipe))


def parity(
    axes: dict[str, int],
    comm_types: list[str],
    recipe: str = "none",
    parallel: bool = False,
    causal: bool = True,
) -> int:
    """Check that outputs, gradients of two steps and parameters equal one process'.

    Args:
        axes: Mesh sizes.
        comm_types: One after the other; "p2p" is the default of ``fully_shard``.
        recipe: Of quantized weights and activations.
        parallel: Sequence parallelism over tp.
        causal: The mask.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    checks = Findings()
    for comm_type in comm_types:
        reference, _ = _built(harness.device(), recipe, causal=causal, sequence_parallel=parallel)
        subject, context = _built(
            "meta", recipe, causal=causal, sequence_parallel=parallel, **meshes.te_kwargs()
        )
        if comm_type != "p2p":
            more = {"a2a_size": 2} if comm_type == "a2a+p2p" else {}
            te_fsdp.set_context_parallel(subject, meshes, comm_type=comm_type, **more)
        te_fsdp.fully_shard(subject, meshes)
        torch.manual_seed(5)
        te_fsdp.materialize(subject)
        _train(checks, comm_type, subject, reference, meshes, context, RTOL[recipe], parallel)
        if comm_type == "p2p":
            _without_context_parallel(subject, reference, meshes, context, parallel)
    checks.settle(minimum=4)
    return len(checks.failures)


def _train(
    checks: Findings,
    label: str,
    subject: Any,
    reference: Any,
    meshes: Any,
    context: Any,
    rtol: float,
    parallel: bool,
) -> None:
    models = (subject, reference)
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in models]
    if rtol == RTOL["current"]:
        import te_fsdp

        te_fsdp.main_weights(subject, optimizers[0])
    for step in range(STEPS):
        x, target = _batch(step)
        whole = _forward(reference, x, context)
        (whole - target).square().mean().backward()
        local = _forward(subject, _local_part(x, meshes, parallel), context)
        loss = (local - _local_part(target, meshes, parallel)).square().mean()
        # Sequence parallel ranks of tp have parts of the tokens that are added up, others the same tokens.
        (loss / (meshes.size("tp") if parallel else 1)).backward()
        expected = _local_part(whole.detach(), meshes, parallel)
        checks.attempt(checks.close, f"{label}: output {step}", local.detach(), expected, rtol, WHY)
        originals = dict(reference.named_parameters())
        for name, parameter, info in shards(subject):
            for box in info.boxes:
                gradient = _local(parameter.grad)[box.local_slices()]
                original = originals[name].grad[box.original_slices()]
                floor = float(originals[name].grad.square().mean().sqrt())
                what = f"{label}: gradient {step} {name}"
                checks.attempt(checks.close, what, gradient, original, 3 * rtol, WHY, floor=floor)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, SEQUENCE, BATCH, HIDDEN, generator=generator).to(harness.device(), torch.bfloat16)
    return x[0], x[1]


def _forward(model: Any, x: torch.Tensor, context: Any) -> torch.Tensor:
    with context():
        return model(x).float()


def _local_part(tensor: torch.Tensor, meshes: Any, parallel: bool) -> torch.Tensor:
    """Return this rank's sequences, its part of each, and of this again what sequence parallelism leaves it."""
    import te_fsdp

    tensor = tensor.chunk(meshes.data_size, 1)[meshes.data_rank]
    tensor = te_fsdp.context_parallel_shard(tensor, meshes, dim=0)
    if parallel:
        tensor = tensor.chunk(meshes.size("tp"), 0)[meshes.device_mesh.get_local_rank("tp")]
    return tensor.contiguous()


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _without_context_parallel(
    subject: Any, reference: Any, meshes: Any, context: Any, parallel: bool
) -> None:
    """Negative control: attention without cp differs largely from one process."""
    for module in subject.modules():
        if hasattr(module, "cp_group"):
            module.cp_group = None
    x, _ = _batch(9)
    with torch.no_grad():
        whole = _local_part(_forward(reference, x, context), meshes, parallel)
        local = _forward(subject, _local_part(x, meshes, parallel), context)
    off = torch.stack([(local - whole).norm(), whole.norm()]).double()
    dist.all_reduce(off)
    assert off[0] / off[1] > 0.1, off


def set_context_parallel_without_fsdp(axes: dict[str, int]) -> None:
    """Bind with ``set_device_mesh`` and ``set_context_parallel`` only. A deep copy shares groups and stream."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model, _ = _built(harness.device(), "none")
    te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    te_fsdp.set_context_parallel(model, meshes)
    x = _local_part(_batch(7)[0], meshes, False)
    with torch.no_grad():
        one, two = (_forward(each, x, nullcontext) for each in (model, copy.deepcopy(model)))
    harness.assert_bitwise_equal("copy", two, one)


# --- what is refused


def context_parallel_shard(axes: dict[str, int]) -> None:
    """Check that ``context_parallel_shard`` shards as TE does, and rejects lengths or batches that do not fit."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel as te_cp

    import te_fsdp
    from te_fsdp import InputError

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    size, rank = meshes.size("cp"), meshes.cp.get_local_rank()
    lengths = torch.tensor([0, 2 * size, 8 * size, 12 * size], dtype=torch.int32)
    packed = [torch.randint(99, (1, 12 * size)) for _ in range(3)]
    expected = te_cp.get_batch_on_this_cp_rank(lengths, *packed, cp_group=meshes.cp.get_group())
    actual = te_fsdp.context_parallel_shard(packed, meshes, cu_seqlens=lengths)
    assert all(map(torch.equal, actual, expected)) and len(actual) == 3
    nested = te_fsdp.context_parallel_shard({"a": (packed[0], "text"), "b": [packed[1]]}, meshes)
    chunks = packed[0].chunk(2 * size, 1)
    assert torch.equal(nested["a"][0], torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1))
    assert nested["a"][1] == "text" and len(nested["b"]) == 1
    assert te_fsdp.context_parallel_shard(packed[0], te_fsdp.Meshes.build(device_type="cpu")) is packed[0]
    for batch, text in (
        (
            {"x": torch.ones(2, 4 * size + 2)},
            r"batch\['x'\], \d+ tokens of a sequence: expected a multiple of",
        ),
        (torch.arange(4 * size), r"expected a sequence in dim 1, got shape"),
        (torch.randint(99, (3, 4 * size)) + rank, r"batch \(int64 .*cp ranks 0 and 1.*meshes.data_rank"),
    ):
        with pytest.raises(InputError, match=text):
            te_fsdp.context_parallel_shard(batch, meshes)


def unsupported_setups(axes: dict[str, int]) -> None:
    """Check that unsupported options, sizes, heads, sinks and ranks raise an error with names and the fix."""
    import transformer_engine.pytorch as te

    import te_fsdp
    from te_fsdp import MeshError, PlacementError

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    whole = te_fsdp.Meshes.build(device_type=harness.device_type())

    def attention(heads: int = 8, groups: int = 4, **kwargs: Any) -> nn.Module:
        return nn.Sequential(te.DotProductAttention(heads, 16, num_gqa_groups=groups, **kwargs))

    for options, error, text in (
        ({"comm_type": "ulysses"}, MeshError, "comm_type='a2a'"),
        ({"comm_type": "p2p", "a2a_size": 2}, MeshError, "Only a2a"),
        ({"comm_type": "a2a+p2p"}, MeshError, "a2a_size over cp=2"),
    ):
        with pytest.raises(error, match=text):
            te_fsdp.set_context_parallel(attention(), meshes, **options)
    with pytest.raises(PlacementError, match="0: num_gqa_groups=1 over tp=1 and 2 ranks of a2a"):
        te_fsdp.set_context_parallel(attention(groups=1), meshes, comm_type="a2a")
    model = attention(softmax_type="off-by-one")
    with pytest.raises(PlacementError, match=r"softmax_type='off-by-one'.*comm_type='a2a'"):
        te_fsdp.fully_shard(model, meshes)
    assert not hasattr(model, "unshard")
    model = attention()
    te_fsdp.set_context_parallel(model, whole)  # no cp: nothing
    assert model[0].cp_group is None
    te_fsdp.set_context_parallel(model, meshes)
    with pytest.raises(
        MeshError, match=r"0: context-parallel ranks of attention: expected none, got \[0, 1\]"
    ):
        te_fsdp.fully_shard(model, whole)


def unsupported_calls(axes: dict[str, int]) -> None:
    """Check that masks, windows, dtypes and lengths raise that TE computes wrongly or rejects without a reason."""
    import transformer_engine.pytorch as te

    import te_fsdp
    from te_fsdp import InputError, PlacementError, PrecisionError

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    attention = te.DotProductAttention(8, 16, qkv_format="bshd").to(harness.device())
    te_fsdp.set_context_parallel(attention, meshes)

    def call(length: int = 4, keys: int = 4, dtype: Any = torch.bfloat16, **kwargs: Any) -> None:
        q, k, v = (
            torch.randn(2, n, 8, 16, device=harness.device(), dtype=dtype) for n in (length, keys, keys)
        )
        attention(q, k, v, **kwargs)

    for kwargs, error, text in (
        ({"attn_mask_type": "padding_causal"}, PlacementError, "qkv_format='thd'"),
        ({"attn_mask_type": "padding,causal"}, PlacementError, "qkv_format='thd'"),
        ({"attn_mask_type": "causal_bottom_right"}, PlacementError, "'causal' or 'no_mask'"),
        ({"keys": 8}, PlacementError, "cross-attention"),
        ({"window_size": (2, 0)}, PlacementError, r"window_size=\(2, 0\) with comm_type='p2p'.*all_gather"),
        ({"dtype": torch.float32}, PrecisionError, "expected bfloat16 or float16"),
        ({"length": 3, "keys": 3}, InputError, "an even number.*context_parallel_shard"),
    ):
        with pytest.raises(error, match=text):
            call(**kwargs)
    call()
    call(keys=8, attn_mask_type="no_mask")


def forward_with_inputs(axes: dict[str, int], what: str) -> tuple[str, str]:
    """Run a model on full sequences, parts of other lengths, or the right parts on the ranks of cp.

    Returns:
        The class and the text of the error, or two empty strings.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model, _ = _built(harness.device(), "none")
    te_fsdp.fully_shard(model, meshes, check_inputs=what != "unchecked")
    x, rank = _batch(0)[0], meshes.cp.get_local_rank()
    x = {"whole": x, "unchecked": x, "lengths": x[: 8 + 4 * rank]}.get(what)
    try:
        with torch.no_grad():
            model(_local_part(_batch(0)[0], meshes, False) if x is None else x, 2 * SEQUENCE)
    except te_fsdp.TeFsdpError as error:
        return type(error).__name__, str(error)
    return "", ""
