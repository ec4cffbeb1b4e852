"""Memory plans: against what autograd keeps of tiny models, peaks measured on an H200, sums by hand, and each other."""

import gc
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from moe_families import FAMILIES, SMALL
from tiny import tiny_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from grpo_moe import GptOssLiteConfig
from grpo_moe.adapters import hf_experts  # noqa: F401  registers "stacked"
from grpo_moe.adapters.routing import RoutingReplay
from grpo_moe.planning import (
    GPUS,
    PRESETS,
    ModelShape,
    RunShape,
    assert_fits_in_available_gpu,
    choose_checkpointing,
    estimate_model_memory_gb,
    largest_completion,
    largest_micro_batch,
    parse_gpus,
    plan_memory,
    preset_config,
)
from grpo_moe.planning.activations import kv_bytes
from grpo_moe.planning.phases import Phases

GIB = 2**30
H200 = GPUS["H200"]
RUN = RunShape(micro_batch=8, prompt_tokens=128, completion_tokens=512, prompts_per_rollout=8, num_generations=8)
RESULTS = Path(__file__).parents[2] / "benchmark" / "results" / "h200.jsonl"
ROWS, TOKENS = 3, 40


def shape_of(name, layers=None):
    config = preset_config(name)
    if layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("tokens", "overhead", "values"),
    [
        (4096, 2.0, (20.7279, 18.0561, 17.1654, 16.7201)),
        (4096, 13.6, (32.3279, 29.6561, 28.7654, 28.3201)),
        (16_384, 2.0, (54.4779, 43.7904, 40.2279, 38.4467)),
        (16_384, 13.6, (66.0779, 55.3904, 51.8279, 50.0467)),
    ],
)
def test_heuristic_of_gpt_oss_lite_number_for_number(tokens, overhead, values):
    for period, value in zip((None, 2, 3, 4), values, strict=True):
        assert round(heuristic(tokens=tokens, overhead_gb=overhead, checkpoint_period=period), 4) == value


def heuristic(**changes):
    lite = dict(num_parameters=501_836_640, num_layers=12, hidden_size=768, intermediate_size=1536, kv_heads=4)
    lite |= dict(head_dim=96, batch=8, tokens=4096, window=128, windowed_layers=6, overhead_gb=2.0)
    return estimate_model_memory_gb(**{**lite, **changes})


def test_heuristic_in_steady_state_keeps_the_window_alone():
    saved = 2 * 4 * 96 * 2 * 8 * 6 * (4096 - 128) / GIB
    assert heuristic() - heuristic(steady_state=True) == pytest.approx(saved)
    assert heuristic(tokens=64, windowed_layers=12) - heuristic(tokens=64, windowed_layers=0) == pytest.approx(
        2 * 4 * 96 * 2 * 8 * 12 * (128 - 64) / GIB
    )


def test_heuristic_takes_its_overhead_from_the_gpu(monkeypatch):
    bare = heuristic(overhead_gb=0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert heuristic(overhead_gb=None) == bare + 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for total, overhead in ((10, 2.0), (50, 8.5), (140, 13.7)):
        properties = type("Properties", (), {"total_memory": total * GIB})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert heuristic(overhead_gb=None) == pytest.approx(bare + overhead)


def test_a_job_must_leave_a_margin_of_two_gib(monkeypatch):
    assert_fits_in_available_gpu(78.0, available_gb=80.0)
    with pytest.raises(ValueError, match=r"required_gb must be at most 78.00 \(80.00 GiB free .*, got 78.01; shorten"):
        assert_fits_in_available_gpu(78.01, available_gb=80.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="available_gb must be given without a GPU"):
        assert_fits_in_available_gpu(1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * GIB, 80 * GIB))
    assert_fits_in_available_gpu(8.0)
    with pytest.raises(ValueError, match="10.00 GiB free"):
        assert_fits_in_available_gpu(8.1)


# what autograd keeps


def tiny(family, checkpointing):
    torch.manual_seed(0)
    options = {"experts_implementation": "stacked"}
    if family == "gptoss_lite":
        model = AutoModelForCausalLM.from_config(tiny_config(grad_ckpt_every=3))
    else:
        kind, own = FAMILIES[family]
        types = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gpt_oss" else {}
        config = getattr(transformers, kind)(**{**SMALL, **own, "num_hidden_layers": 4, **types})
        attention = "eager" if family == "gpt_oss" else "sdpa"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **options)
    if checkpointing:  # as the trainer does it
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable(RoutingReplay(model).checkpointing_kwargs)
    return model.train()


