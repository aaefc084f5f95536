"""Unsupported uses of the torchtitan integration.

The parallelize function, the model and the checkpoint manager raise. Clipping is the integration's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_integrations import FOLDER, Refusals

from te_fsdp.sharded_model import get_sharded_model

pytestmark = pytest.mark.skipif(
    not (find_spec("torchtitan") and find_spec("triton")),
    reason="make test-integrations installs torchtitan, and triton",
)


def refusals(path: Path) -> dict[str, str]:
    """Return the error of each refused case."""
    sys.path.insert(0, str(FOLDER))
    model, refusal_texts = (
        importlib.import_module("train_torchtitan").Model.Config(axes={"tp": 2}).build(),
        Refusals(),
    )
    parallelized(refusal_texts, model)
    managed(refusal_texts, model, path)
    return dict(refusal_texts)


def parallelized(refusal_texts: Refusals, model: Any) -> None:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC

    from te_fsdp.integrations.torchtitan import parallelize

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=2)
    odd = dataclasses.replace(parallelism, spmd_backend="spmd_types", expert_parallel_degree=2)
    training, compiled = TrainingConfig(disable_cuda_graphs=True), CompileConfig()
    options: dict[str, Any] = {"training": training, "parallelism": parallelism, "compile_config": compiled}
    options |= {"parallel_dims": None, "ac_config": None}
    with refusal_texts.refused("early"):
        model.init_weights()
    with refusal_texts.refused("graphs"):
        parallelize(model, **options | {"training": TrainingConfig()})
    with refusal_texts.refused("compile"):
        parallelize(model, **options | {"compile_config": CompileConfig(enable=True)})
    with refusal_texts.refused("recompute"):
        parallelize(model, **options | {"ac_config": FullAC.Config()})
    with refusal_texts.refused("backend"):
        parallelize(model, **options | {"parallelism": odd})
    parallelize(model, **options).init_weights()
    assert not get_sharded_model(model).average_gradients, "the trainer divides losses by all tokens"


def managed(refusal_texts: Refusals, model: Any, path: Path) -> None:
    """Run the checkpoint manager, and compute the norm by torchtitan and by te_fsdp."""
    import setting
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed.utils import clip_grad_norm_

    import te_fsdp
    from te_fsdp.integrations.torchtitan import CheckpointManager, keep_main_weights

    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3})
    container = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    optimizers = container.build(model_parts=[model])
    manager = CheckpointManager.Config(enable=True, folder=str(path))
    given = {"dataloader": None, "model_parts": [model], "optimizers": optimizers}
    given |= {"lr_schedulers": None, "states": {}}
    with refusal_texts.refused("container"):
        manager.build(**given)
    keep_main_weights(optimizers, [model], None)
    with refusal_texts.refused("export"):
        dataclasses.replace(manager, export_dtype="bfloat16").build(**given)
    (batch, _) = setting.microbatches(model.meshes, 0)
    setting.loss_of(model(batch), batch).backward()
    expected = te_fsdp.clip_grad_norm_(model, 1e9)
    found = clip_grad_norm_(model.parameters(), 1e9, foreach=True)
    # torch rounds the norm of each gradient, and their norm, to bf16
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)


SAYS = {
    "early": "OrderError: TeModel.init_weights before parallelize",
    "graphs": "training.disable_cuda_graphs=True, and te_fsdp.graphed_step",
    "compile": 'compile.enable=components=["loss"]',
    "recompute": "activation_checkpoint=None, and te.checkpoint in the model",
    "backend": "parallelism.expert_parallel_degree=1; parallelism.spmd_backend=partial_dtensor",
    "container": "OrderError: CheckpointManager before keep_main_weights",
    "export": "CheckpointManager: export_dtype",
}


@pytest.mark.ranks(4)
def test_unsupported_options_raise(pool, tmp_path):
    for refusal_texts in pool.run(refusals, 4, path=tmp_path):
        assert refusal_texts.keys() == SAYS.keys()
        for case, words in SAYS.items():
            assert words in refusal_texts[case], f"{case}: {refusal_texts[case]}"
