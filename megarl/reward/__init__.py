"""Verifiers and the workers that score completions with them."""
