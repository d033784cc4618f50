"""Packed attention against the plain formula: windows, values narrower than keys, the last rows of a sequence; with a call a
sequence, and with a stand-in for the varlen kernel of a GPU."""

from itertools import accumulate, pairwise, product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from megarl.megatron.batch import own_slots, parts_of
from megarl.models import attention as engine_attention
from megarl.models.attention import ALIGNED, BLOCK, PackedAttention, Packing, seen_keys
from megarl.platform import Platform
from megarl.platform.transfers import has_varlen_attention, varlen_attention


class _OneRank:
    """The context group of a rank that shares its sequences with no other."""

    def size(self):
        return 1


class _Groups:
    cp = _OneRank()


def packing_of(lengths, continues=()):
    """What the engine tells attention of sequences end to end."""
    parts = parts_of([0, *accumulate(lengths)], continues)
    bounds = (torch.tensor(offsets, dtype=torch.int32) for offsets in (parts.query_bounds, parts.key_bounds))
    return Packing(parts=parts, query_bounds=next(bounds), key_bounds=next(bounds))


def attention(window):
    return PackedAttention(None, 2, None, "self", softmax_scale=0.3, pg_collection=_Groups(), windows=(0, window))


@pytest.fixture(params=["sequences", "varlen"])
def kernel(request, monkeypatch):
    """How attention is computed; the varlen kernel is its formula."""
    calls = []
    if request.param == "varlen":

        def varlen(query, key, value, query_bounds, key_bounds, max_query, max_key, *, scale, window_size, enable_gqa):
            calls.append(max_query)
            assert query_bounds.dtype == key_bounds.dtype == torch.int32 and {type(max_query), type(max_key)} == {int}
            assert query.shape[-1] == key.shape[-1] == value.shape[-1] and enable_gqa and window_size[1] == 0
            queries, keys = query_bounds.diff().tolist(), key_bounds.diff().tolist()
            assert (max(queries), max(keys)) == (max_query, max_key)
            assert (sum(queries), sum(keys)) == (len(query), len(key)) and len(key) == len(value)
            rows = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
            return torch.cat([plain(*row, window_size[0] + 1, scale) for row in rows])

        monkeypatch.setattr(Platform, "varlen_attention", lambda self, dtype, head_dim: varlen)
    yield
    assert bool(calls) == (request.param == "varlen")


