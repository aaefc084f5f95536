"""Bodies of the tests of sharding strategies."""
