"""Bodies of the tests of recorded steps."""
