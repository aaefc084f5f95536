"""Bodies of test_no_shard: parameters that stay whole on every data-parallel rank."""
