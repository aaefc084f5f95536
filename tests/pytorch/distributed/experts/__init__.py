"""Expert parallelism by value: a small mixture of experts, compared with one process that has all experts."""
