"""How the head cuts the logits of a micro-batch into blocks, so that they never exist all at once."""

from __future__ import annotations

from collections.abc import Iterator

# A block in fp32: 8,192 rows by 8,192 columns. A block takes some fifteen kernels; with 64 MiB an H100 ran them in less time
# than its host took to launch them.
BLOCK_BYTES = 256 * 2**20
# On a CPU. glibc maps whatever is larger than 32 MiB anew each time, and fresh pages take longer than the numbers that go
# into them; what is smaller lies in memory that it keeps, which a large third-level cache may even hold. (The head of
# SmolLM2 takes 1.3 times as long with 64 MiB: two cores of an EPYC with 32 MiB of such cache.)
CPU_BLOCK_BYTES = 24 * 2**20
BLOCK_ROWS = 8192
_FP32 = 4


def cut(num_rows: int, num_columns: int, on_cpu: bool, parts: int = 1) -> Iterator[tuple[slice, slice]]:
    """Blocks of at most BLOCK_ROWS rows and, in fp32, BLOCK_BYTES (on a CPU CPU_BLOCK_BYTES) over `parts`, the blocks that
    are held at once, as equal as whole multiples of 64 columns allow."""
    rows = min(num_rows, BLOCK_ROWS)
    if rows == 0 or num_columns == 0:
        return
    limit = max((CPU_BLOCK_BYTES if on_cpu else BLOCK_BYTES) // (_FP32 * rows * parts), 1)
    columns = -(-num_columns // -(-num_columns // limit))  # equal parts
    columns = min(-(-columns // 64) * 64, max(limit // 64 * 64, 1))  # matrix products like whole multiples
    for row in range(0, num_rows, rows):
        for column in range(0, num_columns, columns):
            yield slice(row, min(row + rows, num_rows)), slice(column, min(column + columns, num_columns))


def largest_block(num_rows: int, num_columns: int, on_cpu: bool) -> tuple[int, int]:
    """Rows and columns of the largest block."""
    blocks = cut(num_rows, num_columns, on_cpu)
    sizes = [(rows.stop - rows.start, columns.stop - columns.start) for rows, columns in blocks]
    return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))


def bytes_of(rows: int, columns: int, bytes_per_weight: int, entropy: bool) -> int:
    """What the head holds at once for a block: the fp32 block, of any other precision the logits in that as well, and with
    entropy (forward), or its gradient (backward), a second fp32 block."""
    return rows * columns * (_FP32 * (2 if entropy else 1) + (bytes_per_weight if bytes_per_weight != _FP32 else 0))
