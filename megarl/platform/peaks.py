"""What devices can compute at most, by their names, as their makers publish it: dense, without sparsity.

In 10**12 floating-point operations a second: fp8; bf16 and fp16; fp32 without TF32, which torch does not use unless it is
asked. From NVIDIA's data sheets.
"""

from __future__ import annotations

import re

# Words of the name that torch gives, the longer ones first: fp8, bf16 and fp16, fp32; None: the device has none.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float | None]], ...] = (
    ("GB200", (5000.0, 2500.0, 80.0)),
    ("B200", (4500.0, 2250.0, 75.0)),
    ("GH200", (1979.0, 989.0, 67.0)),
    ("H200 NVL", (1671.0, 835.0, 60.0)),
    ("H200", (1979.0, 989.0, 67.0)),
    ("H100 NVL", (1671.0, 835.0, 60.0)),
    ("H100 PCIe", (1513.0, 756.0, 51.0)),
    ("H100", (1979.0, 989.0, 67.0)),
    ("H800", (1979.0, 989.0, 67.0)),
    ("H20", (296.0, 148.0, 44.0)),
    ("A100", (None, 312.0, 19.5)),
    ("A800", (None, 312.0, 19.5)),
    ("L40S", (733.0, 362.0, 91.6)),
    ("L40", (362.0, 181.0, 90.5)),
    ("L4", (242.0, 121.0, 30.3)),
    ("A40", (None, 149.7, 37.4)),
    ("A30", (None, 165.0, 10.3)),
    ("A10", (None, 125.0, 31.2)),
)


def peak_of(name: str, precision: str) -> float | None:
    """The peak of the device that torch calls `name`, in 10**12 operations a second; `precision` is "fp8", "bf16", "fp16" or
    "fp32". None for a device that is not in the table, or that lacks the format."""
    column = {"fp8": 0, "bf16": 1, "fp16": 1, "fp32": 2}[precision]
    return next((peaks[column] for words, peaks in _PEAKS if re.search(rf"\b{words}\b", name)), None)
