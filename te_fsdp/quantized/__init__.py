"""Support of TE's quantized weights: amax groups, all-gather hooks, alignment of shards."""
