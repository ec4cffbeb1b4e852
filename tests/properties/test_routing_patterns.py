"""Experts under any routing, and routing records under any mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties.effort import few
from torch.nn import functional as F

from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.ops import moe_experts

H, I = 4, 3  # noqa: E741


@st.composite
def routings(draw, lowest=-1, beyond=0):
    """(E, index [N, K]): repeated experts, skipped slots (-1 and E), idle experts, one for all."""
    tokens, experts, slots = draw(st.integers(0, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    one = st.integers(lowest, experts + beyond)
    flat = draw(st.lists(one, min_size=tokens * slots, max_size=tokens * slots))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return experts, torch.tensor(flat, dtype=dtype).view(tokens, slots)


def tensors(experts: int, index: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)  # noqa: E731
    tokens, slots = index.shape
    return {
        "hidden_states": normal(tokens, H),
        "gate_up_proj": normal(experts, 2 * I, H),
        "down_proj": normal(experts, H, I),
        "top_k_weights": normal(tokens, slots),
        "gate_up_bias": normal(experts, 2 * I),
        "down_bias": normal(experts, H),
    }


def loop(x: dict[str, torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    """Token by token, slot by slot."""
    rows = []
    for n in range(len(index)):
        row = x["hidden_states"][n] * 0
        for k, e in enumerate(index[n].tolist()):
            if 0 <= e < len(x["down_proj"]):
                gate, up = (x["gate_up_proj"][e] @ x["hidden_states"][n] + x["gate_up_bias"][e]).chunk(2)
                out = x["down_proj"][e] @ (F.silu(gate) * up) + x["down_bias"][e]
                row = row + x["top_k_weights"][n, k] * out
        rows.append(row)
    return torch.stack(rows) if rows else x["hidden_states"] * 0


@few(50)
@given(routing=routings(), seed=st.integers(0, 99))
def test_any_routing_gives_output_and_gradients_of_a_loop(routing, seed):
    experts, index = routing
    x = tensors(experts, index, seed)
    results = []
    for out in (moe_experts(**x, top_k_index=index, impl="stacked"), loop(x, index)):
        grads = torch.autograd.grad((out * out.detach().cos()).sum(), list(x.values()), allow_unused=True)
        results.append(
            [out.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, x.values(), strict=True))]
        )
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@few(50)
@given(routing=routings(), seed=st.integers(0, 99), data=st.data())
def test_the_order_of_slots_and_of_tokens_does_not_matter(routing, seed, data):
    experts, index = routing
    x = {name: t.detach() for name, t in tensors(experts, index, seed).items()}
    out = moe_experts(**x, top_k_index=index)
    slots = data.draw(st.permutations(range(index.shape[1])))
    tokens = data.draw(st.permutations(range(len(index))))
    rows = torch.tensor(tokens, dtype=torch.long)
    other = {**x, "top_k_weights": x["top_k_weights"][rows][:, slots], "hidden_states": x["hidden_states"][rows]}
    moved = moe_experts(**other, top_k_index=index[rows][:, slots])
    torch.testing.assert_close(moved, out[rows], rtol=1e-10, atol=1e-12)


@few(80)
@given(routing=routings(lowest=-3, beyond=3), seed=st.integers(0, 9))
def test_an_expert_that_does_not_exist_is_named_and_no_other(routing, seed):
    experts, index = routing
    x = tensors(experts, index, seed)
    if ((index < -1) | (index > experts)).any():
        low, high = int(index.min()), int(index.max())
        with pytest.raises(ValueError, match=rf"top_k_index must be in -1..{experts} .*, got {low}..{high}; .+"):
            moe_experts(**x, top_k_index=index)
    else:
        assert moe_experts(**x, top_k_index=index).isfinite().all()


@st.composite
def records(draw):
    """A record whose entries are K different experts or none."""
    rows, tokens, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    experts = draw(st.integers(1, 5))
    slots = draw(st.integers(1, experts))
    entry = st.one_of(st.just([-1] * slots), st.permutations(range(experts)).map(lambda p: list(p[:slots])))
    flat = draw(st.lists(entry, min_size=rows * tokens * layers, max_size=rows * tokens * layers))
    dtype = draw(st.sampled_from([torch.int16, torch.int32]))
    indices = torch.tensor(flat, dtype=dtype).view(rows, tokens, layers, slots)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)))
    return RoutingRecord(indices, tuple(range(3, 3 + layers)), experts), mask.view(rows, tokens)


@few(60)
@given(made=records(), width=st.integers(1, 6))
def test_records_come_back_from_packing_cutting_and_counting(made, width):
    record, mask = made
    record.check_entries()
    back = record.pack(mask).unpack(mask)
    assert torch.equal(back.indices[mask], record.indices[mask]) and (back.indices[~mask] == -1).all()
    resized = record.resize(width)
    kept = min(width, mask.shape[1])
    assert torch.equal(resized.indices[:, :kept], record.indices[:, :kept]) and (resized.indices[:, kept:] == -1).all()
    load = record.expert_load(mask)
    for layer in range(len(record.layers)):
        chosen = record.indices[mask][:, layer].flatten().tolist()
        assert load[layer].tolist() == [chosen.count(e) for e in range(record.num_experts)]
    halves = [record.rows(slice(0, 1)), record.rows(slice(1, None))]
    assert torch.equal(RoutingRecord.concat_rows(halves).indices, record.indices)


@few(80)
@given(made=records(), place=st.integers(0, 99), wrong=st.sampled_from(["low", "high", "twice", "half"]))
def test_one_wrong_entry_of_a_record_is_named_by_its_place(made, place, wrong):
    record, _ = made
    indices = record.indices.clone()
    rows, tokens, layers, slots = indices.shape
    row, token, layer = place % rows, place % tokens, place % layers
    if wrong in ("twice", "half") and slots < 2:
        return
    entry = torch.arange(slots, dtype=indices.dtype)
    entry[-1] = {"low": -2, "high": record.num_experts, "twice": 0, "half": -1}[wrong]
    indices[row, token, layer] = entry
    with pytest.raises(
        ValueError, match=rf"the entry of layer {record.layers[layer]} must be .+ at row {row}, token {token}; "
    ):
        RoutingRecord(indices, record.layers, record.num_experts).check_entries()
