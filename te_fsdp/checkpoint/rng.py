"""The state of a rank's random generators, to be saved in ``extra`` and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from te_fsdp.checkpoint.extra import PerRank
from te_fsdp.errors import CheckpointError, message

__all__ = ["rng_state", "set_rng_state"]


def rng_state(tracker: Any = None) -> PerRank:
    """State of this rank's random generators, to be saved in ``extra={"rng": ...}``. Local operation.

    Covers Python's ``random``, NumPy's global generator if NumPy is imported, torch's of the CPU and of the
    current GPU. A generator that all ranks share (the order of the data, say) does not belong here: its
    ``get_state()`` is a tensor that ``extra`` takes as it is, and that loads on any mesh.

    Args:
        tracker: TransformerEngine's or Megatron's tracker of named states (``get_states``, tensors), if the
            model uses one.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        import numpy as np

        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        words = torch.tensor([int(word) for word in keys], device="cpu")
        state["numpy"] = {
            "kind": kind,
            "words": words,
            "rest": (int(position), int(has_gauss), float(cached)),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if tracker is not None:
        state["tracker"] = dict(tracker.get_states())
    return PerRank(state)


def set_rng_state(state: Mapping[str, Any] | None, tracker: Any = None) -> None:
    """Put back what :func:`rng_state` found, as ``load`` returned it. Local operation.

    Args:
        state: This rank's.
        tracker: As at the save (``set_states``).

    Raises:
        CheckpointError: No state, since it was saved on another mesh, or none of a generator that is in use.
    """
    if state is None:
        raise CheckpointError(
            message(
                "set_rng_state: no state",
                why="States of single ranks, saved on another mesh, belong to none of these ranks",
                fix="seed the ranks anew, for example torch.manual_seed(seed + step) with a seed per rank",
            )
        )
    if (tracker is None) != ("tracker" not in state):
        raise CheckpointError(
            message(
                "set_rng_state: tracker",
                expected="one here and at the save, or neither",
                fix="pass it to both",
            )
        )
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        words = np.array(state["numpy"]["words"].tolist(), dtype=np.uint32)
        np.random.set_state((state["numpy"]["kind"], words, *state["numpy"]["rest"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if tracker is not None:
        tracker.set_states(dict(state["tracker"]))
