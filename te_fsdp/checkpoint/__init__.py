"""Checkpoints in one canonical layout, loadable on any mesh: ``save``, ``load``, ``latest``."""

from te_fsdp.checkpoint.directory import latest
from te_fsdp.checkpoint.loading import load
from te_fsdp.checkpoint.saving import save
from te_fsdp.checkpoint.verifying import verify

__all__ = ["latest", "load", "save", "verify"]
