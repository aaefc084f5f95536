"""Facts and fixes per quantization format: amax groups, all-gather hooks, alignment of shards."""
