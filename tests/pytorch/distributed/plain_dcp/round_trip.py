"""Bodies: a round trip through plain DCP per TE module, sharded by torch's fully_shard or te_fsdp's."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import models
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

HIDDEN, FFN, HEADS, BATCH, SEQUENCE, EXPERTS = 512, 512, 16, 4, 32, 4
#: Rows of each expert in a rank's part of the batch, of which all formats take full blocks.
ROWS = 128
WHOLE = StateDictOptions(full_state_dict=True)
#: Main weights in fp32, and as the 16 bits that bf16 weights lack (int16, which Gloo and NCCL do not communicate).
BF16 = ("bf16", "remainders")


def recipe_of(name: str) -> Any:
    """Return the recipe; those of :data:`BF16` are high precision with TE's optimizer."""
    return None if name in BF16 else models.recipe_of(name)


EXPERT_KINDS = ("experts", "one parameter")


def _gathered(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the rows of all ranks of ep, so that each expert multiplies the full batch on every mesh."""
    if group is None:
        return rows
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


class Model(nn.Module):
    """One TE module, as recipes have it: ``state_dict`` may drop ``_extra_state``."""

    def __init__(
        self,
        kind: str,
        recipe: Any,
        *,
        keep: bool,
        device: str,
        experts: int = EXPERTS,
        dtype: Any = None,
        **tp: Any,
    ) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        dtype = dtype or (torch.float32 if recipe == "none" else torch.bfloat16)
        recipe = recipe_of(recipe)
        size = {"device": device, "params_dtype": dtype}
        column, both = {"parallel_mode": "column"}, {"set_parallel_mode": True}
        # Under tp=4, half as many keys are 64 rows. A scale of block scaling is for 128.
        groups = HEADS if recipe is not None and recipe.float8_block_scaling() else HEADS // 2
        heads = {"num_gqa_groups": groups, "input_layernorm": True, "attention_dropout": 0.0}
        stacked = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
        makers = {
            "Linear": lambda: te.Linear(HIDDEN, FFN, **column, **tp, **size),
            "row": lambda: te.Linear(HIDDEN, FFN, parallel_mode="row", **tp, **size),
            "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, FFN, **column, **tp, **size),
            "MLP": lambda: te.LayerNormMLP(HIDDEN, FFN, **both, **tp, **size),
            "gated MLP": lambda: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **both, **tp, **size),
            "attention": lambda: te.MultiheadAttention(HIDDEN, HEADS, **heads, **both, **tp, **size),
            "fused attention": lambda: te.MultiheadAttention(
                HIDDEN, HEADS, **heads, **stacked, **both, **tp, **size
            ),
            "TransformerLayer": lambda: te.TransformerLayer(
                HIDDEN, FFN, HEADS, activation="swiglu", hidden_dropout=0.0, attention_dropout=0.0,
                fuse_qkv_params=True, **both, **tp, **size
            ),
            "experts": lambda: te.GroupedLinear(experts, HIDDEN, FFN, bias=False, **column, **tp, **size),
            "one parameter": lambda: te.GroupedLinear(
                experts, HIDDEN, FFN, bias=False, single_grouped_weight=True, use_grouped_tensor=True,
                **column, **tp, **size
            ),
        }  # fmt: skip
        with te.quantized_model_init(recipe=recipe) if recipe is not None else contextlib.nullcontext():
            self.inner = makers[kind]()
        self.kind, self.keep, self.recipe = kind, keep, recipe
        self.ep: Any = None  # group of ranks with different experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            if self.kind in EXPERT_KINDS:
                rows = _gathered(x.reshape(-1, HIDDEN), self.ep)
                count = self.inner.num_gemms
                splits: Any = [len(rows)] * count
                if self.kind == "one parameter":
                    splits = torch.tensor(splits, device=rows.device)
                return self.inner(rows.repeat(count, 1), splits)
            out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result = super().state_dict(*args, **kwargs)
        return result if self.keep else {k: v for k, v in result.items() if not k.endswith("_extra_state")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=strict and self.keep, assign=assign)


class Job:
    """A model on a mesh, as a user of TE's pull request writes it, with an optimizer."""

    def __init__(
        self, kind: str, recipe: str, axes: dict[str, int], sharder: str, keep: bool, seed: int
    ) -> None:
        import te_fsdp

        device = harness.device_type()
        self.meshes = meshes = te_fsdp.Meshes.build(**axes, device_type=device)
        tp = {} if meshes.tp is None else {"tp_size": meshes.tp.size(), "tp_group": meshes.tp.get_group()}
        size = {"experts": EXPERTS // axes.get("ep", 1)}
        self.model = Model(kind, recipe, keep=keep, device="meta", **size, **tp)
        self.model.ep = None if meshes.ep is None else meshes.ep.get_group()
        if sharder == "te_fsdp":
            te_fsdp.fully_shard(self.model, meshes)
            te_fsdp.materialize(self.model, seed=seed)
        else:
            self._shard_with_torch(seed)
        if recipe == "none":
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        else:
            from transformer_engine.pytorch.optimizers import FusedAdam

            main = {"master_weights": True, "store_param_remainders": recipe == "remainders"}
            self.optimizer = FusedAdam(self.model.parameters(), lr=1e-2, eps=1e-3, **main)

    def _shard_with_torch(self, seed: int) -> None:
        from torch.distributed.fsdp import fully_shard

        import te_fsdp

        meshes = self.meshes
        experts = (
            {"ep_mesh": meshes.ep, "expert_weight_mesh": meshes.expert_weight}
            if meshes.ep is not None
            else {}
        )
        te_fsdp.set_device_mesh(self.model, meshes.tp, meshes.weight, **experts)
        if experts:
            inner: Any = fully_shard(self.model.inner, mesh=meshes.expert_fsdp_with_size_one)
            inner.set_gradient_divide_factor(meshes.data_size)
        else:
            fully_shard(self.model, mesh=meshes.fsdp or meshes.device_mesh["dp_shard"])
        torch.manual_seed(seed)
        for module in self.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def step(self, position: int) -> None:
        generator = torch.Generator().manual_seed(100 + position)
        length = ROWS if self.model.kind in EXPERT_KINDS else SEQUENCE
        batch = torch.randn(length, BATCH, HIDDEN, generator=generator)
        parts = dist.get_world_size() // (self.meshes.tp.size() if self.meshes.tp is not None else 1)
        rank = self.meshes.data_rank
        own = batch.chunk(parts, dim=1)[rank].to(harness.device(), next(self.model.parameters()).dtype)
        if self.model.kind == "row" and self.meshes.tp is not None:
            own = own.chunk(self.meshes.tp.size(), dim=2)[self.meshes.tp.get_local_rank()].contiguous()
        torch.manual_seed(position)  # NVFP4 rounds gradients at random
        # Columns of the output may be cut by tp: a sum, over the number of values of the whole output.
        (self.model(own).float().pow(2).sum() * (10 / (length * BATCH // parts * HIDDEN))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def output(self) -> torch.Tensor:
        """Return the output for a fixed batch, the same on all ranks of dp."""
        size = (ROWS if self.model.kind in EXPERT_KINDS else SEQUENCE, BATCH, HIDDEN)
        batch = torch.randn(size, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            return self.model(batch.to(harness.device(), torch.bfloat16)).float()

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def take(self, state: dict[str, Any], **options: Any) -> None:
        set_model_state_dict(self.model, state["model"], **options)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], **options)

    def values(self) -> dict[str, torch.Tensor]:
        """Return original tensors of weights and optimizer states, by ``full_tensor``, on all ranks."""
        results: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            results[name] = to_full(parameter)
        for name, states in get_optimizer_state_dict(self.model, self.optimizer)["state"].items():
            results |= {f"{name}.{key}": to_full(t) for key, t in states.items() if torch.is_tensor(t)}
        return of_all_experts(self.model.kind, results, self.model.ep)


def of_all_experts(kind: str, found: dict[str, torch.Tensor], group: Any = None) -> dict[str, torch.Tensor]:
    """Return tensors by each expert's global name, for both forms of the module, from all ranks of ep."""
    if kind == "one parameter":
        stacked = {k: t for k, t in found.items() if k.startswith("inner.weight")}
        found = {k: t for k, t in found.items() if k not in stacked}
        for key, tensor in stacked.items():
            each = tensor.unbind() if tensor.ndim == 3 else [tensor] * EXPERTS
            found |= {key.replace("weight", f"weight{n}", 1): t.clone() for n, t in enumerate(each)}
    if group is not None:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group=group)
        found = {key: tensor for part in parts for key, tensor in part.items()}
    return found


def to_full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if hasattr(tensor, "rowwise_data"):  # TE's GroupedTensor of an unsharded module
        tensor = torch.stack([harness.full(item) for item in tensor.split_into_quantized_tensors()])
    return harness.full(tensor).float()


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    keys = one.keys() | other.keys()
    return sorted(k for k in keys if k not in one or k not in other or not torch.equal(one[k], other[k]))


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[k] - other[k]).abs().max()) for k in one)


