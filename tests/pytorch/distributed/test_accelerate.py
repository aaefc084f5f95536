"""Unsupported uses of the accelerate integration.

Each error names its fix. A prepared optimizer follows its model.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_integrations import Refusals, reset_accelerate_state
from torch import nn
from torch.utils.data import DataLoader

import te_fsdp

pytestmark = pytest.mark.skipif(
    not find_spec("accelerate"), reason="make test-integrations installs accelerate"
)


def build(device: str = "cpu", **parallel: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    linear = te.Linear(16, 16, device=device, parallel_mode="column" if parallel else None, **parallel)
    return nn.Sequential(linear, te.RMSNorm(16, device=device))


def fresh(meshes: te_fsdp.Meshes, **options: Any) -> Any:
    from te_fsdp.integrations.accelerate import TeFsdpAccelerator

    return TeFsdpAccelerator(meshes, seed=0, **options)


def refusals(path: Path) -> dict[str, str]:
    """Return the error of each refused case."""
    refusal_texts, meshes = Refusals(), te_fsdp.Meshes.build(tp=2)
    with reset_accelerate_state(), pytest.MonkeyPatch.context() as patch:
        options(refusal_texts, meshes, patch)
        prepared(refusal_texts, meshes, path)
    return dict(refusal_texts)


def options(refusal_texts: Refusals, meshes: te_fsdp.Meshes, patch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, DynamoBackend

    data = DataLoader(torch.arange(8), batch_size=2)
    with refusal_texts.refused("keyword"):
        fresh(meshes, sharding={"unit": []})
    with refusal_texts.refused("plugin"):
        fresh(meshes, dynamo_backend=DynamoBackend.EAGER)
    with refusal_texts.refused("handler"):
        fresh(meshes, kwargs_handlers=[DistributedDataParallelKwargs()])
    with refusal_texts.refused("launched"):
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        fresh(meshes)
    patch.delenv("ACCELERATE_USE_FSDP")
    with refusal_texts.refused("precision"):  # and accelerate does not get it
        fresh(meshes, mixed_precision="bf16")
    with refusal_texts.refused("dispatch"):
        fresh(meshes, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).prepare(data)
    # The ranks of tp get the same batches, each data-parallel rank every second one.
    mine = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][meshes.data_rank]
    assert [batch.tolist() for batch in fresh(meshes).prepare(data)] == mine


def prepared(refusal_texts: Refusals, meshes: te_fsdp.Meshes, path: Path) -> None:
    accelerator, model = fresh(meshes), build("meta", **meshes.te_kwargs())
    with refusal_texts.refused("no model"):
        accelerator.save_state(str(path / "a"))
    with refusal_texts.refused("other model"):
        accelerator.prepare(model, torch.optim.SGD(build().parameters()))
    assert model[0].weight.is_meta, "a refused call has sharded the model"
    optimizer = torch.optim.SGD(
        [{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 2.0}]
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer, model = accelerator.prepare(optimizer, model)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3 / 3, 2.0 / 3]
    te_fsdp.check_optimizer(model, optimizer)
    assert optimizer.param_groups[1]["params"] == list(model[0].parameters())
    with refusal_texts.refused("scheduler"):
        accelerator.prepare(scheduler)
    with refusal_texts.refused("metrics"):
        accelerator.gather_for_metrics(torch.ones(2))
    with refusal_texts.refused("split"), accelerator.split_between_processes([1, 2]):
        pass
    with refusal_texts.refused("value"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with refusal_texts.refused("join"):
        accelerator.join_uneven_inputs([model])
    with refusal_texts.refused("state dict"):
        accelerator.save_model(model, path / "a")
    with refusal_texts.refused("hook"):
        accelerator.register_save_state_pre_hook(print)
    with refusal_texts.refused("pickles"):
        accelerator.save_state(str(path / "a"), safe_serialization=False)
    accelerator.save_state(str(path / "a"))
    with refusal_texts.refused("again"):
        accelerator.save_state(str(path / "a"))
    with refusal_texts.refused("nothing there"):
        accelerator.load_state(str(path))
    accelerator.load_state(str(path / "a"), strict=False)


SAYS = {
    "keyword": "TypeError: got an unexpected keyword argument 'unit'",
    "plugin": "dynamo_backend=. It would have no effect",
    "handler": "DistributedDataParallelKwargs()",
    "launched": "ACCELERATE_USE_FSDP=true",
    "precision": 'mixed_precision="no", also for accelerate launch',
    "dispatch": "expected different data on each process, got 2 parts of the data on 4 processes",
    "no model": "got 0 models and 0 optimizers",
    "other model": "OrderError: SGD: 3 of 3 parameters are not the model's",
    "scheduler": "step_scheduler_with_optimizer=False",
    "metrics": "gather over meshes.fsdp",
    "split": "split by meshes.data_rank",
    "value": "accelerator.clip_grad_norm_",
    "join": "drop_last=True",
    "state dict": "save_huggingface",
    "hook": "register_for_checkpointing",
    "pickles": "got safe_serialization=False",
    "again": "exists",
    "nothing there": "CheckpointError",
}


@pytest.mark.ranks(4)
def test_unsupported_options_raise(pool, tmp_path):
    for refusal_texts in pool.run(refusals, 4, path=tmp_path):
        assert refusal_texts.keys() == SAYS.keys()
        for case, words in SAYS.items():
            assert words in refusal_texts[case], f"{case}: {refusal_texts[case]}"


def trainers(path: Path) -> dict[str, Any]:
    """Return the errors of unsupported trainer options, and its counts."""
    from transformers import TrainingArguments

    from te_fsdp.integrations.transformers import TeFsdpTrainer

    refusal_texts, meshes = Refusals(), te_fsdp.Meshes.build(tp=2)

    def built(**options: Any) -> Any:
        given = {
            "output_dir": str(path),
            "use_cpu": meshes.device_type == "cpu",
            "report_to": "none",
            **options,
        }
        return TeFsdpTrainer(build("meta", **meshes.te_kwargs()), TrainingArguments(**given), meshes=meshes)

    with reset_accelerate_state(), refusal_texts.refused("bf16"):
        built(bf16=True)
    with reset_accelerate_state(), refusal_texts.refused("ddp"):
        built(ddp_find_unused_parameters=True)
    with reset_accelerate_state(), refusal_texts.refused("compile"):
        built(torch_compile=True)
    with reset_accelerate_state():
        trainer = built(per_device_train_batch_size=3, gradient_accumulation_steps=5)
        assert trainer.get_total_train_batch_size(trainer.args) == 15
        assert trainer.model[0].weight.is_meta, "sharding comes with training"
    return dict(refusal_texts)


@pytest.mark.ranks(2)
def test_trainer_unsupported_options_raise(pool, tmp_path):
    for refusal_texts in pool.run(trainers, 2, path=tmp_path):
        assert "PrecisionError: TeFsdpAccelerator(mixed_precision='bf16')" in refusal_texts["bf16"]
        assert "DistributedDataParallelKwargs()" in refusal_texts["ddp"]
        assert "dynamo_plugin=" in refusal_texts["compile"]
