"""Bodies of test_no_shard: parameters that stay unsharded on every data-parallel rank."""
