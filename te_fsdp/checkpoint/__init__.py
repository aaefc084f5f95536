"""Checkpoints in one canonical layout, loadable on any mesh: ``save``, ``load``, ``latest``, ``verify``.

And Hugging Face models' folders, from and onto any mesh: ``save_huggingface``, ``load_huggingface``.
"""

from te_fsdp.checkpoint.async_save import SaveHandle
from te_fsdp.checkpoint.directory import latest
from te_fsdp.checkpoint.extra import PerRank, rng_state, set_rng_state
from te_fsdp.checkpoint.load_source import verify
from te_fsdp.checkpoint.loading import Loaded, load
from te_fsdp.checkpoint.portable.huggingface import load_huggingface, save_huggingface
from te_fsdp.checkpoint.saving import save

__all__ = [
    "Loaded",
    "PerRank",
    "SaveHandle",
    "latest",
    "load",
    "load_huggingface",
    "rng_state",
    "save",
    "save_huggingface",
    "set_rng_state",
    "verify",
]
