"""Prompts, chat templates and the records that travel through a step."""
