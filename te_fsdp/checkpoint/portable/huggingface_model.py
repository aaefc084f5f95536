"""The TransformerEngine model of a Hugging Face one: names and options of parts, what they compute, what ranks hold.

torch's ``HuggingFaceStorageWriter`` (2.11 to 2.15) does not put tensors together: it writes tensors that are whole on a
rank, a file of them in memory at once, or every rank's shards, which a second pass over the disk must then join, and
leaves both; it does not sync, and renames nothing at the end; and its tensors are the model's own, not other rows of
these. Measured on 2 CPU ranks with 509 MB: 5.5 to 6.1 s and 1.7 s of CPU time here; there 6.8 to 13 s, 2.3 to 3.0 s,
twice the disk.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from te_fsdp import _te
from te_fsdp.agree import Ranks, rank
from te_fsdp.checkpoint.contents import with_remainders
from te_fsdp.checkpoint.index import is_tiling
from te_fsdp.checkpoint.lazy import InMemory
from te_fsdp.checkpoint.model_state import Owned, clean_name, owned_parameters
from te_fsdp.checkpoint.optimizer_state import describe_state
from te_fsdp.checkpoint.portable.huggingface_config import Architecture
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import slices
from te_fsdp.modules.semantics import Semantics, differences, semantics_of
from te_fsdp.sharding.main_weights import main_weight

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_log = logging.getLogger("te_fsdp")
Recorded = Mapping[str, Semantics]

_PLAIN_LAYER = {
    "layer_type": "encoder",
    "output_layernorm": False,
    "parallel_attention_mlp": False,
    "apply_residual_connection_post_layernorm": False,
}


@dataclass(frozen=True)
class TeNames:
    """Names of a model's parts. Change what your model calls otherwise.

    Attributes:
        layer: Prefix of a layer, with ``{layer}`` for its number from 0.
        embedding: Token embedding, shape (vocabulary, hidden).
        positions: Learned position embedding, shape (positions, hidden); not used with rotary embeddings.
        final_norm: Prefix of the last norm, whose parameters are ``weight`` and, for LayerNorm, ``bias``.
        head: Output projection, shape (vocabulary, hidden), without bias. ``None``: the model has none of its own
            and uses the embedding.
        ignored: Patterns (``fnmatch``) of further names in the model's state dict that are no weights.
        attention: Prefix of ``te.MultiheadAttention`` in a layer, with its norm (``input_layernorm=True``).
        mlp: Prefix of ``te.LayerNormMLP`` in a layer.
        attention_out_norm: Prefix of the norm after attention (Gemma 2 and 3).
        mlp_out_norm: Prefix of the norm after the MLP (Gemma 2 and 3).
        mlp_norm: Prefix of the norm before a layer's experts.
        router: The router's weight, shape (experts, hidden).
        experts_fc1: Prefix of ``te.GroupedLinear``, gate above up.
        experts_fc2: Prefix of ``te.GroupedLinear``, the way back.
        shared_fc1: Prefix of the shared expert's linear layer, gate above up.
        shared_fc2: Prefix of its way back.
        shared_gate: Weight of its gate, shape (1, hidden).
    """

    layer: str = "layers.{layer}."
    embedding: str = "embedding.weight"
    positions: str = "positions.weight"
    final_norm: str = "norm."
    head: str | None = "head.weight"
    ignored: tuple[str, ...] = ()
    attention: str = "self_attention."
    mlp: str = "layernorm_mlp."
    attention_out_norm: str = "attention_out_norm."
    mlp_out_norm: str = "mlp_out_norm."
    mlp_norm: str = "mlp_norm."
    router: str = "router.weight"
    experts_fc1: str = "experts.fc1."
    experts_fc2: str = "experts.fc2."
    shared_fc1: str = "shared_expert.fc1."
    shared_fc2: str = "shared_expert.fc2."
    shared_gate: str = "shared_expert_gate.weight"


@dataclass(frozen=True)
class TeBlocks:
    """Options of the model's layers that decide how parameters are named and laid out.

    For weights on their way in, ``None`` is TransformerEngine's default. On their way out nothing is assumed: what is
    ``None`` is read off the model, or off the checkpoint, and is an error where these do not tell.

    Attributes:
        fuse_qkv_params: As given to the layer.
        qkv_weight_interleaved: As given to the layer; without ``fuse_qkv_params`` it has no effect.
        zero_centered_gamma: As given to the layers' norms; not used for q/k norms, which TransformerEngine never
            centers.
        bias: As given to the layer, or to its attention; default: where the Hugging Face model has any bias.
        mlp_bias: As given to ``te.LayerNormMLP``, where that is another; default: as ``bias``.
        final_norm_zero_centered: ``zero_centered_gamma`` of the model's last norm.
    """

    fuse_qkv_params: bool | None = None
    qkv_weight_interleaved: bool | None = None
    zero_centered_gamma: bool | None = None
    bias: bool | None = None
    mlp_bias: bool | None = None
    final_norm_zero_centered: bool | None = None

    @classmethod
    def of(cls, model: nn.Module, names: TeNames | None = None) -> TeBlocks:
        """Read the options off a model, which may be sharded or on meta. Local operation.

        Raises:
            CheckpointError: Options that the model does not tell, since its parts are of other kinds or names.
        """
        return known_blocks(cls(), parameter_names(model), semantics_of(model), names or TeNames())


def parameter_names(model: nn.Module) -> set[str]:
    """Names of a model's parameters, without what wrappers add."""
    return {clean_name("", name) for name, _ in model.named_parameters(remove_duplicate=False)}


