"""One new token a row over a cache of fixed size: PyTorch against whole sequences, Triton against PyTorch."""

import pytest
import torch
from numerics import assert_no_worse_than

from grpo_moe.ops.attention import decode_kernels, sink_attention
from grpo_moe.ops.attention.kv_cache import KVCache, LayerShape, bytes_per_row


def filled(lengths, *, window=None, kv_heads=2, dim=8, value_dim=8, max_length=24, dtype=torch.float64, device="cpu"):
    """A cache of one layer with prompts of these lengths, and those prompts' keys and values."""
    shape = LayerShape(kv_heads, dim, value_dim, window)
    cache = KVCache({3: shape}, len(lengths), max_length, device=device, dtype=dtype)
    rows = torch.arange(len(lengths), device=device)
    lengths = torch.tensor(lengths, device=device)
    width = max(1, int(lengths.max()))
    keys = torch.randn(len(rows), kv_heads, width, dim, dtype=dtype, device=device)
    values = torch.randn(len(rows), kv_heads, width, value_dim, dtype=dtype, device=device)
    cache.load(3, keys, values, rows=rows, sources=rows, lengths=lengths)
    cache.lengths.copy_(lengths)
    return cache, keys, values


def new_token(cache, rows, heads, dtype=torch.float64):
    shape, device = cache.layers[3], cache.lengths.device
    sizes = ((heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
    return [torch.randn(rows, *size, dtype=dtype, device=device)[:, :, None] for size in sizes]


def whole(keys, values, query, window, **options):
    """Attention of one query [heads, 1, D] over all tokens of a row."""
    seen = torch.ones(keys.shape[1], dtype=torch.bool)
    if window is not None:
        seen[:-window] = False
    return sink_attention(query[None], keys[None], values[None], mask=seen[None, None], **options)[0]


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "scale": 0.3}, {"softcap": 0.7}])
def test_steps_equal_attention_over_the_whole_sequence(window, options):
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.randn(4, dtype=torch.float64)
    lengths = [1, 4, 5, 9, 13]
    cache, keys, values = filled(lengths, window=window, value_dim=6)
    assert cache.keys[3].shape[2] == min(window or 24, 24)
    keys, values = ([x[i, :, :n] for i, n in enumerate(lengths)] for x in (keys, values))
    for _ in range(11):
        query, key, value = new_token(cache, 5, 4)
        out = cache.attend(3, query, key, value, **options)
        cache.lengths += 1
        for row in range(5):
            keys[row] = torch.cat([keys[row], key[row]], 1)
            values[row] = torch.cat([values[row], value[row]], 1)
            torch.testing.assert_close(out[row], whole(keys[row], values[row], query[row], window, **options))


def test_rows_are_shared_moved_and_left_alone():
    cache, keys, _ = filled([3, 7, 9], window=5)
    cache.keep(torch.tensor([2, 0]))
    assert cache.lengths[:2].tolist() == [9, 3]
    assert torch.equal(cache.keys[3][0, :, 8 % 5], keys[2, :, 8])
    assert torch.equal(cache.keys[3][1, :, :3], keys[0, :, :3])
    before = cache.keys[3].clone()
    cache.attend(3, *new_token(cache, 2, 4))
    assert torch.equal(cache.keys[3][2], before[2])


def test_bytes_of_a_ring_do_not_grow_with_the_length():
    layers = {0: LayerShape(4, 96, 96, 128), 1: LayerShape(4, 96, 96, None)}
    cache = KVCache(layers, 3, 1000, device="meta", dtype=torch.bfloat16)
    assert cache.nbytes == 3 * bytes_per_row(list(layers.values()), 1000, torch.bfloat16)
    assert cache.nbytes == 3 * 4 * 2 * 96 * 2 * (128 + 1000)


CASES = {
    "one split": {"lengths": [0, 1, 2, 15, 16, 17, 40], "max_length": 41},
    "splits": {"lengths": [0, 3, 70, 129, 200], "max_length": 256, "kv_heads": 1},
    "ring": {"lengths": [0, 3, 15, 16, 17, 90], "window": 16, "max_length": 100},
    "ring of splits": {"lengths": [0, 100, 191, 192, 193], "window": 192, "max_length": 400, "kv_heads": 1},
    "dims": {"lengths": [0, 9, 33], "dim": 24, "value_dim": 20, "kv_heads": 3, "max_length": 40},
}


