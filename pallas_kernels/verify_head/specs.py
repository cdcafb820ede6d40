"""Name of the op."""

OP = "verify_head"