def kept_bytes(model, autocast):
    """Of all storages that are there after a forward of the base model and were not before, its result apart."""
    before = {x.untyped_storage()._cdata: x for x in tensors()}
    seen = {}

    def pack(x):
        seen[x.untyped_storage()._cdata] = x
        return x

    ids = torch.randint(3, 30, (ROWS, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    gc.collect()
    seen |= {x.untyped_storage()._cdata: x for x in tensors()}
    left_out = before.keys() | {out.untyped_storage()._cdata}
    return sum(x.untyped_storage().nbytes() for storage, x in seen.items() if storage not in left_out)


def tensors():
    """All there are, but for states of generators, which checkpointing keeps."""
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return [x for x in found if x.dtype != torch.uint8]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "autocast", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["gptoss_lite", "qwen3_moe", "gpt_oss"])
def test_activations_are_what_autograd_keeps(family, precision, checkpointing):
    model = tiny(family, checkpointing)
    model = model.bfloat16() if precision == "bf16" else model
    measured = kept_bytes(model, precision == "autocast")
    run = RunShape(
        micro_batch=ROWS,
        prompt_tokens=TOKENS - 8,
        completion_tokens=8,
        prompts_per_rollout=1,
        num_generations=2,
        checkpoint_period=(3 if family == "gptoss_lite" else 1) if checkpointing else None,
        bf16=precision == "autocast",
        weight_bytes=2 if precision == "bf16" else 4,
        padded=False,
        attention="eager" if family == "gpt_oss" else None,
        experts="stacked",
    )
    moment = Phases(ModelShape.from_config(model.config), run, H200, 1, "none")._moments()[1]
    predicted = sum(moment.values()) - moment["head"]
    print(f"{family} {precision} checkpointing={checkpointing}: {predicted / measured:.4f} of {measured} bytes")
    assert predicted == pytest.approx(measured, rel=0.03)


class PeakOfStorages(TorchDispatchMode):
    """The most bytes that results of operations have held at once, those of ``skip`` apart."""

    def __init__(self, skip):
        super().__init__()
        self.skip, self.live, self.peak = skip, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.live = {key: x for key, x in self.live.items() if not x[0].expired()}
        for storage in [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]:
            if storage._cdata not in self.skip:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("period", [None, 1, 2])
def test_peak_of_the_backward_pass_with_scores_in_memory(period, autocast):
    sizes = dict(hidden_size=64, head_dim=16, num_attention_heads=8, num_key_value_heads=4, sliding_window=128)
    model = AutoModelForCausalLM.from_config(tiny_config(**sizes, grad_ckpt_every=period or 1)).train()
    if period:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    skip = {p.untyped_storage()._cdata for p in model.parameters()}
    with PeakOfStorages(skip) as measured:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = model.base_model(input_ids=torch.randint(3, 30, (1, 400)), use_cache=False).last_hidden_state
        measured.peak = 0
        out.sum().backward()
    run = replace(RUN, micro_batch=1, prompt_tokens=392, completion_tokens=8, checkpoint_period=period, bf16=autocast)
    shape = ModelShape.from_config(model.config)
    moments = Phases(shape, replace(run, experts="stacked"), H200, 1, "none")._moments()[2:]
    predicted = max(sum(moment.values()) for moment in moments)
    print(f"every {period}, autocast={autocast}: {predicted / measured.peak:.4f} of {measured.peak} bytes")
    assert predicted == pytest.approx(measured.peak, rel=0.03)


def test_the_attention_that_the_configuration_names_is_planned():
    config = preset_config("gptoss-lite")
    run = replace(RUN, completion_tokens=4096)
    scores, flex = (plan_memory(config, replace(run, attention=x), H200).peak_bytes for x in ("eager", "flex"))
    assert plan_memory(config, run, H200).peak_bytes == scores > 2 * flex
    config._attn_implementation = "grpo_moe_sinks"
    assert plan_memory(config, run, H200).peak_bytes == flex
    assert plan_memory(config, replace(run, attention="eager"), H200).peak_bytes == scores


def test_padding_costs_sdpa_repeated_keys_and_values():
    shape = shape_of("qwen3-30b-a3b", 4)
    extra = Phases(shape, RUN, H200, 1, "none")._blocks(8, 640)[0].saved["attention"]
    extra -= Phases(shape, replace(RUN, padded=False), H200, 1, "none")._blocks(8, 640)[0].saved["attention"]
    assert extra == 8 * 640 * 2 * 2 * (32 - 4) * 128


def test_a_packed_row_has_scores_of_all_its_tokens():
    shape = shape_of("gptoss-lite")
    rows, packed = (Phases(shape, replace(RUN, padding_free=x), H200, 1, "none") for x in (False, True))
    scores = [phases._blocks(*phases.batch)[0].saved["attention"] for phases in (rows, packed)]
    assert scores[1] - scores[0] == (8 * (4 + 2) + 1) * 8 * 640 * 7 * 640  # softmax, rounded, mask
    flex = [replace(RUN, padding_free=x, attention="flex") for x in (False, True)]
    assert plan_memory(shape, flex[0], H200) == plan_memory(shape, flex[1], H200)


@pytest.mark.parametrize("experts", [False, True])
def test_lora_keeps_what_its_adapters_read(experts):
    peft = pytest.importorskip("peft")
    model = tiny("qwen3_moe", False)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, target_parameters=names))
    run = replace(RUN, micro_batch=ROWS, prompt_tokens=TOKENS - 8, completion_tokens=8, lora_rank=4, padded=False)
    run = replace(run, lora_experts=experts)
    phases = Phases(ModelShape.from_config(model.config), replace(run, bf16=False, experts="stacked"), H200, 1, "none")
    assert phases.lora == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    moment = phases._moments()[1]
    measured = kept_bytes(model, False)
    # the first block's input has no gradient: it keeps a little less than the others
    assert measured <= sum(moment.values()) - moment["head"] <= 1.05 * measured


