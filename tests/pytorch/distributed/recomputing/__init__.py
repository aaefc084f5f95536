"""Models and bodies of test_recomputation: what reads parameters again in backward."""
