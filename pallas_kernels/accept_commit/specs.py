"""Name of the op."""

OP = "accept_commit"
