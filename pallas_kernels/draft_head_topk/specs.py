"""Name and limits of the op; cpu.cc has the same."""

OP = "draft_head_topk"
MAX_WIDTH = 64
