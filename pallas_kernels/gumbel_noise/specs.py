"""Name of the op."""

OP = "gumbel_noise"
