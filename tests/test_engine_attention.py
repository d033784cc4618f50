"""Packed attention against the plain formula: windows, values narrower than keys, the last rows of a sequence."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from megarl.engine.attention import BLOCK, PackedAttention, Packing


class _OneRank:
    """The context group of a rank that shares its sequences with no other."""

    def size(self):
        return 1


class _Groups:
    cp = _OneRank()


class _Packing:
    def __init__(self, lengths):
        self.cu_seqlens_q = torch.tensor([0, *lengths]).cumsum(0)


def attention(window):
    return PackedAttention(None, 2, None, "self", softmax_scale=0.3, pg_collection=_Groups(), windows=(0, window))


def plain(query, key, value, window):
    """Every pair of one sequence; queries are those of its last tokens."""
    heads = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(heads, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    distance = torch.arange(len(key) - len(query), len(key)).unsqueeze(1) - torch.arange(len(key))
    seen = (distance >= 0) & ((distance < window) | (window == 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


def random_parts(rows, length, value_dim=6):
    torch.manual_seed(0)
    sizes = ((rows, 4, 6), (length, 2, 6), (length, 2, value_dim))
    return [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("value_dim", [6, 4])
@pytest.mark.parametrize("window", [0, 1, 5, 600])
def test_sequences_end_to_end(window, value_dim):
    lengths = (3, 2 * BLOCK + 7, 1, BLOCK)
    parts = random_parts(sum(lengths), sum(lengths), value_dim)
    found = attention(window)(*parts, packed_seq_params=_Packing(lengths))
    expected = torch.cat(
        [
            plain(query, key, value, window)
            for query, key, value in zip(*(part.split(lengths) for part in parts), strict=True)
        ]
    )
    assert_close(found, expected.flatten(1))
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), parts)
    assert_close(gradients, torch.autograd.grad((expected.flatten(1) * weights).sum(), parts))


@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize(("rows", "length"), [(1, 9), (7, 40), (BLOCK, BLOCK + 1), (BLOCK + 3, 3 * BLOCK), (300, 301)])
def test_last_rows_of_a_sequence(rows, length, window):
    """What a context rank computes for its chunk at the back."""
    parts = random_parts(rows, length)
    query, key, value = parts
    assert_close(attention(window)._attend(query, key, value), plain(query, key, value, window))


def kept_bytes(forward):
    """Bytes that autograd keeps until the backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def test_blocks_share_one_mask():
    parts = random_parts(4 * BLOCK, 8 * BLOCK)
    mask = BLOCK * 8 * BLOCK * 8  # bytes
    assert mask <= kept_bytes(lambda: attention(0)._attend(*parts)) < 2 * mask


def test_narrow_values_do_not_write_out_the_square():
    length = 8 * BLOCK
    parts = random_parts(length, length, value_dim=4)
    square = length * length * 8  # bytes, of one head
    assert kept_bytes(lambda: attention(0)(*parts, packed_seq_params=_Packing([length]))) < square / 8


@pytest.mark.parametrize("window", [0, 5])
def test_completions_continue_one_prompt(window):
    """As if each had the prompt for itself, and the prompt gets the gradient of all of them."""
    bounds, continues = (0, 7, 10, 14, 15), ((0, 0), (0, 7), (0, 7), (0, 0))
    parts = random_parts(15, 15)
    packing = Packing(bounds=bounds, continues=continues)
    found = attention(window)(*parts, packed_seq_params=packing)
    alone = []
    for (start, stop), (first, last) in zip(pairwise(bounds), continues, strict=True):
        query, key, value = parts
        keys, values = (torch.cat([part[first:last], part[start:stop]]) for part in (key, value))
        alone.append(plain(query[start:stop], keys, values, window))
    expected = torch.cat(alone).flatten(1)
    assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((one * weights).sum(), parts) for one in (found, expected)]
    assert_close(*gradients)
