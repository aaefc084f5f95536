"""Bodies of the precision policy's tests."""