def known_blocks(told: TeBlocks, parameters: Collection[str], recorded: Recorded, names: TeNames) -> TeBlocks:
    """Options of a model's layers: what its parameters' names and its semantics, as far as known, say, else ``told``.

    Raises:
        CheckpointError: Options that nothing tells, all named.
    """
    layer = names.layer.format(layer=0)
    qkv, mlps = f"{layer}{names.attention}layernorm_qkv", [n for n in parameters if n.endswith(".fc2_weight")]
    seen: dict[str, bool | None] = {
        "fuse_qkv_params": f"{qkv}.weight" in parameters,
        "bias": f"{qkv}.bias" in parameters or f"{qkv}.query_bias" in parameters,
        "mlp_bias": any(f"{n.removesuffix('weight')}bias" in parameters for n in mlps),
        "zero_centered_gamma": centering(recorded, qkv),
        "final_norm_zero_centered": centering(recorded, names.final_norm.removesuffix(".")),
    }
    attention = recorded.get((layer + names.attention).removesuffix("."))
    if not seen["fuse_qkv_params"]:
        seen["qkv_weight_interleaved"] = True  # has no effect
    elif attention is not None:
        seen["qkv_weight_interleaved"] = attention["qkv_weight_interleaved"]
    blocks = replace(told, **{name: value for name, value in seen.items() if value is not None})
    unknown = [field.name for field in fields(blocks) if getattr(blocks, field.name) is None]
    if unknown:
        raise CheckpointError(
            f"options of the layers that nothing tells: {', '.join(unknown)}",
            why="Other options are other weights under the same names and shapes. A state dict does not have them, "
            "nor has a checkpoint that was saved without its modules' semantics, or with other names of modules",
            fix="blocks=TeBlocks.of(model), or TeBlocks(...) with each of them; on the command line "
            + " ".join(f"--te.layers.{name.replace('_', '-')} True|False" for name in unknown),
        )
    return blocks


def centering(recorded: Recorded, module: str) -> bool | None:
    """Whether the norm in a module is zero-centered; ``None`` where that is not known."""
    return recorded[module]["zero_centered_gamma"] if module in recorded else None


