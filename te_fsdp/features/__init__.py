"""Parts of training that a model may use. Nothing in the core needs them."""
