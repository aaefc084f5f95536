"""Agreement of ranks, rendezvous, and collectives on parameters and gradients."""
