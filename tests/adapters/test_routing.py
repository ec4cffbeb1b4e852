import copy
import functools
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from moe_families import FAMILIES, SMALL, tiny_moe
from tiny import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from grpo_moe.adapters.hf_head import add_token_logps, completion_logps
from grpo_moe.adapters.routing import RoutingRecord, RoutingReplay, _find_routers, dead_experts, max_violation

IDS = torch.arange(24).reshape(2, 12) % 61 + 3


def alternating_model():
    """Layers dense, MoE, dense, MoE."""
    torch.manual_seed(0)
    own = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16, intermediate_size=64)
    config = Qwen3MoeConfig(**{**SMALL, **own, "num_hidden_layers": 4}, mlp_only_layers=[0, 2], initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config).float()


def family_model(family):
    model = tiny_moe(family)
    for weight in router_weights(model).values():
        if not weight.any():  # Ernie 4.5 of transformers 5.17
            nn.init.normal_(weight, std=0.2)
    for name, bias in model.named_buffers():
        if "correction_bias" in name:  # it moves the choice, and not the weights
            nn.init.normal_(bias, std=0.3)
    return model


def router_weights(model):
    return {n: p for n, p in model.named_parameters() if n.endswith((".gate.weight", ".router.weight"))}


MODELS = {name: functools.partial(family_model, name) for name in FAMILIES} | {
    "gptoss_lite": functools.partial(tiny_model, grad_ckpt_every=1),
    "alternating": alternating_model,
}


@contextmanager
def seen_by_experts(model):
    """Appends (layer, top_k_index) of each call of an experts module, the recompute's included."""
    seen, handles = [], []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            layer = next(int(part) for part in name.split(".") if part.isdigit())
            hook = lambda _, args, layer=layer: seen.append((layer, args[1].clone()))  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
    yield seen
    for handle in handles:
        handle.remove()


def as_record(seen, record):
    """One forward of :func:`seen_by_experts` in the form of ``record``."""
    batch, width = record.indices.shape[:2]
    assert sorted(layer for layer, _ in seen) == list(record.layers)
    return torch.stack([dict(seen)[layer].view(batch, width, -1) for layer in record.layers], 2).to(record.indices)


def drift(model):
    """Moves the router weights, so that tokens choose other experts."""
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in router_weights(model).values():
            weight.add_(torch.randn_like(weight) * 2 * weight.std())


def record_of(model, replay, **inputs):
    with replay.record() as records, torch.no_grad():
        model(**{"input_ids": IDS, "use_cache": False, **inputs})
    return records[0]


def enable_checkpointing(model, kwargs):
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(kwargs)
    return model.train()


def random_record(batch=2, width=5, layers=(1, 3), num_experts=8):
    torch.manual_seed(3)
    indices = torch.rand(batch, width, len(layers), num_experts).argsort(-1)[..., :2]
    return RoutingRecord(indices.to(torch.int16), layers, num_experts)


def loss_of(model, token):
    return model(IDS, use_cache=False).logits.log_softmax(-1)[..., token].mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_record_holds_what_the_routers_computed_and_replays_to_the_same_logits(name, precision):
    model = MODELS[name]().eval().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        with seen_by_experts(model) as seen:
            expected = model(IDS, use_cache=False).logits
        replay = RoutingReplay(model)
        record = record_of(model, replay)
        assert torch.equal(record.indices, as_record(seen, record))
        with replay.replay(record):
            assert torch.equal(model(IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_replay_is_exact_in_forward_and_recompute_and_gradients_equal_those_without_checkpointing(name):
    model = MODELS[name]().train()
    replay = RoutingReplay(model)
    first = record_of(model, replay)
    drift(model)
    natural = record_of(model, replay)
    assert first.flip_rate(natural)[1] > 0.3
    second = first.rows(torch.tensor([1, 0]))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(model, replay.checkpointing_kwargs)
        model.zero_grad()
        with seen_by_experts(model) as seen:
            with replay.replay(first):
                one = loss_of(model, 5)
            with replay.replay(second), replay.record() as records:
                two = loss_of(model, 7)
            three = loss_of(model, 9)
            (one + two + three).backward()
        assert torch.equal(records[0].indices, second.indices)
        calls = len(first.layers)
        passes = [as_record(seen[i : i + calls], first) for i in range(0, len(seen), calls)]
        assert len(passes) == (6 if checkpointing else 3)
        for made, expected in zip(passes, (first, second, natural, natural, second, first), strict=False):
            assert torch.equal(made, expected.indices)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys()
    for parameter, gradient in plain.items():
        scale = gradient.abs().max().item() + 1e-6
        torch.testing.assert_close(recomputed[parameter], gradient, rtol=1e-5, atol=1e-5 * scale)
    assert len(router_weights(model)) == len(first.layers)
    assert all(plain[n].abs().max() > 0 for n in router_weights(model))


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "gptoss_lite"])
def test_missing_entries_route_naturally(name):
    model = MODELS[name]().eval()
    replay = RoutingReplay(model)
    old = record_of(model, replay)
    drift(model)
    natural = record_of(model, replay)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    mixed = RoutingRecord(old.indices.clone(), old.layers, old.num_experts)
    mixed.indices[0] = -1
    with replay.replay(mixed), replay.record() as records, torch.no_grad():
        logits = model(IDS, use_cache=False).logits
    assert torch.equal(records[0].indices[0], natural.indices[0])
    assert torch.equal(records[0].indices[1], old.indices[1])
    torch.testing.assert_close(logits[0], expected[0])
    assert (logits[1] - expected[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "gptoss_lite"])
