"""Checkpoints into and out of other formats, in one process, tensor by tensor: no model, no TE, no process group.

A source of any kind becomes :class:`~te_fsdp.checkpoint.portable.contents.Contents`: the manifest's description and
tensors that are read by blocks of rows. Each target is written from that.
"""
