"""A role: one Megatron model with its optimizer, packed batches, objectives, checkpoints and parallel state.

The libraries' warnings are silenced, except rank 0's about the options of a TransformerConfig: a user can fix only these.
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