def within_one_step(one: torch.Tensor, other: torch.Tensor, recipe: str) -> bool:
    """Return whether values are within one step of the format at its maximum: 32 of 448 in E4M3, 2 of 6 in E2M1."""
    return bool((one - other).abs().max() <= one.abs().max() * (1 / 3 if recipe == "nvfp4" else 1 / 14))


def unsharded(kind: str, recipe: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of stock TE's module in one process."""
    torch.manual_seed(seed)
    model = Model(kind, recipe, keep=True, device=str(harness.device()))
    return of_all_experts(kind, {name: to_full(p) for name, p in model.named_parameters()})


def train_and_save(
    kind: str, recipe: str, axes: dict[str, int], sharder: str, keep: bool, directory: str
) -> dict[str, Any]:
    """Initialize, compare with the unsharded module, train two steps and save; keep the values and those after."""
    job = Job(kind, recipe, axes, sharder, keep, seed=3)
    first = {name: to_full(p) for name, p in job.model.named_parameters()}
    first = of_all_experts(kind, first, job.model.ep)
    outcome = {"unsharded": differing(first, unsharded(kind, recipe, 3))}
    job.step(0)
    job.step(1)
    dcp.save(job.state(), checkpoint_id=f"{directory}/0")
    values = job.values()
    exported = get_model_state_dict(
        job.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        tensors = {k: harness.full(v).float() for k, v in exported.items() if not k.endswith("_extra_state")}
        tensors = of_all_experts(kind, tensors)
        outcome["exported"] = differing(tensors, {k: values[k] for k in tensors})
        outcome["trained"] = len(differing(first, {k: values[k] for k in first}))
    job.step(2)
    if dist.get_rank() == 0:
        torch.save({"values": values, "after": job.values()}, f"{directory}/oracle.pt")
    else:
        job.values()
    return outcome


def load_and_continue(
    kind: str,
    recipe: str,
    axes: dict[str, int],
    sharder: str,
    keep: bool,
    directory: str,
    place: int,
    broadcast: bool = False,
) -> dict[str, Any]:
    """Load what the mesh before has saved, compare, save again, and compare the next step."""
    oracle = torch.load(f"{directory}/oracle.pt", weights_only=True)
    job = Job(kind, recipe, axes, sharder, keep, seed=4)
    outcome: dict[str, Any] = {"control": len(differing(oracle["values"], job.values()))}
    state = job.state()
    dcp.load(state, checkpoint_id=f"{directory}/{place - 1}")
    job.take(state)
    outcome["wrong"] = differing(oracle["values"], values := job.values())
    dcp.save(job.state(), checkpoint_id=f"{directory}/{place}")
    full = {
        "model": get_model_state_dict(job.model, options=WHOLE),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer, options=WHOLE),
    }
    other = Job(kind, recipe, axes, sharder, keep, seed=5)
    # torch hands on the very step counters.
    given = copy.deepcopy(full) if not broadcast or dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
    other.take(given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))
    # High-precision exports are quantized once.
    again = other.values()
    outcome["full"] = [
        k
        for k in differing(values, again)
        if recipe in ("none", *BF16) or not within_one_step(values[k], again[k], recipe)
    ]
    job.step(2)
    other.step(2)
    outcome["after"] = max(largest_difference(oracle["after"], one.values()) for one in (job, other))
    return outcome