def plain(query, key, value, window, scale=0.3):
    """Every pair of one sequence; queries are those of its last tokens."""
    heads = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(heads, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    distance = torch.arange(len(key) - len(query), len(key)).unsqueeze(1) - torch.arange(len(key))
    seen = (distance >= 0) & ((distance < window) | (window == 0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


def assert_alike(output, expected, parts):
    """Also what the parts get as their gradients."""
    assert_close(output, expected.flatten(1))
    weights = torch.randn_like(output)
    assert_close(*(torch.autograd.grad((result.flatten(1) * weights).sum(), parts) for result in (output, expected)))


def random_parts(rows, length, value_dim=6):
    torch.manual_seed(0)
    sizes = ((rows, 4, 6), (length, 2, 6), (length, 2, value_dim))
    return [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("value_dim", [6, 4])
@pytest.mark.parametrize("window", [0, 1, 5, 600])
def test_sequences_end_to_end(kernel, window, value_dim):
    lengths = (3, 2 * BLOCK + 7, 1, BLOCK)
    parts = random_parts(sum(lengths), sum(lengths), value_dim)
    output = attention(window)(*parts, packed_seq_params=packing_of(lengths))
    rows = zip(*(part.split(lengths) for part in parts), strict=True)
    assert_alike(output, torch.cat([plain(query, key, value, window) for query, key, value in rows]), parts)


@pytest.mark.parametrize("window", [0, 5, 16, 600])
def test_masks_are_aligned_where_torch_does_not_copy_them(window):
    """torch's memory-efficient kernel reads a mask in vectors, and copies one only if its strides are odd; an odd address
    ends the process on a GPU (seen on an H100)."""
    largest = window + BLOCK if window else 4 * BLOCK
    for rows, keys in product((1, 7, 16, BLOCK), (1, 16, 40, largest - 1, largest)):
        mask = seen_keys(rows, keys, window, torch.float32, torch.device("meta"))  # as on a GPU
        assert mask.stride(0) % ALIGNED or mask.storage_offset() % ALIGNED == 0, (rows, keys)
        mask = seen_keys(rows, keys, window, torch.float32, torch.device("cpu"))
        distance = torch.arange(keys - rows, keys).unsqueeze(1) - torch.arange(keys)
        assert torch.equal(mask == 0, (distance >= 0) & ((distance < window) | (window == 0)))


@pytest.mark.parametrize(("window", "copies"), [(0, 1), (5, 0), (300, 0)])
def test_only_the_end_of_a_sequence_without_a_window_copies_its_mask(window, copies, monkeypatch):
    masks = []

    def remember(query, key, value, attn_mask=None, is_causal=False):
        masks.append(attn_mask)
        return query

    layer = attention(window)
    monkeypatch.setattr(layer, "_product", remember)
    layer._attend(*(part.to("meta") for part in random_parts(1001, 1203)))
    assert len(masks) > 3 and sum(not mask._is_view() for mask in masks) == copies


def kept_bytes(forward):
    """Bytes that autograd keeps until the backward pass."""
    saved_bytes = {}

    def keep(tensor):
        saved_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(saved_bytes.values())


def test_narrow_values_do_not_write_out_the_square():
    length = 8 * BLOCK
    parts = random_parts(length, length, value_dim=4)
    square = length * length * 8  # bytes, of one head
    assert kept_bytes(lambda: attention(0)(*parts, packed_seq_params=packing_of([length]))) < square / 8


@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize("prompt", [7, BLOCK, 2 * BLOCK - 3])
def test_completions_continue_one_prompt(kernel, window, prompt):
    """As if each had the prompt for itself, and the prompt gets the gradient of all of them. Completions begin and end at
    the end of a block of queries, and beside it."""
    lengths, continues = [prompt, 3, BLOCK + 4, 1], ((0, 0), (0, prompt), (0, prompt), (0, 0))
    bounds = [0, *accumulate(lengths)]
    parts = random_parts(bounds[-1], bounds[-1])
    output = attention(window)(*parts, packed_seq_params=packing_of(lengths, continues))
    alone = []
    for (start, stop), (first, last) in zip(pairwise(bounds), continues, strict=True):
        query, key, value = parts
        keys, values = (torch.cat([part[first:last], part[start:stop]]) for part in (key, value))
        alone.append(plain(query[start:stop], keys, values, window))
    assert_alike(output, torch.cat(alone), parts)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("context", [2, 3])
def test_context_ranks_together_compute_whole_sequences(kernel, monkeypatch, window, context):
    """Each its chunks, from the keys of all ranks; and the keys get the gradient of all ranks' queries."""
    lengths = [2 * context, 6 * context]
    whole = random_parts(sum(lengths), sum(lengths))
    starts = [0, *accumulate(lengths)]
    slots = [torch.from_numpy(own_slots(starts, context, rank)) for rank in range(context)]

    class Group(_OneRank):
        def size(self):
            return context

    outputs = torch.zeros(sum(lengths), 24, dtype=torch.float64)
    for rank, indices in enumerate(slots):
        gathered = iter([torch.cat([part[rank_slots] for rank_slots in slots]) for part in whole[1:]])
        monkeypatch.setattr(
            engine_attention, "gather_from_sequence_parallel_region", lambda rows, group, parts=gathered: next(parts)
        )
        parts = parts_of(starts, (), context, rank)
        bounds = [torch.tensor(offsets, dtype=torch.int32) for offsets in (parts.query_bounds, parts.key_bounds)]
        module = attention(window)
        module.context_group = Group()
        packing = Packing(parts=parts, query_bounds=bounds[0], key_bounds=bounds[1])
        outputs = outputs.index_copy(0, indices, module(*(part[indices] for part in whole), packed_seq_params=packing))
    rows = zip(*(part.split(lengths) for part in whole), strict=True)
    assert_alike(outputs, torch.cat([plain(query, key, value, window) for query, key, value in rows]), whole)


def test_varlen_kernels_run_where_torch_has_them():
    """The limits of FlashAttention 2: Ampere, 16 bits, heads of at most 256 and a multiple of 8."""
    assert has_varlen_attention((9, 0), torch.bfloat16, 192) and has_varlen_attention((8, 0), torch.float16, 256)
    for capability, dtype, head_dim in (
        (None, torch.bfloat16, 128), ((7, 5), torch.float16, 128), ((9, 0), torch.float32, 128),
        ((9, 0), torch.bfloat16, 264), ((9, 0), torch.bfloat16, 100),
    ):  # fmt: skip
        assert not has_varlen_attention(capability, dtype, head_dim)


@pytest.mark.parametrize(("window", "value_dim"), [(0, 128), (512, 192)])
def test_the_varlen_kernel_of_torch_takes_the_call(monkeypatch, window, value_dim):
    """Its operator's schema and its formula of shapes, forward and backward; nothing is computed."""
    monkeypatch.setattr(Platform, "varlen_attention", lambda self, dtype, head_dim: varlen_attention())
    with FakeTensorMode(allow_non_fake_inputs=True):
        sizes = ((15, 4, 192), (15, 2, 192), (15, 2, value_dim))
        parts = [torch.empty(*size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        packing = packing_of([7, 3, 4, 1], ((0, 0), (0, 7), (0, 7), (0, 0)))
        output = attention(window)(*parts, packed_seq_params=packing)
        gradients = torch.autograd.grad(output.sum(), parts)
    assert output.shape == (15, 4 * value_dim)
    assert [gradient.shape for gradient in gradients] == [torch.Size(size) for size in sizes]


def test_without_heads_that_share_keys_each_gets_its_own(monkeypatch):
    """On a GPU's kernels for fp32."""
    monkeypatch.setattr(Platform, "attention_shares_keys", False)
    query, key, value = random_parts(9, 9)
    assert_close(attention(0)._attend(query, key, value), plain(query, key, value, 0))
