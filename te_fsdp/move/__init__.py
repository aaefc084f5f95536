"""Collectives of te_fsdp on parameters and gradients, in addition to FSDP2's own."""
