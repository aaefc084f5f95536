"""``load``: compare checkpoint, model and optimizer, report every difference at once, only then read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_fsdp.agree import all_agree, rank
from te_fsdp.all_ranks import collective_call
from te_fsdp.checkpoint.compare import SETTINGS, Differences, check_metadata, compare_model, compare_semantics
from te_fsdp.checkpoint.conversion import plan_conversion
from te_fsdp.checkpoint.delayed import compare_delayed
from te_fsdp.checkpoint.directory import in_use
from te_fsdp.checkpoint.filling import Filling
from te_fsdp.checkpoint.model_state import ModelState, model_state
from te_fsdp.checkpoint.optimizer_state import check_scaled_state, compare_optimizer
from te_fsdp.checkpoint.source import Source, compare_stacked, open_source, settle_scaling
from te_fsdp.errors import CheckpointError, message, shorten
from te_fsdp.sharding.optimizer import check_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Loaded", "load"]

_log = logging.getLogger("te_fsdp")


class Loaded(dict[str, Any]):
    """What ``save`` was given as ``extra``, and what the load did.

    Attributes:
        left: Name of a tensor, module or optimizer state that was not loaded -> why.
        converted: Name -> from what to what, and where the values came from.
        notes: Other things that came from elsewhere than usual, in words.
    """

    def __init__(
        self,
        extra: dict[str, Any] | None = None,
        *,
        left: dict[str, str] | None = None,
        converted: dict[str, str] | None = None,
        notes: list[str] | None = None,
    ) -> None:
        super().__init__(extra or {})
        self.left: dict[str, str] = dict(left or {})
        self.converted: dict[str, str] = dict(converted or {})
        self.notes: list[str] = list(notes or [])

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left."""
        return not self.left


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    allow: Iterable[str] = (),
    convert: bool = True,
    verify: bool = False,
) -> Loaded:
    """Load a checkpoint into a model and its optimizer, in place, whatever mesh it was saved on.

    First compares the checkpoint with model and optimizer; on any difference nothing is changed. Weights of
    another dtype or quantization format are converted: from the saved main weights where there are some, else
    from the saved (dequantized) values, rounded or quantized once, with the amax of the whole weight. Optimizer
    state that does not exist yet is allocated. Collective over the world: call on all ranks. All ranks must
    reach the directory.

    A directory of plain ``torch.distributed.checkpoint`` is taken too: a model's state dict, or
    ``{"model": ..., "optimizer": ...}`` from ``get_state_dict``, of whole or DTensor weights. TE's ``_extra_state`` is
    read without running anything of it. What was taken and what was not is in ``notes``.

    Args:
        path: A checkpoint that :func:`te_fsdp.checkpoint.save` wrote, or a plain one.
        model: The model on its device, sharded or not; what its parameters hold is overwritten.
        optimizer: Over the model's current parameters; its group options are overwritten by the saved ones.
            ``None``: saved optimizer state is not read. Main weights of optimizers that are not given follow the
            loaded weights, which ``notes`` tells; else their next step would put the weights of before back.
        strict: Whether everything must fit. ``False``: what differs or is missing is left as it is, and named
            in the result and in a warning. Optimizer state is taken or left parameter by parameter. Settings of
            modules that change the function of the weights (another epsilon, other heads) raise all the same.
        allow: Names of deliberate differences, as shell patterns (``"head.*"``): what they match may be left.
            A parameter's name stands for its optimizer state as well, ``"optimizer"`` for the whole optimizer,
            ``"*.eps"`` for a setting of modules, ``"settings"`` for all in a checkpoint that records none.
        convert: Whether weights and state of another dtype or format are converted. ``False``: they differ.
        verify: Read all files once before, and compare their checksums; each is read by one rank. Otherwise
            manifest, DCP's metadata, sizes of the files and what is read are checked; of checkpoints before
            format 3 not the latter. A plain directory has the checksums that ``torch.save`` wrote.

    Returns:
        What ``save`` was given as ``extra``, tensors on the CPU. Values per rank come as this rank's, or, on
        another mesh, as ``None`` with a warning. Its attributes ``left``, ``converted`` and ``notes`` tell what
        was not simply copied.

    Raises:
        CheckpointError: No checkpoint there, a damaged one, or one that differs (all differences in one
            text). All ranks raise the same.
        OrderError: The optimizer was built before the model was sharded.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    source = Path(os.path.abspath(path))
    patterns = [allow] if isinstance(allow, str) else list(allow)
    with collective_call("checkpoint.load"), in_use(source):
        return _load(source, model, optimizer, strict=strict, allow=patterns, convert=convert, verify=verify)


def _load(
    source: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    strict: bool,
    allow: list[str],
    convert: bool,
    verify: bool,
) -> Loaded:
    began = time.perf_counter()
    opened = open_source(source, model, optimizer, verify=verify)
    state, found = all_agree(lambda: _compare(opened, model, optimizer))
    found = found.over_all_ranks()
    if not convert:
        found.refuse_conversions()
    refused = found.without(allow, strict=strict)
    if refused:
        raise CheckpointError(_does_not_fit(opened, refused))
    filling = Filling(opened, model, optimizer, state, found)
    extra = filling.run()
    notes = [*filling.notes, *found.harmless()]
    loaded = Loaded(extra, left=found.left(), converted=filling.converted(), notes=notes)
    _tell(source, found, loaded, [*opened.notes, *found.harmless()] if rank() else [])
    _log.info("loaded %s in %.2f s", source, time.perf_counter() - began)
    return loaded


def _compare(source: Source, model: nn.Module, optimizer: Optimizer | None) -> tuple[ModelState, Differences]:
    """Everything that one rank can find out; changes nothing."""
    manifest = source.manifest
    if source.tensors is None:
        source.metadata = check_metadata(source.path, manifest)
    state = model_state(model, may_cut_blocks=True)
    settle_scaling(source, state.described)
    found = compare_model(manifest, state)
    compare_stacked(found, source, state.described)
    compare_semantics(found, manifest, model, state)
    for kind, name, detail in compare_delayed(model, manifest.delayed):
        found.add(kind, name, detail)
    for name in found.converted.keys() & state.members.keys():
        for owned in state.members[name]:
            plan_conversion(owned, manifest.tensor(name), {})  # raises where there are no values
    if optimizer is None:
        return state, found
    check_optimizer(model, optimizer)
    check_scaled_state(optimizer)
    if manifest.optimizer is None:
        found.add_optimizer("optimizer: none in the checkpoint")
    else:
        compare_optimizer(found, optimizer, manifest.optimizer, state.owned)
    return state, found


def _tell(source: Path, found: Differences, loaded: Loaded, silent: list[str]) -> None:
    """What was not simply copied, to the log; without notes that another rank tells."""
    if loaded.left:
        _log.warning("%s: loaded in part; left as it was: %s", source, "; ".join(found.texts()))
    if loaded.converted:
        shown = [f"{name}: {how}" for name, how in loaded.converted.items()]
        _log.warning("%s: %d tensor(s) converted (%s)", source, len(shown), shorten(shown, 3))
    for note in loaded.notes:
        if note in silent:
            continue
        _log.warning("%s: %s", source, note)


def _does_not_fit(source: Source, found: Differences) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in source.manifest.mesh.items())
    origin = f"saved on {mesh} by te_fsdp {source.manifest.versions.get('te_fsdp')}"
    if SETTINGS in found.settings:
        ways = f'load(..., allow=["{SETTINGS}"]) if the modules were built with these settings'
    else:
        ways = "build model and optimizer as they were saved, name deliberate differences in load(..., allow=[...])"
    if all(setting.effect == "strict" for setting in found.settings.values()):
        ways += ", or load(..., strict=False) to take what fits"
    return message(
        f"{source.path} does not fit: {'; '.join(found.texts())}",
        why=f"Nothing was loaded ({'; '.join(source.notes) or origin})",
        fix=ways,
    )
