"""HFSDP: optimizer state sharded over dp_replicate as well."""
