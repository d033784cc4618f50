"""A role: one Megatron model with its optimizer, packed batches, objectives, checkpoints and parallel state.

Every rank would print the warnings of its libraries, and none is the user's to mend but those about the options of a
TransformerConfig, which the first rank shows.
"""

import logging
import os
import warnings

warnings.filterwarnings("ignore", module=r"megatron\.core")
if os.environ.get("RANK", "0") == "0":
    warnings.filterwarnings("default", module=r"megatron\.core\.transformer\.transformer_config")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
logging.getLogger("megatron.core").setLevel(logging.ERROR)
logging.getLogger("megatron.core.transformer.transformer_config").setLevel(logging.WARNING)
