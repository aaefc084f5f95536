"""Optional features of training. The core does not depend on them."""