# what was measured on an H200


def measured_lines(op, impl):
    if not RESULTS.exists():
        pytest.skip("no measurements beside the package")
    lines = map(json.loads, RESULTS.read_text().splitlines())
    return [x for x in lines if x.get("op") == op and x.get("impl") == impl]


BENCHED = {"qwen3": "qwen3-30b-a3b", "qwen3_12": "qwen3-30b-a3b", "qwen3_24": "qwen3-30b-a3b"}
BENCHED |= {"gpt_oss": "gpt-oss-20b", "gptoss_lite": "gptoss-lite"}


def test_forward_and_backward_are_near_the_measured_peaks():
    lines = measured_lines("train_step", "ours")
    assert {x["shape"] for x in lines} == {"qwen3", "gpt_oss"}
    for x in lines:
        run = replace(
            RUN, micro_batch=x["B"], prompt_tokens=x["T"] - x["completion"], completion_tokens=x["completion"]
        )
        shape = shape_of(BENCHED[x["shape"]], x["layers"])
        moments = Phases(shape, replace(run, weight_bytes=2, padded=False), H200, 1, "none")._moments()
        peak = max(sum(moment.values()) for moment in moments) / GIB
        print(f"{x['shape']}: {peak:.2f} GiB predicted, {x['peak_gib']:.2f} measured")
        assert peak == pytest.approx(x["peak_gib"], rel=0.05)


def test_rollouts_are_near_the_measured_peaks():
    lines = measured_lines("rollout", "native")
    assert {x["shape"] for x in lines} == {"gptoss_lite", "qwen3_12", "qwen3_24"}
    for x in lines:
        run = replace(RUN, prompt_tokens=x["prompt"], completion_tokens=x["new_tokens"], weight_bytes=2)
        run = replace(run, prompts_per_rollout=x["batch"], num_generations=1)
        plan = plan_memory(shape_of(BENCHED[x["shape"]], x["layers"]), run, H200)
        own = plan.allocated_bytes("rollout") - plan.phases["rollout"]["weights"] - plan.phases["rollout"]["optimizer"]
        print(f"{x['shape']}: {own / GIB:.2f} GiB predicted, {x['peak_gib']:.2f} measured")
        assert plan.rollout_rows == x["batch"]
        assert plan.phases["rollout"]["kv_cache"] / GIB == pytest.approx(x["kv_gib"], rel=0.01)
        assert own / GIB == pytest.approx(x["peak_gib"], rel=0.1)


# sums by hand


