"""The command ``te-fsdp``. Argument parsing lives here alone; nothing heavy is imported before it is used."""
