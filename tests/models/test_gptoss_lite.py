"""GPT-OSS-Lite against the original's vectors, its caches, checkpointing, and its life as a transformers model."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from grpo_moe import GptOssLiteConfig, GptOssLiteForCausalLM
from grpo_moe.adapters.hf_decode import Decoder
from grpo_moe.models.gptoss_lite import from_original, to_original_state_dict
from grpo_moe.models.gptoss_lite.attention import AttentionMasks
from grpo_moe.models.gptoss_lite.moe import load_balancing_loss
from grpo_moe.models.gptoss_lite.rope import yarn_inverse_frequencies
from grpo_moe.ops.attention import KVCache, LayerShape
from grpo_moe.ops.attention.flex import SINK_ATTENTION, dense_mask

VECTORS = Path(__file__).parents[1] / "data" / "gptoss_lite_parity.safetensors"
CONFIGURATIONS = ("base", "noyarn_untied_nosink", "lite_rope_defaults")
PROMPT = 20  # tokens of the greedy vectors that are prompt


@pytest.fixture(params=CONFIGURATIONS)
def original(request):
    """Configuration, weights and expected tensors of one configuration of the original."""
    name = request.param
    with safe_open(VECTORS, "pt") as file:
        config = json.loads(file.metadata()[name])
        tensors = {k.removeprefix(f"{name}/"): file.get_tensor(k) for k in file.keys() if k.startswith(f"{name}/")}
    weights = {k.removeprefix("state."): v for k, v in tensors.items() if k.startswith("state.")}
    return config, weights, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_aux_loss_equal_the_original(original, dtype):
    config, weights, expected = original
    model = from_original(config, weights).to(dtype).eval()
    with torch.no_grad():
        out = model(expected["input_ids"], output_router_logits=True)
    # The vectors' float64 logits came from float64 weights that the file holds rounded to float32: that rounding alone
    # moves the logits by up to 1e-5 (test_rounding_of_the_stored_weights), so float64 cannot agree further.
    torch.testing.assert_close(out.logits.double(), expected["logits"], rtol=2e-4, atol=1e-4)
    torch.testing.assert_close(out.aux_loss.double(), expected["aux_loss"][0], rtol=1e-6, atol=0)
    if dtype == torch.float64:
        assert (out.logits - expected["logits"]).abs().max() < 1.5e-5


def test_rounding_of_the_stored_weights(original):
    config, weights, expected = original
    exact = {k: v.double() for k, v in weights.items()}
    generator = torch.Generator().manual_seed(0)

    def unrounded(weight):
        ulp = 2.0 ** (weight.abs().clamp(min=1e-30).log2().floor() - 23)
        return weight + (torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 0.5) * ulp

    with torch.no_grad():
        stored = from_original(config, exact)(expected["input_ids"]).logits
        moved = from_original(config, {k: unrounded(v) for k, v in exact.items()})(expected["input_ids"]).logits
    from_vectors = (stored - expected["logits"]).abs().max()
    assert from_vectors < 4 * (stored - moved).abs().max()


def test_inverse_frequencies_equal_the_original(original):
    config, _, expected = original
    frequencies = yarn_inverse_frequencies(
        config["head_dim"],
        config["rope_theta"],
        config["yarn_scale_factor"],
        config["yarn_original_max_seq_len"],
        config["yarn_beta_fast"],
        config["yarn_beta_slow"],
    )
    assert torch.equal(frequencies, expected["inv_freq"])


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_continuation_equals_the_original(original, use_cache):
    config, weights, expected = original
    greedy = expected["greedy"]
    out = from_original(config, weights).generate(
        greedy[:, :PROMPT],
        max_new_tokens=greedy.shape[1] - PROMPT,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
    )
    assert torch.equal(out, greedy)


def test_round_trip_through_the_originals_names(original):
    config, weights, _ = original
    exported = to_original_state_dict(from_original(config, weights))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_a_wrong_original_checkpoint_is_named(original):
    config, weights, _ = original
    with pytest.raises(ValueError, match="left over \\['extra'\\]"):
        from_original(config, {**weights, "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match="missing \\['norm.weight'\\]"):
        from_original(config, {k: v for k, v in weights.items() if k != "norm.weight"})
    with pytest.raises(ValueError, match="unknown \\['d_modell'\\]"):
        from_original({**config, "d_modell": 3}, weights)


def test_parameter_counts_of_the_default():
    with torch.device("meta"):
        model = GptOssLiteForCausalLM(GptOssLiteConfig())
    config = model.config
    assert model.num_parameters() == 501_836_640
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n and "shared" not in n)
    idle = routed * (config.num_experts - config.num_experts_per_tok) // config.num_experts
    assert model.num_parameters() - idle == 247_032_672


def test_saves_and_loads_through_the_auto_classes(tmp_path):
    for tie in (True, False):
        model = tiny_model(tie_word_embeddings=tie)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = torch.randint(0, 30, (2, 9))
        assert type(loaded) is GptOssLiteForCausalLM
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
        assert AutoConfig.from_pretrained(tmp_path).moe_dispatch == "stacked"


def test_experts_go_through_the_interface():
    model = tiny_model()
    assert model.get_experts_implementation() in ("stacked", {"": "stacked"})
    ids = torch.randint(0, 30, (2, 9))
    expected = model(ids).logits
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    model = tiny_model()
    rows = [torch.randint(3, 30, (n,)) for n in (3, 9, 14)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True, padding_side=side)
    out = model(ids, attention_mask=mask, output_router_logits=True)
    assert len(out.router_logits[0]) == 3 + 9 + 14  # padding reaches no router
    for row, logits, real in zip(rows, out.logits, mask.bool(), strict=True):
        torch.testing.assert_close(logits[real], model(row[None]).logits[0], rtol=1e-4, atol=1e-5)


def test_generate_with_left_padding_equals_single_rows():
    model = tiny_model().eval()
    rows = [torch.randint(3, 30, (n,)) for n in (2, 7, 13)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True, padding_side="left")
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, out in zip(rows, together, strict=True):
        assert torch.equal(out, model.generate(row[None], **options)[0, len(row) :])


def test_packed_sequences_do_not_see_each_other():
    model = tiny_model()
    rows = [torch.randint(3, 30, (n,)) for n in (5, 8)]
    positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
    packed = model(torch.cat(rows)[None], position_ids=positions).logits[0]
    torch.testing.assert_close(packed[:5], model(rows[0][None]).logits[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[5:], model(rows[1][None]).logits[0], rtol=1e-4, atol=1e-5)


def test_windows_bind_on_even_layers_only():
    model = tiny_model(num_hidden_layers=1).eval()  # layer 0: a window of 6
    ids = torch.randint(3, 30, (1, 12))
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 27 + 3
    same = ((model(ids).logits - model(changed).logits).abs() < 1e-5).all(-1)[0]
    assert same.tolist() == [False] * 6 + [True] * 6


def test_steps_on_a_kv_cache_equal_the_full_forward_in_rows_of_different_lengths():
    model = tiny_model().double().eval()
    rows = [torch.randint(3, 30, (n,)) for n in (2, 6, 9, 14)]
    ids, lengths = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([2, 6, 9, 14])
    to = {"rows": torch.arange(4), "sources": torch.tensor([2, 0, 3, 1]), "lengths": lengths}
    with torch.no_grad():
        decoder = Decoder(model)
        assert [decoder.layers[i].window for i in (0, 1)] == [6, None]
        cache = KVCache(decoder.layers, 4, 24, device="cpu", dtype=torch.float64)
        decoder.prefill(ids, lengths, lambda layer, *pair: cache.load(layer, *pair, **to))
        cache.lengths.copy_(lengths[to["sources"]])
        assert cache.keys[0].shape[2] == 6 and cache.keys[1].shape[2] == 24
        rows = [rows[i] for i in to["sources"]]
        for _ in range(9):
            new = torch.randint(3, 30, (4,))
            hidden = decoder.forward(new, cache)
            cache.lengths += 1
            rows = [torch.cat([r, n[None]]) for r, n in zip(rows, new, strict=True)]
            expected = torch.stack([model.model(r[None], use_cache=False).last_hidden_state[0, -1] for r in rows])
            torch.testing.assert_close(hidden, expected)


def test_a_static_cache_is_refused():
    with pytest.raises(ValueError, match="static caches are not supported"):
        tiny_model().generate(torch.ones(1, 4, dtype=torch.long), cache_implementation="static", max_new_tokens=2)


def test_a_cache_is_refused_while_gradients_are_checkpointed():
    model = tiny_model()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    with pytest.raises(ValueError, match="cache must be None while gradients are checkpointed"):
        model(torch.ones(1, 4, dtype=torch.long), cache=DynamicCache(config=model.config))


def test_windows_halve_the_memory_of_the_default_model():
    config = GptOssLiteConfig()
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]

    def gib(windows):
        shape = (config.num_key_value_heads, config.head_dim, config.head_dim)
        layers = {i: LayerShape(*shape, window) for i, window in enumerate(windows)}
        return KVCache(layers, 1, 131_072, device="meta", dtype=torch.bfloat16).nbytes / 2**30

    assert gib([None] * 12) / gib(windows) >= 1.9
    assert gib(windows) <= 1.2


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_checkpointing_leaves_gradients_and_wraps_every_gth_block(every, padded, monkeypatch):
    model = tiny_model(grad_ckpt_every=every, num_hidden_layers=6).double().train()
    ids = torch.randint(3, 30, (2, 10))
    mask = torch.ones_like(ids)
    mask[0, 7:] = int(not padded)

    def gradients():
        model.zero_grad()
        out = model(ids, attention_mask=mask, output_router_logits=True)
        (out.logits[mask.bool()].square().mean() + out.aux_loss).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    wrapped = []
    checkpoint = model.model._gradient_checkpointing_func
    monkeypatch.setattr(
        model.model, "_gradient_checkpointing_func", lambda f, *args: wrapped.append(f) or checkpoint(f, *args)
    )
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
        assert gradient.abs().max() > 0, name
    assert len(wrapped) == len(range(0, 6, every))
    wrapped.clear()
    with torch.no_grad():
        model(ids)
    assert not wrapped


def test_a_recompute_keeps_the_routes_of_the_first_pass():
    model = tiny_model(grad_ckpt_every=1, num_hidden_layers=2).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    seen = []
    for block in model.model.layers:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
    loss = model(torch.randint(3, 30, (2, 8))).logits.square().mean()
    with torch.no_grad():
        for block in model.model.layers:  # would route elsewhere if the recompute asked the router again
            block.mlp.gate.weight.mul_(-1)
    loss.backward()
    assert torch.equal(seen[0], seen[3]) and torch.equal(seen[1], seen[2])


def test_aux_loss_is_one_when_balanced_and_counts_valid_tokens_only():
    logits = torch.zeros(8, 4)
    balanced = torch.arange(8).view(8, 1) % 4
    assert load_balancing_loss(logits, balanced) == 1
    collapsed = torch.tensor([[20.0, 0, 0, 0]]).expand(8, -1)
    torch.testing.assert_close(load_balancing_loss(collapsed, torch.zeros(8, 1, dtype=torch.long)), torch.tensor(4.0))
    assert load_balancing_loss(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.long)) == 0

    model = tiny_model()
    ids = torch.randint(3, 30, (1, 6))
    padded, mask = torch.cat([ids, ids], dim=1), torch.tensor([[1] * 6 + [0] * 6])
    short = model(ids, output_router_logits=True).aux_loss
    torch.testing.assert_close(model(padded, attention_mask=mask, output_router_logits=True).aux_loss, short)


def test_labels_give_the_loss_with_the_aux_term():
    model = tiny_model(router_aux_loss_coef=0.5)
    ids = torch.randint(3, 30, (2, 6))
    out = model(ids, labels=ids)
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, plain + 0.5 * out.aux_loss)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 3),
        ("num_experts_per_tok", 9),
        ("head_dim", 7),
        ("moe_dispatch", "nonsense"),
        ("grad_ckpt_every", 0),
        ("sliding_window", 0),
        ("layer_types", ["full_attention"]),
    ],
)
def test_a_wrong_config_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        tiny_config(**{field: value})


def test_triton_grouped_dispatch_equals_stacked():
    pytest.importorskip("triton")
    ids = torch.randint(3, 30, (2, 6))
    models = [tiny_model(moe_dispatch=name) for name in ("stacked", "triton_grouped")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = []
    for model in models:
        out = model.to(device, torch.float32)(ids.to(device), labels=ids.to(device))
        out.loss.backward()
        made.append([out.logits, *(p.grad for p in model.parameters())])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_router_logits_are_float32_under_autocast():
    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randint(3, 30, (1, 6)), output_router_logits=True)
    assert all(logits.dtype == torch.float32 for logits in out.router_logits)
    gate, hidden = model.model.layers[0].mlp.gate, torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        logits, *_ = gate(hidden)
    assert torch.equal(logits, gate(hidden)[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_block_masks_say_what_masks_say(kind, packed):
    lengths = torch.tensor([150, 97, 0])
    order = torch.arange(150).expand(3, -1).masked_fill(torch.arange(150) >= lengths[:, None], -1)
    segments = (torch.arange(150) // 40).expand(3, -1) if packed else None
    plain, blocks = (
        AttentionMasks(order, lambda kind, num_keys: order, 20, segments, blocks=blocks)(kind, 150)
        for blocks in (False, True)
    )
    assert plain.shape == (3, 1, 150, 150) and plain[0].any() and not plain[2].any()
    assert torch.equal(dense_mask(blocks), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flex_attention_trains_as_the_eager_one(layout, checkpointing):
    """fp32 on a GPU, in full size but for the layers: output and every gradient."""
    torch.manual_seed(0)
    config = GptOssLiteConfig(num_hidden_layers=2, vocab_size=512, pad_token_id=0, grad_ckpt_every=2)
    eager = GptOssLiteForCausalLM(config).cuda()
    with torch.no_grad():
        for name, p in eager.named_parameters():
            if "sinks" in name:
                p.normal_()
    flex = copy.deepcopy(eager)
    flex.set_attn_implementation(SINK_ATTENTION)
    ids = torch.randint(3, 512, (2, 300), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, 211:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if layout == "packed":
        positions = torch.cat([torch.arange(190), torch.arange(110), torch.arange(300)]).cuda()
        given, mask = {"input_ids": ids.view(1, -1), "position_ids": positions[None]}, torch.ones_like(ids).view(1, -1)
    made = []
    for model in (eager, flex):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        logits = model(**given, use_cache=False).logits[mask.bool()]
        logits.log_softmax(-1)[:, 5].mean().backward()
        made.append([logits.detach(), *(p.grad for p in model.parameters())])
    for ours, expected in zip(*reversed(made), strict=True):
        assert expected.abs().max() > 0
        assert (ours - expected).norm() <= 2e-3 * expected.norm()
