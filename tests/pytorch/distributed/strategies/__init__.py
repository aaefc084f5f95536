"""Bodies of the tests of sharding strategies and of gradient accumulation."""