def test_a_recompute_keeps_the_experts_of_its_forward_when_nothing_is_replayed(name):
    model = MODELS[name]().train()
    replay = RoutingReplay(model)
    enable_checkpointing(model, replay.checkpointing_kwargs)
    with seen_by_experts(model) as seen:
        loss = loss_of(model, 5)
        drift(model)  # as nondeterminism would: the recompute alone would choose others
        loss.backward(retain_graph=True)
        thread = Thread(target=loss.backward)  # as on a GPU, where autograd recomputes in a thread of its own
        thread.start()
        thread.join()
    calls = len(seen) // 3
    forward, again, once_more = (dict(seen[i : i + calls]) for i in range(0, len(seen), calls))
    for layer, chosen in forward.items():
        assert torch.equal(again[layer], chosen) and torch.equal(once_more[layer], chosen)
    natural = record_of(model, replay)
    assert (
        natural.flip_rate(RoutingRecord(as_record(seen[:calls], natural), natural.layers, natural.num_experts))[1] > 0.3
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_that_does_not_know_its_forward_raises(reentrant):
    model = MODELS["qwen3_moe"]()
    enable_checkpointing(model, {"use_reentrant": reentrant})
    with RoutingReplay(model) as replay:
        record = record_of(model, replay)
        with replay.replay(record):
            loss = loss_of(model, 5)
        with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
            loss.backward()
    loss_of(model, 5).backward()  # closed hooks are gone


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "gptoss_lite"])
def test_a_record_made_in_inference_mode_replays_in_training(name, checkpointing):
    model = MODELS[name]().train()
    replay = RoutingReplay(model)
    if checkpointing:
        enable_checkpointing(model, replay.checkpointing_kwargs)
    with torch.inference_mode(), replay.record() as records:
        expected = model(IDS % 27 + 3, use_cache=False).logits
    with replay.replay(records[0]):
        logits = model(IDS % 27 + 3, use_cache=False).logits
    torch.testing.assert_close(logits, expected)
    logits.square().mean().backward()
    assert all(p.grad.count_nonzero() for p in router_weights(model).values())


def softmax_or_sigmoid(name, logits):
    scores = logits.sigmoid() if name == "deepseek_v3" else logits.softmax(-1)
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", ["alternating", "deepseek_v3", "mixtral", "gptoss_lite"])
def test_probabilities_are_summed_by_layer_with_their_gradient(name):
    """Dense layers before, between and after neither count nor stop the others; a replay changes none of it."""
    model = MODELS[name]().train()
    replay, mask = RoutingReplay(model), torch.arange(12) < torch.tensor([[5], [12]])
    record, logits = record_of(model, replay, input_ids=IDS % 27 + 3), {}
    for layer, (_, router) in _find_routers(model.base_model).items():
        router.register_forward_hook(lambda _, args, out, layer=layer: logits.update({layer: out[0]}))
    with replay.replay(record.rows(torch.tensor([1, 0]))), replay.sum_probabilities(mask) as sums:
        model(IDS % 27 + 3, use_cache=False)
    expected = [softmax_or_sigmoid(name, logits[n].view(2, 12, -1)[mask]).sum(0) for n in replay.layers]
    assert len(expected) == {"alternating": 2, "deepseek_v3": 1, "mixtral": 2, "gptoss_lite": 4}[name]
    torch.testing.assert_close(sums[0], torch.stack(expected))
    weights = torch.randn_like(sums[0])
    routers = list(router_weights(model).values())
    for made, wanted in zip(
        torch.autograd.grad((sums[0] * weights).sum(), routers, retain_graph=True),
        torch.autograd.grad((torch.stack(expected) * weights).sum(), routers),
        strict=True,
    ):
        assert wanted.count_nonzero()
        torch.testing.assert_close(made, wanted)