def layer_differences(
    recorded: Recorded, architecture: Architecture, names: TeNames, blocks: TeBlocks
) -> list[str]:
    """Settings of modules with which the same weights would compute something else, in words. Local operation.

    A setting that several layers share is named once, with the first layer. Not compared: dropout, centering of norms
    (which is converted), modules of a user's own classes, and scaled frequencies, for which a warning asks.
    """
    wanted = semantics_of_config(architecture, names, blocks, recorded)
    rotaries = {name: one for name, one in recorded.items() if one.kind == "RotaryPositionEmbedding"}
    for name, one in rotaries.items() if architecture.rope_scaling is None else ():
        is_windowed = one["rotary_base"] == architecture.window_rope_theta
        rotary = {"rotary_base": architecture.window_rope_theta if is_windowed else architecture.rope_theta}
        wanted[name] = Semantics(one.kind, "te", rotary | {"interleaved": False})
    plain = [name for name, one in rotaries.items() if one["seq_len_interpolation_factor"] is None]
    if architecture.rope_scaling is not None and plain and not rank():
        text = "config.json scales rotary frequencies (%s), %s does not: does the model itself?"
        _log.warning(text, dict(architecture.rope_scaling), shorten(plain, 3))
    found: dict[tuple[str, str, str], str] = {}
    for one in differences(wanted, recorded):
        module, _, setting = one.name.rpartition(".")
        if one.effect == "error" and setting != "zero_centered_gamma":
            text = f"{module}: {setting} is {one.now}, not {one.then}"
            found.setdefault((setting, str(one.now), str(one.then)), text)
    return list(found.values())


def semantics_of_config(
    a: Architecture, names: TeNames, blocks: TeBlocks, recorded: Recorded | None = None
) -> dict[str, Semantics]:
    """Semantics of the TransformerEngine model that computes what a Hugging Face model does.

    ``recorded`` are those of a model to compare with; ``None``: where one is possible a layer is a
    ``te.TransformerLayer``.
    """
    centered = {"zero_centered_gamma": bool(blocks.zero_centered_gamma)}
    last = {"zero_centered_gamma": bool(blocks.final_norm_zero_centered)}
    norm, kind = {"eps": a.norm_eps}, "RMSNorm" if a.style == "llama" else "LayerNorm"
    fused = {**norm, "normalization": kind, **centered}
    attention: dict[str, Any] = {
        "attention_type": "self",
        "softmax_type": "vanilla",
        "num_attention_heads": a.heads,
        "num_gqa_groups": a.kv_heads,
        "kv_channels": a.head_dim,
        "qk_norm_type": "RMSNorm" if a.qk_norm else None,
        "qk_norm_eps": a.norm_eps if a.qk_norm else None,
    }
    if blocks.fuse_qkv_params:
        attention["qkv_weight_interleaved"] = blocks.qkv_weight_interleaved is not False
    if a.style == "llama":
        attention["rotary_pos_interleaved"] = False
    if a.qk_norm:
        attention["qk_norm_before_rope"] = True
    found: dict[str, Semantics] = {}

    def add(name: str, kind: str, settings: dict[str, Any]) -> None:
        found[name.removesuffix(".")] = Semantics(kind, "te", settings)

    for n in range(a.layers):
        layer, sparse = names.layer.format(layer=n), a.experts is not None and n in a.experts.layers
        window = a.windows[n] if a.windows else None
        mask: dict[str, Any] = {"window_size": [-1 if window is None else window - 1, 0]}
        whole = not (sparse or a.branch_norms)
        if recorded is not None:
            here = recorded.get(layer.removesuffix("."))
            whole = here is not None and here.kind == "TransformerLayer"
        if whole:  # which tells its attention mask and window in each call
            add(layer, "TransformerLayer", {**_PLAIN_LAYER, **mask, "self_attn_mask_type": "causal"})
            mask = {}
        else:
            mask["attn_mask_type"] = "causal"
        add(layer + names.attention, "MultiheadAttention", attention | mask)
        add(f"{layer}{names.attention}layernorm_qkv", "LayerNormLinear", fused)
        if not sparse:
            mlp = {"activation": a.activation, "activation_params": None}
            add(layer + names.mlp, "LayerNormMLP", fused | mlp)
        others = [names.mlp_norm] if sparse else []
        for name in others + ([names.attention_out_norm, names.mlp_out_norm] if a.branch_norms else []):
            add(layer + name, kind, {**norm, **centered})
    add(names.final_norm, kind, {**norm, **last})
    return found


# ------------------------------------------- the model's tensors, each put together on the one rank that needs it

