"""Expert parallelism by value: a small mixture of experts, trained next to one process that holds all of them."""
