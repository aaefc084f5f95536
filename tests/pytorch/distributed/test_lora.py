"""LoRA on TransformerEngine's layers, compared with merged weights on any mesh."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import harness
import pytest
import torch
from test_integrations import HALF, STEPS, TOLERANCE, Refusals, losses
from torch import nn

pytestmark = pytest.mark.skipif(not find_spec("peft"), reason="make test-integrations installs peft")


@pytest.mark.ranks(4)
def test_lora_example_runs(pool, tmp_path):
    path = tmp_path / "adapters"
    whole = losses(pool, 4, "lora", tp=2, steps=STEPS)
    half = losses(pool, 4, "lora", tp=2, steps=HALF, save=path)
    assert half[:HALF] == whole[:HALF]
    assert losses(pool, 4, "lora", tp=2, steps=STEPS, resume=path) == whole[HALF:]
    assert losses(pool, 2, "lora", tp=1, steps=STEPS, resume=path) == pytest.approx(
        whole[HALF:], abs=TOLERANCE
    )
    assert whole[STEPS - 1] < 0.99 * whole[0]


def layer(meshes: Any, **options: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    parallel = {"set_parallel_mode": True, "device": "meta", **meshes.te_kwargs()}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(32, 64, 4, fuse_qkv_params=True, **parallel, **dropout, **options)


def computed(tp: int, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Return unsharded output before and after a merge, merged weights, and gradients of the adapters."""
    from peft import LoraConfig

    import te_fsdp
    from te_fsdp.integrations.peft import add_adapters, base_of, merge

    meshes = te_fsdp.Meshes.build(tp=tp)
    head = nn.Linear(32, 32, device="meta")
    head.weight.sequence_parallel = head.bias.sequence_parallel = sequence_parallel
    model = nn.Sequential(layer(meshes, sequence_parallel=sequence_parallel), head)
    add_adapters(model, LoraConfig(r=3, lora_alpha=6, target_modules=["layernorm_qkv", "proj", "1"]))
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        if "lora_B" in name:
            assert harness.full(parameter).count_nonzero() == 0
            torch.manual_seed(len(name))
            parameter.data.copy_(distributed(torch.randn(*parameter.shape), parameter))
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1)).to(harness.device())
    x = x.chunk(tp)[meshes.device_mesh.get_local_rank("tp")] if sequence_parallel else x
    output = model(x)
    output.square().sum().backward()
    found = {"output": output.detach()}
    found |= {n: harness.full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    merge(model)
    found["merged"] = model(x).detach()
    with base_of(model), torch.no_grad():
        assert not any("lora_" in name for name, _ in model.named_parameters())
        found["base"] = model(x).detach()
        found |= {f"merged {n}": harness.full(p.detach()) for n, p in model.named_parameters()}
    return found


def distributed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_lora_equals_merged_weights(pool, sequence_parallel):
    (one,) = pool.run(computed, 1, tp=1, sequence_parallel=False)
    assert not torch.equal(one["output"], one["base"] * 0)
    four = pool.run(computed, 4, tp=2, sequence_parallel=sequence_parallel)
    for rank, found in enumerate(four):
        for name, expected in one.items():
            if name in ("output", "merged", "base") and sequence_parallel:
                expected = expected.chunk(2)[rank % 2]
            # fp32 sums of up to 64 terms in a different order
            torch.testing.assert_close(
                found[name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    # A weight plus its adapter in one matrix product instead of two
    torch.testing.assert_close(one["merged"], one["output"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one["base"], one["merged"], rtol=0, atol=0)
    assert sum("lora_" in name for name in one) == 6


def config(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 2, "target_modules": ["layernorm_qkv", "proj"], **options})


def pretrained(path: Any) -> list[bool]:
    """Load a quantized base of two tp ranks into one with adapters on a mesh without tp, and write it again."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp
    from te_fsdp.integrations.peft import add_adapters, base_of, merge

    def built(adapted: bool, seed: int, **axes: int) -> nn.Module:
        meshes = te_fsdp.Meshes.build(**axes)
        with te.quantized_model_init(recipe=Float8CurrentScaling()):
            model = layer(meshes, params_dtype=torch.bfloat16)
        if adapted:
            add_adapters(model, config())
        return te_fsdp.materialize(te_fsdp.fully_shard(model, meshes), seed=seed)

    te_fsdp.checkpoint.save(path / "base", built(False, 0, tp=2))
    model, plain = built(True, 1), built(False, 0)
    with base_of(model):
        te_fsdp.checkpoint.load(path / "base", model)
    alike = [same(model, plain)]
    weight = model.self_attention.proj.lora_B.default.weight
    weight.data.copy_(torch.ones_like(weight))
    merge(model)
    assert weight.count_nonzero() == 0
    alike += [same(model, plain)]
    with base_of(model):
        te_fsdp.checkpoint.save(path / "merged", model)
    te_fsdp.checkpoint.load(path / "merged", plain)
    return [*alike, same(model, plain)]


def same(model: nn.Module, plain: nn.Module) -> bool:
    from te_fsdp.integrations.peft import base_of

    with base_of(model):
        found, expected = dict(model.named_parameters()), dict(plain.named_parameters())
        assert found.keys() == expected.keys()
        return all(
            torch.equal(p.to_local().dequantize(), expected[n].to_local().dequantize())
            for n, p in found.items()
        )


@pytest.mark.ranks(2)
def test_quantized_base_loads_into_a_lora_model(pool, tmp_path):
    for alike in pool.run(pretrained, 2, path=tmp_path):
        assert alike == [True, False, True]


def dtypes_of_adapters() -> set[str]:
    """Return the kinds and dtypes of adapters that are added where the quantized base is built."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp
    from te_fsdp.integrations.peft import add_adapters

    meshes = te_fsdp.Meshes.build(tp=2)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        model = add_adapters(layer(meshes, params_dtype=torch.bfloat16), config())
    te_fsdp.materialize(te_fsdp.fully_shard(model, meshes), seed=0)
    adapters = [p.to_local() for n, p in model.named_parameters() if "lora_" in n]
    return {f"{type(p.detach()).__name__} {p.dtype}" for p in adapters}


@pytest.mark.ranks(2)
def test_adapters_of_a_quantized_base_are_not_quantized(pool):
    for found in pool.run(dtypes_of_adapters, 2):
        assert found == {"Tensor torch.float32"}


def refusals() -> dict[str, str]:
    """Map each case to the error that it raised."""
    import transformer_engine.pytorch as te

    import te_fsdp
    from te_fsdp.integrations.peft import adapters_of, add_adapters, merge

    meshes = te_fsdp.Meshes.build(tp=2)
    refusal_texts = Refusals()

    def refused(case: str, call: Any, *given: Any) -> None:
        with refusal_texts.refused(case):
            call(*given)

    model = layer(meshes)
    refused("mlp", add_adapters, model, config(target_modules=["proj", "layernorm_mlp"]))
    refused("no config", add_adapters, model, {"r": 8})
    refused("dora", add_adapters, model, config(use_dora=True, bias="all"))
    refused("dropout", add_adapters, model, config(lora_dropout=0.1))
    refused(
        "split", add_adapters, te.MultiheadAttention(32, 4, input_layernorm=True, device="meta"), config()
    )
    refused("stacked", add_adapters, layer(meshes, qkv_weight_interleaved=False), config())
    assert isinstance(model.self_attention.proj, te.Linear), "a refused call has changed the model"
    refused("none", adapters_of, model)
    te_fsdp.materialize(te_fsdp.fully_shard(model, meshes), seed=0)
    refused("late", add_adapters, model, config())
    refused("merge none", merge, model)
    adapted = add_adapters(layer(meshes), config())
    refused("merge early", merge, adapted)
    adapted.self_attention.proj.base_layer.weight.requires_grad_(True)
    te_fsdp.materialize(te_fsdp.fully_shard(adapted, meshes), seed=0)
    refused("merge trained", merge, adapted)
    refused("one layer", adapted.self_attention.proj.merge)
    return dict(refusal_texts)


SAYS = {
    "mlp": "layernorm_mlp: expected Linear or LayerNormLinear of TransformerEngine, or torch's",
    "no config": "add_adapters: config: expected a peft.LoraConfig, got dict",
    "dora": "bias='all', use_dora=True",
    "dropout": "lora_dropout=0.1 with tp",
    "split": "got weights query_weight, key_weight, value_weight",
    "stacked": "Fix: qkv_weight_interleaved=True",
    "none": "expected a model with adapters",
    "late": "OrderError: add_adapters after fully_shard",
    "merge none": "merge: no adapters",
    "merge early": "te_fsdp.fully_shard was called on",
    "merge trained": "merge: self_attention.proj",
    "one layer": "peft.merge(model)",
}


@pytest.mark.ranks(2)
def test_unsupported_options_raise(pool):
    for refusal_texts in pool.run(refusals, 2):
        assert refusal_texts.keys() == SAYS.keys()
        for case, words in SAYS.items():
            assert words in refusal_texts[case], f"{case}: {refusal_texts[case]}"
