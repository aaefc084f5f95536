"""Wrong arguments of calls: wrong types, wrong positions, values that differ between ranks, wrong paths."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from bodies_mistakes import Model, all_mistakes, draw_batch, make_meshes, make_sgd, make_sharded, take_step
from torch import nn
from torch.nn.utils import prune


def a_wrapper_around_the_model() -> None:
    model = Model(make_meshes(), harness.device())
    make_sharded(model=nn.parallel.DistributedDataParallel(model))


def the_name_of_a_class_as_unit() -> None:
    import te_fsdp

    meshes = make_meshes()
    te_fsdp.fully_shard(Model(meshes), meshes, units="LayerNormMLP")


def torchs_policy_as_precision() -> None:
    make_sharded(precision=torch.distributed.fsdp.MixedPrecisionPolicy())


def our_policy_as_torchs() -> None:
    import te_fsdp

    make_sharded(mp_policy=te_fsdp.MixedPrecisionPolicy())


def a_move_before_materialize() -> None:
    import te_fsdp

    meshes = make_meshes()
    te_fsdp.fully_shard(Model(meshes), meshes).to(harness.device())


def an_optimizer_that_needs_unsharded_tensors() -> None:
    model = make_sharded()
    take_step(model, torch.optim.Adafactor(model.parameters()))


def gradients_to_clip() -> None:
    import te_fsdp

    model = make_sharded()
    model(draw_batch()).square().mean().backward()
    te_fsdp.clip_grad_norm_([p.grad for p in model.parameters()], 1.0)


def a_path_for_each_rank(directory: str) -> None:
    import te_fsdp

    te_fsdp.checkpoint.save(f"{directory}/rank-{dist.get_rank()}", make_sharded())


def arguments_of_save_in_another_order(directory: str) -> None:
    import te_fsdp

    te_fsdp.checkpoint.save(make_sharded(), f"{directory}/step-1")  # type: ignore[arg-type]


def a_state_dict_to_save(directory: str) -> None:
    import te_fsdp

    te_fsdp.checkpoint.save(f"{directory}/step-1", make_sharded().state_dict())  # type: ignore[arg-type]


def a_scheduler_as_optimizer(directory: str) -> None:
    import te_fsdp

    model = make_sharded()
    scheduler: Any = torch.optim.lr_scheduler.StepLR(make_sgd(model), 1)
    te_fsdp.checkpoint.save(f"{directory}/step-1", model, scheduler)


def a_list_as_extra(directory: str) -> None:
    import te_fsdp

    te_fsdp.checkpoint.save(f"{directory}/step-1", make_sharded(), extra=[1])  # type: ignore[arg-type]


def a_file_to_load(directory: str) -> None:
    import te_fsdp

    path = Path(directory) / f"weights-{dist.get_rank()}.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    te_fsdp.checkpoint.load(path, make_sharded())


def a_huggingface_folder_to_load(directory: str) -> None:
    import te_fsdp

    folder = Path(directory) / f"llama-{dist.get_rank()}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    te_fsdp.checkpoint.load(folder, make_sharded())


def a_hub_name_to_load() -> None:
    import te_fsdp

    te_fsdp.checkpoint.load_huggingface("meta-llama/Llama-3.1-8B", make_sharded())


def weight_norm_on_meta() -> None:
    import te_fsdp

    model = Model(make_meshes())
    nn.utils.parametrizations.weight_norm(model.head)
    te_fsdp.materialize(te_fsdp.fully_shard(model, make_meshes()), seed=0)


def weight_norm_by_hooks() -> None:
    import te_fsdp

    model = Model(make_meshes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.head)
    te_fsdp.materialize(te_fsdp.fully_shard(model, make_meshes()), seed=0)


def pruning_on_meta() -> None:
    import te_fsdp

    model = Model(make_meshes())
    prune.l1_unstructured(model.head, "weight", 0.5)
    te_fsdp.materialize(te_fsdp.fully_shard(model, make_meshes()), seed=0)


def a_model_built_in_inference_mode() -> None:
    with torch.inference_mode():
        make_sharded()


def weight_norm_over_tp() -> None:
    import te_fsdp

    meshes = make_meshes(tp=2)
    model = Model(meshes)
    nn.utils.parametrizations.weight_norm(model.layer, "fc1_weight")
    te_fsdp.fully_shard(model, meshes)


MISTAKES: list[Callable[..., None]] = [
    a_wrapper_around_the_model,
    the_name_of_a_class_as_unit,
    torchs_policy_as_precision,
    our_policy_as_torchs,
    a_move_before_materialize,
    an_optimizer_that_needs_unsharded_tensors,
    gradients_to_clip,
    a_path_for_each_rank,
    arguments_of_save_in_another_order,
    a_state_dict_to_save,
    a_scheduler_as_optimizer,
    a_list_as_extra,
    a_file_to_load,
    a_huggingface_folder_to_load,
    a_hub_name_to_load,
    weight_norm_on_meta,
    weight_norm_by_hooks,
    pruning_on_meta,
    weight_norm_over_tp,
    a_model_built_in_inference_mode,
]


def all_arguments(directory: str) -> dict[str, tuple[str, str]]:
    """Return the class and text of each error."""
    return all_mistakes(directory, MISTAKES)
