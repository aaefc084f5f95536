"""Checkpoints into other formats and models out of them, on top of what saves and loads; nothing below imports it.

Any source is read as :class:`~te_fsdp.checkpoint.reader.Contents`, the manifest's description and tensors that are
read by blocks of rows, and each target is written from that. Conversion needs one process: no model, no TE.
"""