def compare(case, group, options, dtype, device="cpu", floor=1e-6):
    cache, _, _ = filled(**CASES[case], dtype=dtype, device=device)
    rows, kv_heads = len(cache.lengths), cache.layers[3].kv_heads
    new = new_token(cache, rows, kv_heads * group, dtype)
    if "sinks" in options:
        options = {**options, "sinks": torch.randn(kv_heads * group, dtype=dtype, device=device)}
    buffers = cache.keys[3].clone(), cache.values[3].clone()
    for buffer in buffers:  # beyond a row's tokens there may be anything
        empty = torch.arange(buffer.shape[2], device=device) >= cache.lengths[:, None]
        buffer.masked_fill_(empty[:, None, :, None], torch.nan)
    given = (*(x[:, :, 0] for x in new), *buffers, cache.lengths)
    kernel = {"sinks": None, "scale": cache.layers[3].key_dim ** -0.5, "softcap": None} | options
    out = decode_kernels.decode_attention(*given, **kernel)

    def reference(dtype):
        cache.keys, cache.values = ({3: x[3].to(dtype).cpu()} for x in (cache.keys, cache.values))
        cache.lengths = cache.lengths.cpu()
        moved = {k: v.to(dtype).cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return cache.attend(3, *(x.to(dtype).cpu() for x in new), **moved)[:, :, 0]

    eager, truth = reference(dtype), reference(torch.float64)
    assert_no_worse_than(eager, out.cpu(), truth, floor=floor)
    places = (torch.arange(rows, device=device), slice(None), cache.lengths.to(device) % buffers[0].shape[2])
    assert torch.equal(buffers[0][places], new[1][:, :, 0]) and torch.equal(buffers[1][places], new[2][:, :, 0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"sinks": True, "scale": 0.3}, {"softcap": 0.7}])
def test_triton_equals_pytorch(case, options, monkeypatch):
    monkeypatch.setattr(decode_kernels, "PROGRAMS", 20)
    compare(case, 2, options, torch.float32)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_triton_groups_and_half_precision(group):
    compare("dims", group, {"sinks": True}, torch.float32)
    compare("one split", group, {}, torch.bfloat16, floor=4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "scale": 0.3}, {"softcap": 0.7}])
def test_gpu_kernel_equals_pytorch(dtype, options, monkeypatch):
    cases = {
        **CASES,
        "long": {"lengths": [0, 100, 3000, 4096, 5000], "max_length": 6000, "dim": 128, "value_dim": 128},
        "many": {"lengths": list(range(0, 1024, 4)), "max_length": 1025, "dim": 96, "value_dim": 96, "window": 128},
        "mla": {"lengths": [5, 700], "max_length": 800, "dim": 192, "value_dim": 128, "kv_heads": 4},
    }
    monkeypatch.setitem(globals(), "CASES", cases)
    for case in cases:
        for group in (1, 5, 8):
            compare(case, group, options, dtype, "cuda", floor=2e-3 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 128])
def test_gpu_more_than_2_to_the_31_elements_of_a_cache(rows):
    """Few rows are split among programs; many have a program each."""
    kv_heads, dim, group = 8, 128, 4
    slots = 2**21 // rows + 64
    buffers = [torch.randn(rows, kv_heads, slots, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    assert buffers[0].numel() > 2**31
    lengths = torch.full((rows,), 9, device="cuda")
    lengths[-1] = slots - 1
    query = torch.randn(rows, kv_heads * group, dim, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, rows, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    given = {"sinks": None, "scale": dim**-0.5, "softcap": None}
    out = decode_kernels.decode_attention(query, key, value, *buffers, lengths, **given)
    assert torch.equal(buffers[0][-1, :, -1], key[-1]) and torch.equal(buffers[1][-1, :, -1], value[-1])
    scores = query[-1].view(kv_heads, group, dim).float() @ buffers[0][-1].float().mT * dim**-0.5
    expected = (scores.softmax(-1) @ buffers[1][-1].float()).view(kv_heads * group, dim)
    torch.testing.assert_close(out[-1].float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
