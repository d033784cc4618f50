"""Imported once in the fork server of `hang_cases.py`: what every rank would import."""

import torch

import megarl.build  # noqa: F401
import tests.preload  # noqa: F401

torch.set_num_threads(1)