def test_presets_have_the_published_numbers_of_parameters():
    published = (501_836_640, 30_532_122_624, 20_914_757_184, 116_829_156_672, 6_919_161_856)
    assert [shape_of(name).total_parameters for name in PRESETS] == list(published)


def test_states_of_qwen3_are_sixteen_bytes_a_parameter():
    parameters = 30_532_122_624
    phase = plan_memory(preset_config("qwen3-30b-a3b"), RUN, H200).phases["optimizer_step"]
    assert phase["weights"] == phase["gradients"] == 4 * parameters and phase["optimizer"] == 8 * parameters
    assert set(phase) == {"weights", "gradients", "optimizer", "slack", "context"}  # a fused AdamW needs no more


def test_keys_and_values_of_gpt_oss_lite_by_hand():
    shape = ModelShape.from_config(GptOssLiteConfig())
    assert kv_bytes(shape, 131_072, 2) == 6 * (131_072 + 128) * 2 * 4 * 96 * 2
    assert round(kv_bytes(shape, 131_072, 2) / GIB, 2) == 1.13
    run = replace(RUN, prompt_tokens=128, completion_tokens=131_072 - 128)
    plan = plan_memory(shape, replace(run, micro_batch=1, prompts_per_rollout=1, num_generations=2), H200)
    assert plan.phases["rollout"]["kv_cache"] == 2 * kv_bytes(shape, 131_072, 2)


def test_a_rollout_takes_turns_where_memory_ends():
    shape = shape_of("gptoss-lite")
    run = replace(RUN, prompts_per_rollout=64, completion_tokens=32_000 - 128)
    plan = plan_memory(shape, run, H200)
    assert plan.wanted_rows == 512 and 0 < plan.rollout_rows < 512
    assert plan.bytes_of("rollout") <= H200.memory_bytes
    per_row = plan.phases["rollout"]["kv_cache"] / plan.rollout_rows
    assert per_row == kv_bytes(shape, 32_000, 2)


def test_lora_has_states_of_adapters_alone():
    shape = shape_of("qwen3-30b-a3b")
    run = replace(RUN, lora_rank=16)
    full, lora = (plan_memory(shape, x, H200).phases["optimizer_step"] for x in (RUN, run))
    adapters = 48 * 16 * (4 * 2048 + 4096 + 512 + 512 + 4096)
    assert lora["gradients"] == lora["lora"] == 4 * adapters and lora["optimizer"] == 8 * adapters
    assert lora["weights"] == full["weights"]
    head = [plan_memory(shape, x, H200).phases["forward_backward"].get("head", 0) for x in (RUN, run)]
    assert head[1] > 0 and "reference" not in plan_memory(shape, replace(run, reference=True), H200).phases["rollout"]


def test_adapted_experts_are_folded_for_a_rollout():
    shape = shape_of("qwen3-30b-a3b")
    run = replace(RUN, lora_rank=16, weight_bytes=2, checkpoint_period=1)
    attention, experts = (plan_memory(shape, replace(run, lora_experts=x), H200) for x in (False, True))
    assert experts.phases["rollout"]["folded_lora"] == 2 * shape.parameters["experts"]
    block = 2 * shape.blocks[0].parameters["experts"]
    moments = Phases(shape, replace(run, lora_experts=True), H200, 1, "none")._moments()
    plain = Phases(shape, run, H200, 1, "none")._moments()
    more = moments[2]["temporaries"] - plain[2]["temporaries"]
    assert block < more <= 2 * block + 8 * 640 * 8 * 2 * 768  # of one block: folded, and their gradient at its moment
    assert attention.phases["rollout"].get("folded_lora", 0) == 0


def test_a_reference_is_a_second_copy_of_the_weights():
    shape = shape_of("gptoss-lite")
    plan = plan_memory(shape, replace(RUN, reference=True), H200)
    assert all(phase["reference"] == 4 * shape.total_parameters for phase in plan.phases.values())
    assert "old_logps" in plan.phases and "old_logps" not in plan_memory(shape, RUN, H200).phases


# against each other


