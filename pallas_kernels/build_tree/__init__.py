"""The best tree of B nodes from candidate tables, one launch a batch: see `gpu`."""
