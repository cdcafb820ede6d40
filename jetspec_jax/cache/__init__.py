"""Preallocated KV cache slots: written once per round at the tail, never copied."""

from jetspec_jax.cache.kv import KVCache, after, alloc, commit, gather_rows

__all__ = ["KVCache", "after", "alloc", "commit", "gather_rows"]
