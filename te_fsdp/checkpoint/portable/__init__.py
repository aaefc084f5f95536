"""Conversion of checkpoints to other formats or from them. Saving or loading does not import it.

Any source is read as :class:`~te_fsdp.checkpoint.reader.Contents`, the manifest's description and tensors that are
read by blocks of rows, and each target is written from that. Conversion needs one process: no model, no TE.
"""