def load_into_other_form(source: str, target: str, axes: dict[str, int], directory: str) -> dict[str, Any]:
    """Load one form of experts into the other: full state dicts, and DCP with options of groups and unequal steps.

    Weights in fp32, which need no forward here.
    """
    outcome: dict[str, Any] = {}

    def values(job: Job) -> dict[str, torch.Tensor]:
        results = {name: to_full(p) for name, p in job.model.named_parameters()}
        return of_all_experts(job.model.kind, results, job.model.ep)

    one, *others = (
        Job(kind, "none", axes, "torch", False, seed)
        for seed, kind in enumerate([source, target, target, target])
    )
    expected = values(one)
    for broadcast, other in zip((False, True), others[:2], strict=True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=broadcast)
        outcome[f"control {broadcast}"] = len(differing(expected, values(other)))
        full = get_model_state_dict(one.model, options=WHOLE)
        has_state = dist.get_rank() == 0 or not broadcast
        set_model_state_dict(other.model, full if has_state else {}, options=options)
        outcome[f"wrong {broadcast}"] = differing(expected, values(other))
        states = _optimizer_states(one, full, flat=not broadcast)
        set_optimizer_state_dict(other.model, other.optimizer, states if has_state else {}, options=options)
        for parameter in other.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        other.optimizer.step()  # a step counter for each expert
        moments = {name: other.optimizer.state[p] for name, p in other.model.named_parameters()}
        outcome[f"steps {broadcast}"] = sorted({int(state["step"]) for state in moments.values()})
        averages = {name: to_full(state["exp_avg"]) for name, state in moments.items()}
        decayed = {name: value.lerp(torch.zeros_like(value), 1 - 0.9) for name, value in expected.items()}
        outcome[f"states {broadcast}"] = differing(of_all_experts(target, averages, other.model.ep), decayed)
    last = others[2]
    one.optimizer.param_groups[0]["lr"] = 0.5
    first = one.state()
    dcp.save(first, checkpoint_id=f"{directory}/0")
    state = last.state()
    dcp.load(state, checkpoint_id=f"{directory}/0")
    last.take(state)
    outcome["lr"] = last.optimizer.param_groups[0]["lr"]
    next(iter(first["optimizer"]["state"].values()))["step"].add_(5)
    dcp.save(first, checkpoint_id=f"{directory}/1")
    try:
        dcp.load(last.state(), checkpoint_id=f"{directory}/1")
    except dcp.CheckpointException as error:
        outcome["refused"] = str(error)
    return outcome