def test_hooks_stay_with_the_modules_they_were_put_on():
    """A decoder that was thrown away is heard no more, and its successor not before it has hooks of its own."""
    model = tiny_moe("qwen3_moe").eval()
    replay = RoutingReplay(model)
    record = record_of(model, replay)
    twin = copy.deepcopy(model)
    with replay.record() as records:
        record_of(twin, RoutingReplay(twin))
        with pytest.raises(ValueError, match=r"a forward of the model must run inside record\(\), got none"):
            record_of(twin, replay)
        record_of(model, replay)
    assert len(records) == 1 and torch.equal(records[0].indices, record.indices)
    model.model = type(model.model)(model.config)  # built, thrown away, built again
    model.model = twin.model
    with pytest.raises(ValueError, match=r"got no forward for layers \[0, 1\].* with a new RoutingReplay"):
        with replay.replay(record):
            model(IDS, use_cache=False)
    fresh = RoutingReplay(model)
    assert fresh.layers == (0, 1) and torch.equal(record_of(model, fresh).indices, record.indices)
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    assert RoutingReplay(model).layers == (0, 1)


def test_a_router_outside_of_the_layers_is_refused():
    """As of a head that predicts several tokens: its layer has a number that the decoder's has too."""
    model = tiny_moe("qwen3_moe")
    model.model.mtp = nn.ModuleList([copy.deepcopy(model.model.layers[0])])
    with pytest.raises(ValueError, match=r"mtp.0.mlp .*a layer number of its own, got .* layer 0; not supported"):
        RoutingReplay(model)


def test_layers_are_numbered_as_in_the_model():
    model = alternating_model()
    replay = RoutingReplay(model)
    assert replay.layers == (1, 3)
    assert record_of(model, replay).layers == (1, 3)
    assert RoutingReplay(tiny_moe("deepseek_v3")).layers == (1,)


def test_records_that_do_not_fit_raise():
    model = alternating_model()
    replay = RoutingReplay(model)
    record = record_of(model, replay)

    def refuse(record, match, call=True):
        with pytest.raises(ValueError, match=match), torch.no_grad(), replay.replay(record):
            if call:
                model(IDS, use_cache=False)

    changed = lambda **values: RoutingRecord(**{**vars(record), **values})  # noqa: E731
    refuse(changed(indices=record.indices[:, :, :1], layers=(1,)), r"none for layers \[3\]")
    refuse(changed(indices=record.indices[:, :, [0, 1, 1]], layers=(1, 3, 5)), r"left-over layers \[5\]")
    refuse(record.resize(11), r"\[2, 12\] as the forward, got \[2, 11\]")
    refuse(changed(indices=record.indices[..., :1]), "K = 2 of E = 8 experts in layer 1, got K = 1")
    refuse(changed(num_experts=9), "got K = 2 of E = 9")
    refuse(record, "no forward for layers", call=False)
    for entry in ([0, 8], [-2, 1], [3, 3], [-1, 2]):
        broken = changed(indices=record.indices.clone())
        broken.indices[1, 4, 1] = torch.tensor(entry)
        refuse(broken, f"entry of layer 3 .*got \\[{entry[0]}, {entry[1]}\\] at row 1, token 4")
    for wrong in (dict(layers=(3, 1)), dict(layers=(1,)), dict(indices=record.indices.long())):
        with pytest.raises(ValueError, match="must be"):
            changed(**wrong)
    with replay.replay(record), torch.no_grad():  # errors left no state behind
        model(IDS, use_cache=False)


def test_a_layer_that_no_router_consumed_raises():
    model = alternating_model()
    replay = RoutingReplay(model)
    record = record_of(model, replay)
    model.model.layers[3].mlp = nn.Identity()
    with pytest.raises(ValueError, match=r"layers \[3\] must run once"), replay.replay(record):
        model(IDS, use_cache=False)


