"""Support of the quantization formats: amax groups, all-gather hooks, alignment of shards."""