def _optimizer_states(job: Job, weights: dict[str, Any], *, flat: bool) -> dict[str, Any]:
    """Return unsharded optimizer states after three steps, whose first moments are the weights."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    states = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    for name, weight in weights.items():
        if "state" in states:
            states["state"][name] |= {"exp_avg": weight.clone(), "step": torch.tensor(3.0)}
        else:
            states |= {f"state.{name}.exp_avg": weight.clone(), f"state.{name}.step": torch.tensor(3.0)}
    return states


def load_only(
    kind: str, recipe: str, axes: dict[str, int], sharder: str, keep: bool, directory: str
) -> dict[str, Any]:
    """Load weights by ``dcp.load`` without ``load_state_dict``; compare with a model that calls both."""
    oracle = torch.load(f"{directory}/oracle.pt", weights_only=True)["values"]
    jobs = [Job(kind, recipe, axes, sharder, keep, seed=seed) for seed in (4, 5, 4)]
    unloaded, both = jobs[2].output(), jobs[1]
    jobs[0].output()  # derived data, such as transposes, of the old bytes
    for job in jobs[:2]:
        state = {"model": get_model_state_dict(job.model)}
        dcp.load(state, checkpoint_id=f"{directory}/0")
    set_model_state_dict(both.model, state["model"])
    values = {name: to_full(p) for name, p in jobs[0].model.named_parameters()}
    outputs = [job.output() for job in jobs[:2]]
    return {
        "control": not torch.equal(unloaded, outputs[1]),
        "wrong": differing(values, {key: oracle[key] for key in values}),
        "same output": torch.equal(*outputs),
    }


def load_checkpoint(
    kind: str, recipe: str, axes: dict[str, int], sharder: str, keep: bool, directory: str
) -> dict[str, Any]:
    """Load by ``te_fsdp.checkpoint.load`` what a mesh has saved by ``dcp.save``; compare values and the next step."""
    import te_fsdp

    oracle = torch.load(f"{directory}/oracle.pt", weights_only=True)
    job = Job(kind, recipe, axes, sharder, keep, seed=4)
    outcome: dict[str, Any] = {"control": len(differing(oracle["values"], job.values()))}
    loaded = te_fsdp.checkpoint.load(f"{directory}/0", job.model, job.optimizer)
    outcome["wrong"] = differing(oracle["values"], job.values())
    outcome["converted"] = sorted(loaded.converted)
    job.step(2)
    outcome["after"] = largest_difference(oracle["after"], job.values())
    return outcome


def save_values(
    kind: str, recipe: str, axes: dict[str, int], sharder: str, keep: bool, directory: str
) -> None:
    """Save high-precision values of a quantized model as plain tensors, and what one quantization makes of them."""
    # Delayed scaling takes the scale of the loaded values, as current scaling always does.
    recipe = "current" if recipe == "delayed" else recipe
    model = Model(kind, recipe, keep=False, device=str(harness.device()))
    generator = torch.Generator().manual_seed(11)
    values = {
        name: torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
        for name, parameter in model.named_parameters()
    }
    dcp.save({"model": values}, checkpoint_id=f"{directory}/0")
    model.load_state_dict(values)
    torch.save({"values": {n: to_full(p) for n, p in model.named_parameters()}}, f"{directory}/oracle.pt")


def load_into_copies(directory: str) -> dict[str, list[str]]:
    """Load values into copies of a quantized model's state dict, and use these in every way.

    Returns:
        The uses that did not get the loaded values ("wrong"), and "values" if the older ones are equal.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())

    def linear(recipe: str | None, seed: int = 0) -> Any:
        outcome = Model("Linear", recipe or "bf16", keep=False, device="meta" if recipe else harness.device())
        if recipe is None:  # without te_fsdp
            return torch.distributed.fsdp.fully_shard(outcome, mesh=meshes.fsdp)
        te_fsdp.fully_shard(outcome, meshes, units=[])
        return te_fsdp.materialize(outcome, seed=seed)

    name, source = "inner.weight", linear("current")
    values = torch.randn(FFN, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    dcp.save({name: values}, checkpoint_id=f"{directory}/values")
    dcp.save({name: source.inner.weight.detach()}, checkpoint_id=f"{directory}/bytes")
    wrong, control = [], []

    def loaded(*kinds: str) -> Any:
        state = copy.deepcopy({name: linear("current", seed=1).inner.weight.detach()})
        for kind in kinds:
            dcp.load(state, checkpoint_id=f"{directory}/{kind}")
        return state

    def compare(use: str, found: torch.Tensor, expected: torch.Tensor = values) -> None:
        wrong.extend([] if torch.equal(to_full(found), expected.to(harness.device()).float()) else [use])

    for recipe in ("bf16", None, "mxfp8"):
        model, state, twin = linear(recipe), loaded("values"), linear(recipe)
        model.load_state_dict(state)
        with torch.no_grad():
            twin.inner.weight.copy_(state[name])
        expected = values
        if recipe == "mxfp8":
            one = Model("Linear", recipe, keep=False, device=str(harness.device()))
            one.load_state_dict({name: values}, strict=False)
            expected = to_full(one.inner.weight)
        compare(f"load_state_dict of {recipe}", model.inner.weight, expected)
        compare(f"copy_ of {recipe}", twin.inner.weight, expected)
        compare(f"entry after load_state_dict of {recipe}", state[name])
    state = loaded("values")
    dcp.save(state, checkpoint_id=f"{directory}/copy")
    saved = {name: torch.zeros_like(values)}
    dcp.load(saved, checkpoint_id=f"{directory}/copy")
    uses = {"dcp.save": saved[name], "deepcopy": copy.deepcopy(state[name]), "detach": state[name].detach()}
    uses |= {"clone": state[name].clone(), "float": state[name].float()}
    for use, result in uses.items():
        compare(use, result.to(harness.device()))
    compare("to_local", state[name].to_local(), values.chunk(2)[dist.get_rank()])
    state[name].to_local().mul_(4)  # writes are kept
    compare("bytes after values", loaded("values", "bytes")[name], to_full(source.inner.weight))
    state[name].mul_(0.5)
    compare("mul_", state[name], 2 * values)
    control += ["values"] if torch.equal(to_full(loaded()[name]), values.to(harness.device()).float()) else []
    return {"wrong": wrong, "control": control}
