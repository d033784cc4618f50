"""The model families: what a Hugging Face `config.json` says of a decoder, and where each of its weights is held.

Pure functions, no torch. Every module of this package with a `FAMILY` is one; a new family is a new file.
"""

import importlib
import pkgutil

from megarl.family.shape import Experts, LatentAttention, ModelShape
from megarl.family.table import Family, Held, Weight

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
# By `model_type`.
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES if hasattr(module, "FAMILY")}

__all__ = ["FAMILIES", "Experts", "Family", "Held", "LatentAttention", "ModelShape", "Weight"]
