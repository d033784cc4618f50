"""Rollout engines: vLLM in Ray actors, the pool over them, and what they hand back.

`pool.py` is where a reader starts. Nothing is imported here: Ray's small actors import this package, and without torch
each of them is 200 MB smaller.
"""
