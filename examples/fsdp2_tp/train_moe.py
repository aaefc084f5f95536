"""Train the byte-level language model of train.py with experts instead of MLPs, on FSDP2 x EP x TP.

Train on 2 x FSDP, 2 x EP, save, and resume on 4 x FSDP, where every rank has all experts. Without GPUs, first
`export TE_FSDP_EMULATION=10.0 OMP_NUM_THREADS=1` (TransformerEngine is emulated: losses are meaningful, speed is not):

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train_moe.py --ep 2 --steps 20 --save out/moe-ckpt
    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train_moe.py --ep 1 --steps 40 --resume out/moe-ckpt

This file contains what experts add. Text, the rest of the model, optimizer, log and checkpoints are imported from
train.py. See docs/moe.md.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
import tyro
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from train import RANK, RECIPES, te  # TransformerEngine: real, or emulated where the environment says so

import te_fsdp

# GroupedLinear returns a view. FSDP2 warns about in-place writes to it, which this model does not make.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")

# Rows of one expert must be a multiple of this: the gradient of its weight is a sum over them, in the recipe's format.
ROWS = {"none": 1, "mxfp8": 32, "nvfp4": 128}


@dataclass(frozen=True)
class Options(train.Options):
    """Train a byte-level mixture-of-experts language model with te_fsdp."""

    dp_shard: int = -1
    """Ranks over which FSDP2 shards each expert; other weights are sharded over dp_shard x ep. -1: infer the size."""
    ep: int = 1
    """Expert-parallel ranks: each has a part of the experts, and tokens are sent between them."""

    experts: int = 8
    """Experts in a layer."""
    top_k: int = 2
    """Experts that a token is sent to."""
    balance: float = 0.01
    """Weight of the load-balancing loss; 0: none."""
    capacity_factor: float = 0.0
    """Rows of each expert relative to an even load; further tokens are dropped. 0: drop none, the host reads counts."""
    single_grouped: bool = False
    """Keep the experts of a GroupedLinear in one 3-D parameter (TransformerEngine's single_grouped_weight)."""

    hidden: int = 128
    """Width."""
    ffn: int = 128
    """Width inside an expert."""
    out: Path = Path("out/fsdp2_tp_moe")
    """Folder of metrics.jsonl and loss.png."""


# ------------------------------------------------------------------------------------------------ communication


class AllToAll(torch.autograd.Function):
    """Send ``send[r]`` of the rows (n, hidden) to rank r, and receive ``receive[r]`` from it. Gradients return."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = receive, send, group
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # noqa: D102
        return AllToAll.apply(gradient, *ctx.back), None, None, None


def to_all(x: torch.Tensor, tp: DeviceMesh | None, placement: Placement) -> torch.Tensor:
    """Return the unsharded ``x`` on each tp rank, which computes its part of every expert. Sum gradients over tp."""
    if tp is None:
        return x
    whole = DTensor.from_local(x, tp, [placement], run_check=False).redistribute(tp, [Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def from_all(x: torch.Tensor, tp: DeviceMesh | None, placement: Placement) -> torch.Tensor:
    """Return the sum over tp, with the given placement on tp."""
    if tp is None:
        return x
    return DTensor.from_local(x, tp, [Partial()], run_check=False).redistribute(tp, [placement]).to_local()


# ------------------------------------------------------------------------------------------------------ the model


class Router(nn.Linear):
    """Compute the probabilities of the experts for each token, in FP32: in BF16 many would be equal."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (t, hidden) to (t, experts)."""
        return F.linear(tokens.float(), self.weight.float()).softmax(-1)


class Experts(nn.Module):
    """This rank's experts of one layer: two GroupedLinears, which do not communicate over tp."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype) -> None:
        super().__init__()
        kwargs: dict[str, Any] = {
            "bias": False,
            "params_dtype": dtype,
            "device": "meta",
            **meshes.te_kwargs(),
        }
        if options.single_grouped:
            kwargs |= {"single_grouped_weight": True, "use_grouped_tensor": True}
        self.grouped, self.gated = options.single_grouped, options.activation == "swiglu"
        mine, first = len(meshes.experts(options.experts)), options.ffn * (2 if self.gated else 1)
        self.up = te.GroupedLinear(mine, options.hidden, first, parallel_mode="column", **kwargs)
        self.down = te.GroupedLinear(mine, options.ffn, options.hidden, parallel_mode="row", **kwargs)

    def forward(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Map rows (sum of rows, hidden), ordered by expert, to the same shape; with tp to a partial sum."""
        splits: Any = torch.tensor(rows, device=x.device) if self.grouped else rows
        y = self.up(x, splits)
        if self.gated:
            gate, y = y.unflatten(-1, (-1, 2)).unbind(-1)  # alternating rows: each tp rank has both of a pair
            y = F.silu(gate) * y
        else:
            y = F.gelu(y, approximate="tanh")
        return self.down(y, splits)


class MixtureOfExperts(nn.Module):
    """Router, dispatch to the experts and combine. An expert may get no token."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype, split: bool) -> None:
        super().__init__()
        self.ep, self.tp, self.placement = meshes.ep, meshes.tp, Shard(0) if split else Replicate()
        self.top_k, self.multiple = options.top_k, ROWS.get(options.recipe, 16)
        self.capacity_factor, self.meshes = options.capacity_factor, meshes
        # Number of experts of each rank of ep.
        self.shares = [len(part) for part in torch.arange(options.experts).chunk(meshes.size("ep"))]
        self.router = Router(options.hidden, options.experts, bias=False, dtype=dtype, device="meta")
        self.router.weight.sequence_parallel = split
        self.experts = Experts(options, meshes, dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (s, b, hidden) to the same shape; also return this rank's part of the load-balancing loss."""
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens)
        weights, chosen = probabilities.topk(self.top_k)
        balance = balance_loss(probabilities, chosen)
        weights = weights / weights.sum(-1, keepdim=True)

        tokens, weights, chosen = (to_all(t, self.tp, self.placement) for t in (tokens, weights, chosen))
        visit = self.visit_at_capacity if self.capacity_factor else self.visit_all
        mixed = visit(tokens, weights, chosen).to(x.dtype)
        return from_all(mixed, self.tp, self.placement).view_as(x), balance

    def visit_at_capacity(
        self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the mixed results of buffers with a fixed size for each expert. The host reads nothing."""
        total = sum(self.shares)
        sizes = len(tokens), self.top_k, total, self.capacity_factor
        capacity = te_fsdp.ExpertDispatcher.capacity_for(*sizes, multiple=self.multiple)
        dispatcher = te_fsdp.ExpertDispatcher(self.meshes, total, capacity)
        rows, route = dispatcher.dispatch(tokens, chosen)
        return dispatcher.combine(self.experts(rows, dispatcher.splits), route, weights)

    def visit_all(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mixed results without dropping a token. The host reads the number of rows of each expert."""
        # torch's functions, because TransformerEngine's moe_permute is a Triton kernel and needs a GPU.
        by_expert = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=sum(self.shares))
        copies = tokens.repeat_interleave(self.top_k, 0)[by_expert]
        results = torch.empty_like(copies).index_copy(0, by_expert, self.visit(copies, counts))
        return (results.unflatten(0, (-1, self.top_k)) * weights[..., None]).sum(1)

    def visit(self, copies: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send each row to its expert and return the results in the same order.

        ``copies`` is ordered by expert, hence by ep rank; ``counts`` (experts,) is the number of rows for each.
        """
        ranks, group = len(self.shares), self.ep.get_group() if self.ep is not None else None
        arriving = counts
        if group is not None:
            mine = self.shares[group.rank()]
            arriving = counts.new_empty(ranks * mine)  # from each rank, for each of my experts
            dist.all_to_all_single(arriving, counts, [mine] * ranks, self.shares, group=group)
        send = [int(part.sum()) for part in counts.cpu().split(self.shares)]
        table = arriving.view(ranks, -1).tolist()
        receive = [sum(row) for row in table]

        # Rows arrive ordered by rank, then by expert. Reorder them by expert, and pad each expert with zero rows to a
        # multiple of the recipe's block.
        rows = [-(-sum(column) // self.multiple) * self.multiple for column in zip(*table, strict=True)]
        if not any(rows):
            rows[0] = self.multiple  # no token arrived: zero rows, because kernels need some
        begin = list(accumulate(rows, initial=0))
        places = torch.cat([torch.arange(0), *blocks(table, begin)]).to(copies.device)

        arrived = AllToAll.apply(copies, send, receive, group) if group is not None else copies
        padded = arrived.new_zeros(begin[-1], arrived.shape[1]).index_copy(0, places, arrived)
        results = self.experts(padded, rows)[places]
        return AllToAll.apply(results, receive, send, group) if group is not None else results


def blocks(table: list[list[int]], begin: list[int]) -> Iterator[torch.Tensor]:
    """Yield the positions of the ``table[rank][expert]`` arriving rows, in the order of their arrival."""
    free = list(begin)
    for row in table:
        for expert, count in enumerate(row):
            yield torch.arange(free[expert], free[expert] + count)
            free[expert] += count


def balance_loss(probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the load-balancing loss (Switch Transformer, equation 4).

    It is the sum over tokens and experts of the probability x the expert's share of all tokens x the number of experts.
    Shares are counted over all ranks, so the sum over ranks does not depend on the mesh.
    """
    experts = probabilities.shape[1]
    # The host would wait for bincount, which reads the largest index.
    counts = chosen.new_zeros(experts).index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
    dist.all_reduce(counts)
    return (probabilities * (counts / counts.sum())).sum() * experts


class Layer(nn.Module):
    """Attention and experts, each with a norm and a residual connection."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype, split: bool) -> None:
        super().__init__()
        self.attention = te.MultiheadAttention(
            options.hidden,
            options.heads,
            attention_dropout=0.0,
            attn_mask_type="causal",
            input_layernorm=True,
            normalization="RMSNorm",
            bias=False,
            set_parallel_mode=True,
            fuse_qkv_params=True,
            sequence_parallel=split,
            params_dtype=dtype,
            device="meta",
            **meshes.te_kwargs(),
        )
        self.norm = te.RMSNorm(options.hidden, sequence_parallel=split, dtype=dtype, device="meta")
        self.moe = MixtureOfExperts(options, meshes, dtype, split)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (s, b, hidden) to the same shape; also return the load-balancing loss."""
        x = x + self.attention(x)
        y, balance = self.moe(self.norm(x))
        return x + y, balance


class ByteModel(train.ByteModel):
    """The model of train.py with experts in its layers."""

    def layer(self, *args: Any) -> nn.Module:  # noqa: D102
        return Layer(*args)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map tokens (s, b) at the positions ``places`` (s,) to logits (s, b, 256) and the sum of balance losses."""
        x = self.embedding(tokens) + self.positions(places)[:, None]
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).sum()


# -------------------------------------------------------------------------------------------------------- the job


def expert_memory(
    options: Options, model: nn.Module, optimizer: Any, meshes: te_fsdp.Meshes
) -> tuple[int, int, int]:
    """Return bytes of experts' weights and optimizer states on the fullest rank, and elements of an even share."""
    weights = sum(row.bytes for row in te_fsdp.report(model) if ".experts." in row.name)
    states = 0
    for name, parameter in model.named_parameters():
        for state in optimizer.state[parameter].values() if ".experts." in name else ():
            if torch.is_tensor(state) and state.ndim:
                states += (state.to_local() if isinstance(state, DTensor) else state).nbytes
    most = torch.tensor([weights, states], device=meshes.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    matrices = options.layers * options.experts * (3 if options.activation == "swiglu" else 2)
    share = matrices * options.hidden * options.ffn // (meshes.expert_shards * options.ep * options.tp)
    return int(most[0]), int(most[1]), share


def main(options: Options) -> None:
    """Build the model, resume if requested, train and save."""
    meshes = te_fsdp.Meshes.build(
        dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, ep=options.ep, tp=options.tp
    )
    if train.check(options, meshes) > 1:
        train.stop("--micro: the balance loss counts the tokens of a whole step, in one microbatch.")
    if not 1 <= options.top_k <= options.experts:
        train.stop(f"--top-k {options.top_k} is not between 1 and --experts {options.experts}.")
    if options.single_grouped:
        os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"  # experimental in TransformerEngine
    text = train.Text(options)
    recipe = RECIPES[options.recipe] and RECIPES[options.recipe]()
    model, optimizer, schedule = train.build(ByteModel, Layer, options, meshes, recipe)
    about = {"data": text.digest, "seed": options.seed, "seq": options.seq}
    progress = {"step": 0, "position": 0, "losses": [], **about}
    if options.resume:
        progress = train.resume(options, model, optimizer, schedule, about)
    if RANK == 0:
        print(te_fsdp.report(model))
    if progress["step"] >= options.steps:
        train.stop(
            f"nothing to do: the checkpoint is at step {progress['step']}, --steps is {options.steps}."
        )
    paths = train.planned_saves(options, progress["step"])
    log = train.Log(options, meshes, optimizer, progress["losses"])

    first, share, places, copies = train.portion(options, meshes)
    saving = None
    for step in range(progress["step"], options.steps):
        torch.manual_seed(options.seed + 7919 * step + first)  # for recipes that round stochastically
        tokens = text.take(progress["position"] + first, share).to(meshes.device)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            logits, balance = model(tokens[places], places)
        total = F.cross_entropy(logits.flatten(0, 1).float(), tokens[places + 1].flatten(), reduction="sum")
        # This rank's part of the means over all tokens. The second one is 1 if the load is even.
        losses = torch.stack([total, balance / options.layers]) / (options.batch * options.seq)
        (losses * losses.new_tensor([1.0, options.balance])).sum().backward()
        norm = train.update(options, model, optimizer, schedule)

        means = losses.detach().double()
        dist.all_reduce(means)
        loss, balanced = means / copies
        progress["losses"].append(log.step(step, loss, balance=balanced, **norm))
        progress |= {"step": step + 1, "position": progress["position"] + options.batch}
        progress["schedule"] = schedule.state_dict()
        if step + 1 in paths:
            saving = te_fsdp.checkpoint.save(paths[step + 1], model, optimizer, extra=progress)

    if saving is not None:
        saving.result()  # with asynchronous=True, os._exit below would end the save
    weights, states, share = expert_memory(options, model, optimizer, meshes)
    log.close()
    if RANK == 0:
        each = f"{weights / share:.2f} and {states / share:.2f} per element of an even share of {share:,} elements"
        print(f"experts, fullest rank: {weights:,} bytes of weights, {states:,} of optimizer states; {each}")


if __name__ == "__main__":
    main(tyro.cli(Options, console_outputs=RANK == 0))
    dist.barrier()
    dist.destroy_process_group()
    # Communication threads that still run at the interpreter's shutdown can abort it.
    sys.stdout.flush()
    os._exit(0)
