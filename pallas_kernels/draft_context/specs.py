"""Name of the op."""

OP = "draft_context"