class SquaredRouter(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, hidden_states):
        logits, weights, index = self.router(hidden_states)
        return logits, weights.square(), index


def test_models_that_cannot_be_replayed_are_refused_by_name():
    model = tiny_moe("qwen3_moe")
    model.model.layers[1].mlp.gate = SquaredRouter(model.model.layers[1].mlp.gate)
    with pytest.raises(ValueError, match=r"layers.1.mlp.gate \(SquaredRouter\)"):
        record_of(model, RoutingReplay(model))
    model.model.layers[1].mlp.gate = model.model.layers[1].mlp.gate.router
    nn.init.zeros_(model.model.layers[1].mlp.gate.weight)
    with pytest.raises(ValueError, match="layers.1.mlp.gate must tell its rule"):
        record_of(model, RoutingReplay(model))
    del model.model.layers[1].mlp.gate
    with pytest.raises(ValueError, match="Qwen3MoeSparseMoeBlock"):
        RoutingReplay(model)
    model.model.layers[0].mlp = model.model.layers[1].mlp = nn.Identity()
    with pytest.raises(ValueError, match="none in Qwen3MoeModel"):
        RoutingReplay(model)
    with pytest.raises(ValueError, match="got Linear"):
        RoutingReplay(nn.Linear(2, 2))


def test_tokens_that_a_router_does_not_see_have_no_record_and_replay():
    """GPT-OSS-Lite routes no padding."""
    model = MODELS["gptoss_lite"]().eval()
    replay = RoutingReplay(model)
    mask = torch.ones_like(IDS)
    mask[0, 7:] = 0
    ids = IDS % 27 + 3
    record = record_of(model, replay, input_ids=ids, attention_mask=mask)
    assert torch.equal((record.indices >= 0).all(-1), mask.bool()[..., None].expand(-1, -1, 4))
    drift(model)
    with replay.replay(record), replay.record() as records:
        model(ids, attention_mask=mask)
    assert torch.equal(records[0].indices, record.indices)


