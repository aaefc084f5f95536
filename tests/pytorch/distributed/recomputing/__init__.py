"""Bodies of test_recomputation, with models that read parameters again in backward."""
