import copy
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from moe_families import FAMILIES, tiny_moe
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import grpo_moe  # noqa: F401  registers the experts
from grpo_moe.adapters.hf_experts import activation_of
from grpo_moe.adapters.routing import RoutingReplay
from grpo_moe.ops import moe
from grpo_moe.rl.loading import load_policy
from grpo_moe.rollout.weights import published_weights

IDS = torch.arange(24).reshape(2, 12) % 61 + 3


def logits_and_gradients(model, implementation):
    model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(made, expected, tolerance):
    assert made.keys() == expected.keys()
    for name, x in made.items():
        torch.testing.assert_close(x, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_eager(family):
    model = tiny_moe(family).eval()
    expected = logits_and_gradients(model, "eager")
    assert_same(logits_and_gradients(model, "grpo_moe"), expected, 1e-5)
    with torch.no_grad():
        for module in experts_of(model):
            module.down_proj.zero_()
        assert (model(IDS).logits - expected["logits"]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_kernels_equal_eager(family, monkeypatch):
    """Fused silu, fused GPT-OSS gate with biases in its layout, and another function between the GEMMs."""
    pytest.importorskip("triton")
    model = tiny_moe(family).eval()
    expected = logits_and_gradients(model, "eager")
    monkeypatch.setattr(moe, "_on_gpu", lambda hidden_states: True)
    assert_same(logits_and_gradients(model, "grpo_moe"), expected, 2e-4)


@pytest.mark.parametrize(
    "family, kernels", [("qwen3_moe", False), ("gpt_oss", False), ("nemotron_h", False), ("gpt_oss", True)]
)
def test_halves_of_the_experts_add_up_to_the_whole(family, kernels, monkeypatch):
    """As under expert parallelism: a route to another process has the number of local experts, and weight 0."""
    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(moe, "_on_gpu", lambda hidden_states: True)
    module = experts_of(tiny_moe(family, experts_implementation="grpo_moe"))[0]
    hidden, weights = torch.randn(9, 32, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    index, cotangent = torch.rand(9, 8).topk(2).indices, torch.randn(9, 32)
    index[0] = torch.tensor([1, 2])  # a token that one half alone has
    expected = module(hidden, index, weights)
    wanted = torch.autograd.grad(expected, [hidden, weights, *module.parameters()], cotangent)
    made, parts = 0, []
    for rank in range(2):
        half, away = copy.deepcopy(module), index // 4 != rank
        half.num_experts = 4
        for name, parameter in module.named_parameters():
            setattr(half, name, torch.nn.Parameter(parameter.detach()[4 * rank : 4 * rank + 4]))
        made = made + half(hidden, torch.where(away, 4, index % 4), weights.masked_fill(away, 0))
        parts.append(list(half.parameters()))
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(made, [hidden, weights, *parts[0], *parts[1]], cotangent)
    count = len(parts[0])
    joined = [torch.cat(pair) for pair in zip(found[2 : 2 + count], found[2 + count :], strict=True)]
    for ours, theirs in zip([*found[:2], *joined], wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family, activation, layout", [
    ("mixtral", "silu", "concatenated"),
    ("gpt_oss", "gpt_oss", "interleaved"),
    ("nemotron_h", None, "joint"),
])  # fmt: skip
def test_activations_are_recognised(family, activation, layout):
    found = activation_of(experts_of(tiny_moe(family))[0])
    assert found["layout"] == layout
    assert found["activation"] == activation if activation else callable(found["activation"])


def test_a_gate_of_another_formula_runs_between_the_gemms():
    module = experts_of(tiny_moe("mixtral"))[0]
    module.act_fn = torch.nn.GELU(approximate="tanh")
    assert activation_of(module)["activation"] == "gelu_tanh"
    del module.act_fn  # a submodule, which a function cannot replace
    for act_fn in (F.gelu, F.relu, lambda x: F.silu(x.clamp(max=7))):
        module.act_fn = act_fn
        found = activation_of(module)
        assert found["layout"] == "joint" and callable(found["activation"])
    module.act_fn = F.silu
    assert activation_of(module)["activation"] == "silu"


def test_limits_of_the_gate_are_read_from_the_module():
    module = experts_of(tiny_moe("gpt_oss"))[0]
    for limit, alpha in ((5.0, 1.5), (100.0, 1.702)):
        module.limit, module.alpha = limit, alpha
        found = activation_of(module)
        assert found == {"activation": "gpt_oss", "layout": "interleaved", "alpha": alpha, "limit": limit}


@pytest.mark.parametrize("limits", [(50.0, 7.0), (7.0, 50.0), (100.0, 1000.0)])
def test_a_gate_with_a_number_of_its_own_is_not_taken_for_another(limits):
    """As Glm5Next's: a clamp before silu, with a limit by a name of its own; in place, too."""

    def apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp_(max=self.swiglu_limit)) * up

    module = experts_of(tiny_moe("mixtral"))[0]
    for limit in limits:
        module.swiglu_limit = limit
        module._apply_gate = apply_gate.__get__(module)
        assert activation_of(module)["layout"] == "joint"


def test_a_norm_after_the_experts_is_refused_by_name():
    model = tiny_moe("mixtral", experts_implementation="grpo_moe")
    experts_of(model)[0].has_post_expert_norm = True
    with pytest.raises(ValueError, match="cannot run MixtralExperts: it normalises the output of each expert"):
        model(IDS)


PUBLISHED_NAMES = {
    "qwen3_moe": "model.layers.1.mlp.experts.11.down_proj.weight",
    "olmoe": "model.layers.1.mlp.experts.11.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.11.w1.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.11.gate_proj.weight",
    "glm4_moe": "model.layers.1.mlp.experts.11.gate_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj",
}


@pytest.mark.parametrize("family", PUBLISHED_NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_trained_experts_load_in_transformers_alone(family, tied, tmp_path):
    """With 12 experts, so that their numbers do not sort as text; a tied head stays tied."""
    count = next(n for n in ("num_experts", "n_routed_experts", "num_local_experts") if n in FAMILIES[family][1])
    model = tiny_moe(family, changes={count: 12, "tie_word_embeddings": tied}).eval()
    model.set_experts_implementation("grpo_moe")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert PUBLISHED_NAMES[family] in names and ("lm_head.weight" in names) != tied
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert (plain.lm_head.weight is plain.get_input_embeddings().weight) == tied
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
HUB_EXPERTS = {
    "qwen2_moe": ("mlp", GATE_UP_DOWN),
    "qwen3_moe": ("mlp", GATE_UP_DOWN),
    "qwen3_next": ("mlp", GATE_UP_DOWN),
    "olmoe": ("mlp", GATE_UP_DOWN),
    "deepseek_v3": ("mlp", GATE_UP_DOWN),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "gpt_oss": None,
    "qwen3_5_moe": None,
}
"""The block of the experts in the families' files on the hub and the names of an expert's matrices; None: stacked."""


def hub_state(model, block, names):
    """The tensors of a model as its family's files on the hub hold them, written down by hand."""
    gate, up, down = (f"{name}.weight" for name in names)
    state = {}
    for name, tensor in model.state_dict().items():
        path, _, kind = name.replace(".mlp.", f".{block}.").rpartition(".")
        if kind == "gate_up_proj":
            for number, expert in enumerate(tensor):
                state[f"{path}.{number}.{gate}"], state[f"{path}.{number}.{up}"] = expert.clone().chunk(2)
        elif kind == "down_proj":
            state |= {f"{path}.{number}.{down}": expert.clone() for number, expert in enumerate(tensor)}
        else:
            state[f"{path}.{kind}"] = tensor.clone()
    return state


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", HUB_EXPERTS)
def test_a_file_of_the_hub_comes_back_with_its_names_and_bits(family, tied, tmp_path):
    """Loaded as a policy; then saved, and sent to an engine."""
    count = next(n for n in ("num_experts", "n_routed_experts", "num_local_experts") if n in FAMILIES[family][1])
    model = tiny_moe(family, changes={count: 12, "tie_word_embeddings": tied})
    form = HUB_EXPERTS[family]
    state = {n: x.clone() for n, x in model.state_dict().items()} if form is None else hub_state(model, *form)
    if tied:
        del state["lm_head.weight"]
    save_file({name: x.contiguous() for name, x in state.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path)
    policy, _ = load_policy(str(tmp_path))
    assert policy.config._experts_implementation == "grpo_moe"
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in policy.state_dict().items())
    policy.save_pretrained(tmp_path / "saved")
    for made in (dict(published_weights(policy)), load_file(tmp_path / "saved" / "model.safetensors")):
        assert made.keys() == state.keys()
        assert all(torch.equal(x, state[name]) for name, x in made.items())


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_error_is_at_most_half_more_than_that_of_eager(family):
    """Of logits and gradients against float64, all on the routes of float64; the mean square over eight batches.

    One rounding is allowed besides. Fewer than 64 numbers, as a router's bias, are luck: they count with all others.
    """
    attention = {"attn_implementation": "eager"} if family == "gpt_oss" else {}
    model = tiny_moe(family, **attention).to("cuda", torch.bfloat16)
    squares = defaultdict(lambda: {"eager": 0.0, "grpo_moe": 0.0})

    def made(model, ids, implementation, routes):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        with RoutingReplay(model) as replay:
            with replay.record() as records, nullcontext() if routes is None else replay.replay(routes):
                logits = model(ids, use_cache=False).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"logits": logits.detach()} | grads, records[0]

    for _ in range(8):
        ids = torch.randint(3, 60, (4, 64), device="cuda")
        truth, routes = made(copy.deepcopy(model).double(), ids, "eager", None)
        for implementation in ("eager", "grpo_moe"):
            found, _ = made(model, ids, implementation, routes)
            assert found.keys() == truth.keys()
            for name, x in found.items():
                error = (x.double() - truth[name]).norm() / truth[name].norm().clamp(min=1e-12)
                squares[name][implementation] += float(error**2) / 8
    for name, square in squares.items():
        ours, eager = square["grpo_moe"] ** 0.5, square["eager"] ** 0.5
        lucky = truth[name].numel() < 64
        assert lucky or ours <= 1.5 * eager + 2**-8, f"{name}: {ours:.2e}, eager {eager:.2e}"
    ours, eager = (sum(square[i] for square in squares.values()) ** 0.5 for i in ("grpo_moe", "eager"))
    print(f"all together: {ours:.3e}, eager {eager:.3e}")
    assert 0 < ours <= 1.5 * eager


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "down_proj")]