#: A rectangle of a tensor of the unsharded model: offsets and sizes.
Place = tuple[tuple[int, ...], tuple[int, ...]]


class Description(NamedTuple):
    """What a rank tells of a tensor of the unsharded model."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the parameter
    values: torch.dtype
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Share:
    """What this rank holds of one tensor of the unsharded model; ``read`` gives the values of the n-th rectangle."""

    about: Description
    read: Callable[[int], torch.Tensor]


def shares_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Share]:
    """This rank's share of every parameter, by the name in the unsharded model. Local operation.

    FSDP2 units are resharded. Values are an fp32 main weight where the optimizer has one, else the parameter's. A tied
    parameter comes under its first name; one for all experts as one for each, under the global index.
    """
    found: dict[str, Share] = {}
    for owned in owned_parameters(model):
        share = _share(owned, optimizer)
        if owned.is_grouped:
            found |= {f"{owned.fqn}{n}": _of_expert(share, n) for n in range(share.about.shape[0])}
        else:
            found[owned.fqn] = share
    return found


def _share(owned: Owned, optimizer: Optimizer | None) -> Share:
    info, main = owned.info, main_weight(optimizer, owned.parameter)
    shape, dtype = info.original_shape, owned.parameter.dtype
    if main is not None and main.dtype != torch.int16:
        assert optimizer is not None
        state = optimizer.state[owned.parameter]["master_param"]
        entry = describe_state(f"main weight of {owned.fqn}", state, owned)[1]
        assert entry is not None
        places = tuple((p.offsets, tuple(p.tensor.shape)) for p in entry.pieces)
        return Share(Description(shape, dtype, main.dtype, places), lambda n: entry.pieces[n].tensor)

    def read(n: int) -> torch.Tensor:
        local: Any = owned.local
        if main is not None:  # what FusedAdam keeps beside bf16 weights
            local = with_remainders(InMemory(local), InMemory(main)).whole()
        whole = local.dequantize() if _te.is_quantized(local) else local.detach()
        return whole[info.boxes[n].local_slices()]

    values = dtype if main is None else torch.float32
    return Share(Description(shape, dtype, values, tuple((b.original, b.sizes) for b in info.boxes)), read)


def _of_expert(share: Share, expert: int) -> Share:
    """One expert's part of what is held of a tensor for all."""
    places = share.about.places
    mine = [n for n, (at, size) in enumerate(places) if at[0] <= expert < at[0] + size[0]]

    def read(n: int) -> torch.Tensor:
        return share.read(mine[n])[expert - places[mine[n]][0][0]]

    own = tuple((places[n][0][1:], places[n][1][1:]) for n in mine)
    return Share(share.about._replace(shape=share.about.shape[1:], places=own), read)


def describe_shares(seen: Sequence[Mapping[str, Description]]) -> dict[str, Description]:
    """Every tensor of the unsharded model, from what the ranks tell, without their shares. Local operation.

    Raises:
        CheckpointError: Ranks that tell different things.
    """
    found: dict[str, Description] = {}
    empty: dict[str, Description] = {}
    for number, every in enumerate(seen):
        for name, about in every.items():
            one = about._replace(places=())
            # Of what it has nothing of, a rank may have no main weight either.
            if (found if about.places else empty).setdefault(name, one) != one and about.places:
                raise CheckpointError(
                    f"{name}: of another kind on rank {number}",
                    expected=f"shape, dtype and dtype of the main weight {tuple(found[name][:3])}",
                    got=tuple(one[:3]),
                    fix="build and train the same model, with the same optimizer, on all ranks",
                )
    return empty | found


class Transfer(NamedTuple):
    """A rectangle on its way to the rank that writes its tensor, perhaps the same."""

    holder: int
    index: int  # among what the holder has of the tensor
    writer: int
    name: str
    place: Place