def test_generation_records_all_but_the_last_token():
    model = tiny_moe("qwen3_moe").eval()
    replay = RoutingReplay(model)
    padded, mask = IDS[:, :6].clone(), torch.ones(2, 6, dtype=torch.long)
    padded[0, :2] = mask[0, :2] = 0  # left
    with replay.record() as records:
        out = model.generate(
            padded, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert [r.indices.shape[1] for r in records] == [6, 1, 1, 1, 1]
    rollout = RoutingRecord.concat_steps(records).resize(out.shape[1])
    assert (rollout.indices[:, -1] == -1).all() and (rollout.indices[:, :-1] >= 0).all()

    left = torch.cat([mask, torch.ones(2, 5)], 1).bool()
    right = left.flip(1)
    ids = torch.zeros_like(out).masked_scatter(right, out[left])
    expected = record_of(model, replay, input_ids=ids, attention_mask=right.long())
    rollout = rollout.pack(left).unpack(right)
    by_layer, any_layer = rollout.flip_rate(expected, right)
    assert by_layer.tolist() == [0, 0] and any_layer == 0
    assert (rollout.indices[~right] == -1).all()


def test_packed_tokens_replay_the_record_of_the_padded_batch():
    model = tiny_moe("qwen3_moe").eval()
    replay = RoutingReplay(model)
    mask = torch.arange(12) < torch.tensor([[8], [12]])
    packed = record_of(model, replay, attention_mask=mask.long()).pack(mask)
    positions = torch.arange(12).expand(2, -1)[mask][None]
    drift(model)
    with replay.replay(packed), replay.record() as records, torch.no_grad():
        model(IDS[mask][None], position_ids=positions, use_cache=False)
    assert records[0].indices.shape == (1, 20, 2, 2)
    assert torch.equal(records[0].indices, packed.indices)


def test_micro_batches_of_log_probabilities_record_and_replay_like_the_batch():
    """R2: the pass of old log-probabilities records, the loss replays, with other micro-batches."""
    model = add_token_logps(tiny_moe("mixtral").train())
    replay = RoutingReplay(model)
    lengths = torch.tensor([12, 7, 9, 10])
    ids = torch.cat([IDS, IDS.flip(0)])
    mask = torch.arange(12) < lengths[:, None]

    def run(rows):
        width = int(lengths[rows].max())
        prompts = torch.full((len(rows),), 3)
        drawn = (torch.arange(width - 3) < lengths[rows, None] - 3).bool()
        return completion_logps(
            model,
            input_ids=ids[rows, :width],
            attention_mask=mask[rows, :width],
            prompt_lengths=prompts,
            completion_ids=ids[rows, 3:width],
            completion_mask=drawn,
        ).logps

    order = torch.tensor([1, 2, 3, 0])
    with replay.record() as records, torch.no_grad():
        for rows in order.split(2):
            run(rows)
    record = RoutingRecord.concat_rows(records).rows(order.argsort())
    assert record.indices.shape == (4, 12, 2, 2)
    drift(model)
    rows = torch.tensor([3, 1, 2])
    with replay.replay(record.rows(rows).resize(10)), replay.record() as records:
        run(rows).sum().backward()
    assert records[0].flip_rate(record.rows(rows).resize(10), mask[rows, :10])[1] == 0
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 0


def test_a_ddp_model_records_and_replays(tmp_path):
    model = tiny_moe("qwen3_moe").train()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped, loss = nn.parallel.DistributedDataParallel(model), None
        replay = RoutingReplay(wrapped)
        enable_checkpointing(model, replay.checkpointing_kwargs)
        record = record_of(wrapped, replay)
        drift(model)
        with seen_by_experts(model) as seen:
            with replay.replay(record):
                loss = loss_of(wrapped, 5)
            loss.backward()
        for made in (seen[:2], seen[2:]):
            assert torch.equal(as_record(made, record), record.indices)
    finally:
        del wrapped, loss  # before the group: its last user may not free it while gloo's threads wait for Python
        torch.distributed.destroy_process_group()


def test_records_are_cut_like_tokens():
    record = random_record()
    assert torch.equal(record.rows(torch.tensor([1])).indices, record.indices[1:])
    assert torch.equal(record.rows(slice(0, 1)).indices, record.indices[:1])
    assert torch.equal(record.resize(3).indices, record.indices[:, :3])
    longer = record.resize(7).indices
    assert torch.equal(longer[:, :5], record.indices) and (longer[:, 5:] == -1).all()
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    packed = record.pack(mask)
    assert torch.equal(packed.indices[0], torch.cat([record.indices[0, :2], record.indices[1, :4]]))
    padded = packed.unpack(mask).indices
    assert torch.equal(padded[mask], record.indices[mask]) and (padded[~mask] == -1).all()
    with pytest.raises(ValueError, match="token_mask must hold"):
        packed.unpack(mask[:1])
    rows = RoutingRecord.concat_rows([record.resize(3), record])
    assert torch.equal(rows.indices, torch.cat([record.resize(3).resize(5).indices, record.indices]))
    steps = RoutingRecord.concat_steps([record.resize(4), record.resize(1)])
    assert torch.equal(steps.indices, torch.cat([record.indices[:, :4], record.indices[:, :1]], 1))
    with pytest.raises(ValueError, match="same layers, E and K"):
        RoutingRecord.concat_rows([record, random_record(layers=(1, 4))])


def test_metrics_equal_values_by_hand():
    def record(tokens):  # one row, two layers, K = 2
        return RoutingRecord(torch.tensor([tokens], dtype=torch.int16), (1, 3), 4)

    one = record([[[0, 1], [2, 3]], [[0, 2], [1, 0]], [[1, 0], [2, 1]], [[-1, -1], [-1, -1]], [[3, 2], [3, 2]]])
    two = record([[[1, 0], [3, 2]], [[0, 3], [1, 2]], [[0, 1], [2, 3]], [[0, 1], [0, 1]], [[0, 1], [0, 1]]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    by_layer, any_layer = one.flip_rate(two, mask)  # the order of experts does not count, nor -1, nor masked tokens
    torch.testing.assert_close(by_layer, torch.tensor([1 / 3, 2 / 3]))
    torch.testing.assert_close(any_layer, torch.tensor(2 / 3))
    assert one.flip_rate(one)[1] == 0
    assert one.flip_rate(two, torch.zeros(1, 5))[1].isnan()

    load = one.expert_load(mask)
    assert load.tolist() == [[3, 2, 1, 0], [1, 2, 2, 1]]
    assert one.expert_load().tolist() == [[3, 2, 2, 1], [1, 2, 3, 2]]
    assert dead_experts(load).tolist() == [1, 0]
    torch.testing.assert_close(max_violation(load), torch.tensor([1.0, 1 / 3]))
    with pytest.raises(ValueError, match="resize"):
        one.flip_rate(two.resize(3))
