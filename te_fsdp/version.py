"""The version of te_fsdp."""

VERSION = "0.1.0"