def test_states_are_shared_out_as_the_sharding_says():
    shape = shape_of("olmoe-1b-7b")
    parameters = shape.total_parameters

    def states(num_gpus, sharding):
        phase = plan_memory(shape, RUN, H200, num_gpus, sharding).phases["optimizer_step"]
        return [phase.get(name, 0) / parameters for name in ("weights", "master_copy", "gradients", "optimizer")]

    assert states(1, "none") == states(8, "ddp") == [4, 0, 4, 8]
    assert states(8, "fsdp2") == pytest.approx([0.5, 0, 0.5, 1], rel=1e-6)
    assert states(8, "zero2") == pytest.approx([2, 0.5, 0.25, 1], rel=1e-6)
    assert states(8, "zero3") == pytest.approx([0.25, 0.5, 0.25, 1], rel=1e-6)
    assert sum(states(1, "zero2")) == sum(states(1, "fsdp2")) == 16
    buckets = plan_memory(shape, RUN, H200, 8, "ddp").phases["optimizer_step"]["ddp_buckets"]
    assert buckets == 4 * parameters
    rollout = plan_memory(shape, RUN, H200, 8, "fsdp2").phases["rollout"]
    assert rollout["gathered"] == 2 * parameters and "weight_copies" not in rollout


@pytest.mark.parametrize("name", ["gptoss-lite", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_more_of_anything_takes_more(name):
    few, many = shape_of(name, 2), shape_of(name, 4)
    before = plan_memory(few, RUN, H200)
    for shape, changes, phases in (
        (many, {}, before.phases),
        (few, {"completion_tokens": 640}, ("rollout", "forward_backward")),
        (few, {"prompt_tokens": 256}, ("rollout", "forward_backward")),
        (few, {"micro_batch": 16}, ("forward_backward",)),
        (few, {"prompts_per_rollout": 16}, ("rollout",)),
    ):
        after = plan_memory(shape, replace(RUN, **changes), H200)
        assert all(after.bytes_of(phase) > before.bytes_of(phase) for phase in phases), changes


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
@pytest.mark.parametrize("checkpoint_period", [None, 1])
def test_categories_sum_to_the_phase_and_the_peak_is_the_largest(checkpoint_period, sharding):
    run = replace(RUN, checkpoint_period=checkpoint_period, old_logps=True)
    plan = plan_memory(shape_of("gpt-oss-20b", 4), run, H200, 1, sharding)
    assert list(plan.phases) == ["rollout", "old_logps", "forward_backward", "optimizer_step"]
    for phase, own in plan.phases.items():
        assert plan.bytes_of(phase) == sum(own.values()) <= plan.peak_bytes
        assert all(isinstance(count, int) and count > 0 for count in own.values())
        assert plan.allocated_bytes(phase) == plan.bytes_of(phase) - own["context"] - own["slack"]
    assert plan.bytes_of(plan.peak_phase) == plan.peak_bytes


def test_checkpointing_trades_activations_and_lite_by_its_period():
    shape = shape_of("gptoss-lite")
    run = replace(RUN, completion_tokens=4096 - 128)
    totals = [
        plan_memory(shape, replace(run, checkpoint_period=period), H200).bytes_of("forward_backward")
        for period in (1, 2, 3, 4, 6, 12, None)
    ]
    assert totals == sorted(totals) and len(set(totals)) == 7


def test_the_chosen_checkpointing_is_the_least_that_fits():
    shape = shape_of("gptoss-lite")
    run = replace(RUN, completion_tokens=4096 - 128)
    assert choose_checkpointing(shape, RUN, H200) is None
    peaks = {g: plan_memory(shape, replace(run, checkpoint_period=g), H200).peak_bytes for g in (None, *range(1, 13))}
    for memory in (peaks[1], peaks[2], peaks[3] + 1, peaks[12], peaks[None]):
        gpu = replace(H200, memory_bytes=memory)
        fitting = [g for g in (None, *range(12, 0, -1)) if peaks[g] <= memory]
        assert choose_checkpointing(shape, run, gpu) == fitting[0]
    with pytest.raises(
        ValueError, match="memory must hold forward_backward with every block checkpointed, got 1.0 GiB"
    ):
        choose_checkpointing(shape, run, replace(H200, memory_bytes=peaks[1] - GIB))
    qwen = shape_of("qwen3-30b-a3b", 4)
    needed = plan_memory(qwen, replace(run, micro_batch=64, checkpoint_period=1), H200).peak_bytes
    assert choose_checkpointing(qwen, replace(run, micro_batch=64), replace(H200, memory_bytes=needed)) == 1


@pytest.mark.parametrize("name", ["gptoss-lite", "qwen3-30b-a3b"])
def test_what_bisection_finds_is_the_largest(name):
    shape, run = shape_of(name, 4), replace(RUN, prompts_per_rollout=512)
    gpu = GPUS["A100-80"]

    def fits(**changes):
        return plan_memory(shape, replace(run, **changes), gpu).fits

    rows, tokens = largest_micro_batch(shape, run, gpu), largest_completion(shape, run, gpu)
    assert 1 < rows < 4096 and fits(micro_batch=rows) and not fits(micro_batch=rows + 1)
    assert 1 < tokens < 131_072 and fits(completion_tokens=tokens) and not fits(completion_tokens=tokens + 1)
    assert largest_completion(shape, run, gpu, limit=100) == 100
    assert largest_micro_batch(shape, RUN, replace(H200, memory_bytes=10**13)) == 64
    assert largest_micro_batch(shape, run, replace(gpu, memory_bytes=GIB)) == 0


def test_logits_never_exist_whole():
    shape = shape_of("gptoss-lite")
    run = replace(RUN, micro_batch=64, completion_tokens=4096 - 128)
    head = [Phases(shape, x, H200, 1, "none")._head_moments()[0] for x in (run, replace(run, micro_batch=32))]
    logits = 4 * 64 * (4096 - 128) * 128_000
    assert head[0] < logits / 20 and math.isclose(head[0] - head[1], 2 * 32 * (4096 - 128) * 768 * 4, rel_tol=0.01)


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        ({"micro_batch": 0}, (), "micro_batch must be at least 1, got 0;"),
        ({"checkpoint_period": 0}, (), "checkpoint_period must be at least 1, got 0"),
        ({"weight_bytes": 1}, (), "weight_bytes must be 2 or 4, got 1;"),
        ({"attention": "none"}, (), "attention must be one of"),
        ({"experts": "eager"}, (), "experts must be fused or stacked, got 'eager';"),
        ({"lora_rank": -1}, (), "lora_rank must be at least 0, got -1;"),
        ({"lora_experts": True}, (), "lora_experts must be False, got True; give a lora_rank"),
        ({}, (8, "tensor"), "sharding must be one of none, ddp, fsdp2, zero2, zero3, got 'tensor';"),
        ({}, (8, "none"), "sharding must be ddp or fsdp2 on 8 GPUs, got 'none';"),
        ({}, (0, "ddp"), "num_gpus must be at least 1, got 0;"),
    ],
)
def test_plans_refuse_what_cannot_be(changes, where, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(shape_of("qwen3-30b-a3b", 2), replace(RUN, **changes), H200, *where)


def test_linear_attention_is_refused_by_name():
    kind, own = FAMILIES["qwen3_next"]
    config = getattr(transformers, kind)(**{**SMALL, **own})
    with pytest.raises(ValueError, match="model_type must be of a model of softmax attention, got 'qwen3_next'"):
        plan_memory(config, RUN, H200)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe", "glm4_moe", "granitemoe", "minimax_m2"])
def test_other_families_are_near_what_autograd_keeps(family, autocast):
    """By their sizes alone: what these do besides costs or saves a few per cent."""
    kind, own = FAMILIES[family]
    config = getattr(transformers, kind)(**{**SMALL, **own})
    options = {"attn_implementation": "sdpa", "experts_implementation": "stacked"}
    measured = kept_bytes(AutoModelForCausalLM.from_config(config, **options).train(), autocast)
    run = replace(RUN, micro_batch=ROWS, prompt_tokens=TOKENS - 8, completion_tokens=8, bf16=autocast, padded=False)
    moment = Phases(ModelShape.from_config(config), replace(run, experts="stacked"), H200, 1, "none")._moments()[1]
    assert sum(moment.values()) - moment["head"] == pytest.approx(measured, rel=0.1)


def test_gpus_by_number_and_name():
    assert parse_gpus("8xH200") == (8, H200) and parse_gpus("h200") == (1, H200)
    assert parse_gpus("2 x A100-40") == (2, GPUS["A100-40"])
    for text in ("8xH20", "0xH200", "", "H200x8"):
        with pytest.raises(ValueError, match=f"gpus must be a number and one of H100, .*, got '{text}'"):
            parse_gpus(text)
    with pytest.raises(ValueError, match="model must be a folder or one of gptoss-lite, .* got 'gpt-5'"):
        preset_config("gpt-5")
