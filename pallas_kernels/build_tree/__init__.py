"""The best tree of B nodes from candidate tables: see `api`."""

from pallas_kernels.build_tree.api import Nodes, build_tree

__all__ = ["Nodes", "build_tree"]
