"""Agreement of ranks, rendezvous, and moves of tensors between placements."""
