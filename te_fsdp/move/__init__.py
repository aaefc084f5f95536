"""Parameters and gradients on their way between ranks: what te_fsdp itself sends, beside FSDP2's own collectives."""
