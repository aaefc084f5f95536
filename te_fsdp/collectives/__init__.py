"""Communication between ranks that te_fsdp runs itself."""