def plan_exchange(
    seen: Sequence[Mapping[str, Description]], queues: Sequence[Sequence[Sequence[str]]]
) -> list[list[Transfer]]:
    """What each rank sends and receives, in one order for all, so that no two wait for each other. Local operation.

    The writers' groups take turns. A rectangle that several ranks hold comes from the rank that needs it, or from the
    one with the least to send. ``queues`` are for each rank the groups that it needs, in order: names of tensors.

    Raises:
        CheckpointError: Tensors of which the ranks do not hold every element once.
    """
    described = describe_shares(seen)
    holders: dict[str, dict[Place, list[tuple[int, int]]]] = {name: {} for name in described}
    for holder, every in enumerate(seen):
        for name, one in every.items():
            for n, place in enumerate(one.places):
                holders[name].setdefault(place, []).append((holder, n))
    _check_whole(holders, described)
    load: Counter[int] = Counter()
    plans: list[list[Transfer]] = [[] for _ in seen]
    for turn in zip_longest(*queues, fillvalue=()):
        for writer, name in ((writer, name) for writer, names in enumerate(turn) for name in names):
            for place, have in holders[name].items():
                holder, index = min(have, key=lambda one: (one[0] != writer, load[one[0]], one[0]))
                load[holder] += math.prod(place[1]) * described[name].values.itemsize * (holder != writer)
                for rank_ in {holder, writer}:
                    plans[rank_].append(Transfer(holder, index, writer, name, place))
    return plans


def _check_whole(holders: Mapping[str, Mapping[Place, Any]], described: Mapping[str, Description]) -> None:
    wrong = []
    for name, one in described.items():
        boxes = [place for place in holders[name] if math.prod(place[1])]
        have, whole = sum(math.prod(size) for _, size in boxes), math.prod(one.shape)
        if have != whole:
            wrong.append(f"{name} ({have} of {whole})")
        elif boxes and not is_tiling(one.shape, np.array(boxes, dtype=np.int64)):
            wrong.append(f"{name} (some twice)")
    if wrong:
        raise CheckpointError(
            f"tensors of which the ranks do not hold every element once: {', '.join(wrong)}",
            fix="call save_huggingface on all ranks of the job, with the model that te_fsdp.fully_shard returned",
        )


@dataclass
class Exchange:
    """The transfers of one export, as one rank sees them.

    Every rank takes part in all of its own, whatever goes wrong on it: others wait for it there. Tensors pass through
    the CPU's memory, a rectangle at a time, over a gloo group of te_fsdp's own, so that training's memory and
    collectives are not touched.
    """

    ranks: Ranks
    shares: Mapping[str, Share]
    described: Mapping[str, Description]
    left: deque[Transfer]

    def __post_init__(self) -> None:
        self.missing = Counter(one.name for one in self.left if one.writer == self.ranks.rank)
        self.here: dict[str, torch.Tensor] = {}
        self.failed: Exception | None = None

    def take(self, name: str) -> torch.Tensor:
        """A tensor that this rank needs next, in the dtype of its values. Waits for the ranks that have it."""
        while self.missing[name]:
            self._move(self.left.popleft())
        return self.here.pop(name)

    def drain(self) -> None:
        """The transfers that are left: this rank needs nothing more, or has failed."""
        while self.left:
            self._move(self.left.popleft())
            self.here.clear()
        if self.failed is not None:
            raise self.failed

    def _move(self, one: Transfer) -> None:
        about, (offsets, sizes) = self.described[one.name], one.place
        count = math.prod(sizes) * about.values.itemsize
        if one.holder != self.ranks.rank:
            data = torch.empty(count, dtype=torch.uint8, device="cpu")
            dist.recv(data, one.holder, group=self.ranks.group)
        else:
            try:
                data = self._bytes_of(one.name, one.index).cpu()
            except Exception as error:  # zeros go instead
                self.failed, data = self.failed or error, torch.zeros(count, dtype=torch.uint8, device="cpu")
        if one.writer != self.ranks.rank:
            dist.send(data, one.writer, group=self.ranks.group)
            return
        if one.name not in self.here:
            self.here[one.name] = torch.empty(about.shape, dtype=about.values, device="cpu")
        self.here[one.name][slices(offsets, sizes)] = data.view(about.values).view(sizes)
        self.missing[one.name] -= 1

    def _bytes_of(self, name: str, n: int) -> torch.Tensor:
        value = self.shares[name].read(n).to(self.described[name].values)
        return value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
