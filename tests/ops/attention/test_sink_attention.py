import torch

from grpo_moe.ops import sink_attention
from grpo_moe.ops.attention import sdpa_sink_attention


def loop_attention(query, key, value, mask, sinks):
    """One head and one query at a time, straight from the definition."""
    batch, heads, queries, dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for t in range(queries):
                seen = mask[b, t].nonzero()[:, 0]
                scores = (key[b, h // group, seen] @ query[b, h, t]) / dim**0.5
                exponentials = scores.exp()
                total = exponentials.sum() + (0 if sinks is None else sinks[h].exp())
                out[b, h, t] = (exponentials[:, None] * value[b, h // group, seen]).sum(0) / total
    return out


def inputs(queries=5, keys=7):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    query, key, value = make(2, 4, queries, 6), make(2, 2, keys, 6), make(2, 2, keys, 6)
    mask = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    return query, key, value, mask.expand(2, -1, -1), make(4)


def test_values_and_gradients_equal_the_definition():
    *qkv, mask, sinks = inputs()
    for with_sinks in (sinks, None):
        leaves = [*qkv, *([sinks] if with_sinks is not None else [])]
        ours = sink_attention(*qkv, mask=mask, sinks=with_sinks)
        theirs = loop_attention(*qkv, mask, with_sinks)
        torch.testing.assert_close(ours, theirs)
        weights = torch.randn_like(ours)
        for a, b in zip(
            torch.autograd.grad((ours * weights).sum(), leaves),
            torch.autograd.grad((theirs * weights).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
            assert a.abs().max() > 0


def test_equals_the_logsumexp_form():
    query, key, value, mask, sinks = inputs()
    scores = torch.einsum("bhtd,bhsd->bhts", query, key.repeat_interleave(2, 1)) / 6**0.5
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    plain = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    rescaled = plain * torch.sigmoid(scores.logsumexp(-1) - sinks[:, None])[..., None]
    torch.testing.assert_close(sink_attention(query, key, value, mask=mask, sinks=sinks), rescaled)


def test_sdpa_form_equals_the_reference():
    query, key, value, mask, sinks = inputs()
    leaves = [query, key, value, sinks]
    weights = torch.randn_like(query)
    made = []
    for out in (
        sdpa_sink_attention(query, key, value, mask=mask[:, None], sinks=sinks, scale=0.3),
        sdpa_sink_attention(query, key, value, sinks=sinks, scale=0.3),  # causal, as the mask is
        sink_attention(query, key, value, mask=mask, sinks=sinks, scale=0.3),
    ):
        made.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, causal, reference in zip(*made, strict=True):
        torch.testing.assert_close(ours, reference)
        torch.testing.assert_close(causal, reference)


def test_a_query_without_keys_is_finite():
    query, key, value, mask, sinks = inputs()
    mask = mask.clone()
    mask[0, 2] = False
    out = sink_attention(query, key, value, mask=mask, sinks=sinks)
    assert torch.equal(out[0, :, 2], torch.zeros_like(out[0, :, 2]))
    assert sink_attention(query, key, value, mask=mask).isfinite().all()


def test_half_precision_keeps_its_dtype_and_stays_close():
    query, key, value, mask, sinks = inputs()
    half = [x.detach().bfloat16() for x in (query, key, value, sinks)]
    out = sink_attention(*half[:3], mask=mask, sinks=half[3])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), sink_attention(query, key, value, mask=mask, sinks=sinks), atol=0.05, rtol=0.05
    )
