import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path

import contract
import pytest
import torch
from moe_families import FAMILIES, tiny_moe
from safetensors.torch import load_file
from tiny import prompt, tokenizer
from vllm_server import FakeServer

from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.rollout.vllm import FolderTransfer, NCCLTransfer, VLLMEngine
from grpo_moe.rollout.weights import buckets, published_weights
from grpo_moe.types import SamplingParams

PROMPTS = [prompt(n) for n in (1, 9)]


def policy(**changes):
    return add_token_logps(tiny_moe("qwen3_moe", changes=changes).eval())


@pytest.fixture
def model():
    return policy()


@pytest.fixture
def server(model):
    with FakeServer(model) as server:
        yield server


@pytest.fixture
def engine(server, model, tmp_path):
    return engine_at(server, model, tmp_path)


def engine_at(server, model, folder, tolerance=1e-4, **options):
    transfer = FolderTransfer(folder, bucket_bytes=20_000)
    return VLLMEngine(
        model, transfer=transfer, url=server.url, tolerance=tolerance, **{"api_key": "sesame", "timeout": 30, **options}
    )


def test_greedy_equals_the_full_forward(engine, model):
    contract.greedy_equals_full_forward(engine, model, [prompt(n) for n in range(1, 8)])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_logps_equal_the_training_forward(engine, model, temperature):
    contract.sampled_logps_equal_the_training_forward(engine, model, PROMPTS, temperature)


def test_flags_come_back(engine, model):
    contract.flags_come_back(engine, model, [prompt(4)])


def test_new_weights_are_seen(engine, model):
    contract.new_weights_are_seen(engine, model, PROMPTS)


def test_routes_equal_the_training_forward(engine, server, model):
    server.returns_routes = True
    contract.routes_equal_the_training_forward(engine, model, PROMPTS)


def test_routes_leave_dense_layers_out(tmp_path):
    model = policy(num_hidden_layers=3, mlp_only_layers=[1])
    with FakeServer(model) as server:
        server.returns_routes = True
        contract.routes_equal_the_training_forward(engine_at(server, model, tmp_path), model, PROMPTS)


def test_a_server_that_returns_no_routes_is_refused(engine):
    with pytest.raises(ValueError, match="got none; start it with --enable-return-routed-experts"):
        engine.generate(PROMPTS, SamplingParams(2, return_routes=True))


def test_samples_depend_on_the_seed_and_the_prompt_alone(engine, server, model, tmp_path):
    def tokens(completions):
        return [[c.token_ids for c in group] for group in completions]

    sampling = SamplingParams(5, num_generations=2, seed=5)
    together = tokens(engine.generate(PROMPTS, sampling))
    assert together == [tokens(engine.generate([p], sampling))[0] for p in PROMPTS]
    assert together == tokens(engine_at(server, model, tmp_path, max_requests=1).generate(PROMPTS, sampling))
    assert together != tokens(engine.generate(PROMPTS, SamplingParams(5, num_generations=2, seed=6)))
    assert len({c for group in together for c in group}) == 4


def test_every_stop_id_ends_a_sequence_and_counts(server, model, tmp_path):
    model.generation_config.eos_token_id = [2, 11, 17, 23]
    engine = engine_at(server, model, tmp_path, tokenizer=tokenizer())
    (group,) = engine.generate([prompt(4)], SamplingParams(40, num_generations=16))
    ends = {c.token_ids[-1] for c in group if c.finish_reason == "stop"}
    assert ends == {2, 11, 17, 23}
    assert all(not set(c.token_ids[:-1]) & ends for c in group)
    assert all(c.text == tokenizer().decode(c.token_ids, skip_special_tokens=True) for c in group)


def test_top_k_reports_the_truncated_distribution(engine):
    (group,) = engine.generate([prompt(4)], SamplingParams(1, num_generations=10, top_k=2))
    reported = {c.token_ids[0]: c.sampling_logps[0] for c in group}
    assert len(reported) == 2
    assert torch.tensor(list(reported.values())).exp().sum() == pytest.approx(1.0, abs=1e-5)


def test_a_context_that_runs_out(tmp_path):
    model = policy(max_position_embeddings=12)
    with FakeServer(model) as server:
        engine = engine_at(server, model, tmp_path)
        full, short = engine.generate([prompt(11), prompt(2)], SamplingParams(20, num_generations=4))
    assert all(len(c.token_ids) == 1 for c in full)
    assert all(len(c.token_ids) == 10 or c.finish_reason == "stop" for c in short)
    with pytest.raises(ValueError, match="prompt 1 must have 1 to 11 tokens .*got 12"):
        engine.generate([prompt(3), prompt(12)], SamplingParams(4))


def test_a_bucket_at_a_time(engine, server, model, tmp_path):
    engine.generate(PROMPTS, SamplingParams(1))
    sizes = [sum(x.nbytes for x in load_file(f).values()) for f in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 5 and max(sizes) < 20_000 + max(p.nbytes for p in model.parameters())
    engine.sync_weights(model)
    assert server.version == "grpo_moe 2"
    sequence = ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    last = len(server.calls) - server.calls[::-1].index("/pause?mode=wait") - 1
    assert server.calls[last : last + 5] == sequence
    assert server.calls[last + 5 :] == ["/v1/completions"] * 8


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def keep_everything(served, before):
    served.load_state_dict(before)


def swap_experts(served, before):
    for name, tensor in served.state_dict().items():
        if "layers.1.mlp.experts" in name:
            tensor[[0, 1]] = tensor[[1, 0]].clone()


def miss_an_expert(served, before):
    for name, tensor in served.state_dict().items():
        if "layers.0.mlp.experts" in name:
            tensor[3] = before[name][3]


def swap_gate_and_up(served, before):
    for name, tensor in served.state_dict().items():
        if "gate_up_proj" in name:
            tensor.copy_(torch.cat(tensor.chunk(2, 1)[::-1], 1))


def nothing_finite(served, before):
    served.lm_head.weight.data.fill_(float("nan"))


@pytest.mark.parametrize("fault", [keep_everything, swap_experts, miss_an_expert, swap_gate_and_up])
def test_wrong_weights_at_the_server_end_the_run(engine, server, model, fault):
    engine.sync_weights(model)
    server.after_load = fault
    change(model)
    with pytest.raises(RuntimeError, match="512 probe tokens .* must be within 0.0001 nats .*got mean .*, max "):
        engine.sync_weights(model)


def test_weights_that_are_not_finite_end_the_run(engine, server, model):
    server.after_load = nothing_finite
    with pytest.raises(RuntimeError, match="must be finite, got NaN or infinity; its weights are incomplete"):
        engine.sync_weights(model)


def test_the_tolerance_is_measured_where_none_is_given(server, model, tmp_path):
    server.model.load_state_dict(model.state_dict())
    engine = engine_at(server, model, tmp_path, tolerance=None)
    assert engine.probe.tolerance == 1e-4  # the same kernels: none but the lower bound
    engine.sync_weights(model)
    server.after_load = swap_experts
    change(model)
    with pytest.raises(RuntimeError, match="must be within 0.0001 nats"):
        engine.sync_weights(model)
    change(model)
    assert engine_at(server, model, tmp_path, tolerance=None).probe.tolerance == 0.05  # it holds other weights


def test_a_server_that_stands_still_ends_the_run_below_the_tolerance(server, model, tmp_path):
    engine = engine_at(server, model, tmp_path, tolerance=10.0)
    engine.sync_weights(model)
    engine.sync_weights(model)  # nothing moved, nothing to see
    server.after_load = keep_everything
    change(model)
    with pytest.raises(RuntimeError, match="must move with the model's, by .*got 0.00e.*its weights are stale"):
        engine.sync_weights(model)


def test_a_server_that_restarted_is_found_before_the_rollout(engine, server):
    engine.generate(PROMPTS, SamplingParams(1))
    server.version = "default"
    with pytest.raises(RuntimeError, match="must hold the weights 'grpo_moe 1', got 'default'; it was restarted"):
        engine.generate(PROMPTS, SamplingParams(1))


def test_a_transfer_that_the_server_refuses_leaves_it_paused(engine, server, model):
    engine.transfer.send = lambda server, model: server.post("/no_such_endpoint")
    with pytest.raises(ValueError, match="must have /no_such_endpoint, got 404; start vLLM .*VLLM_SERVER_DEV_MODE=1"):
        engine.sync_weights(model)
    assert server.paused and server.version == "grpo_moe 0"


def test_another_process_waits_for_the_weights(engine, server, model):
    second = VLLMEngine(model, transfer=None, url=server.url, api_key="sesame", timeout=0.3)
    with pytest.raises(RuntimeError, match="'grpo_moe 1', got 'grpo_moe 0'; .* no process has a transfer"):
        second.generate(PROMPTS, SamplingParams(1))
    second = VLLMEngine(model, transfer=None, url=server.url, api_key="sesame", timeout=30)
    engine.sync_weights(model)
    assert second.generate(PROMPTS, SamplingParams(1)) == engine.generate(PROMPTS, SamplingParams(1))
    assert server.version == "grpo_moe 1"


@pytest.mark.parametrize("sampling", [SamplingParams(2, temperature=0.7), SamplingParams(2, top_p=0.9)])
def test_raw_logprobs_are_refused(engine, server, sampling):
    server.raw = True
    engine.generate(PROMPTS, SamplingParams(2))
    engine.generate(PROMPTS, SamplingParams(2, temperature=0.0))
    with pytest.raises(ValueError, match="must be processed_logprobs at temperature .*got raw ones"):
        engine.generate(PROMPTS, sampling)


@pytest.mark.parametrize(("key", "given"), [(None, "none"), ("abracadabra", "another")])
def test_a_wrong_key_is_refused_and_not_shown(server, model, key, given, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(PermissionError, match=f"api_key must be that of the server at .*, got {given}") as error:
        VLLMEngine(model, transfer=None, url=server.url, api_key=key)
    assert "abracadabra" not in str(error.value)


def test_the_key_comes_from_the_environment_and_stays_out_of_texts(server, model, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    engine = VLLMEngine(model, transfer=None, url=f"{server.url}/")
    assert "sesame" not in f"{engine.server!r}{engine!r}"


def test_nobody_at_the_address_is_an_error(model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=f"url must be that of a running vLLM server, got {url}.*refused"):
        VLLMEngine(model, transfer=None, url=url)
    with pytest.raises(ValueError, match="url must start with http"):
        VLLMEngine(model, transfer=None, url="localhost:8000")


def test_a_slow_server_is_an_error(server, model):
    server.lock.acquire()
    with pytest.raises(TimeoutError, match="timeout must be longer than /v1/models takes .*got 0.2 seconds"):
        VLLMEngine(model, transfer=None, url=server.url, api_key="sesame", timeout=0.2)
    server.lock.release()


def test_another_model_is_refused(server, model):
    with pytest.raises(ValueError, match=r"served_model must be one of \['policy'\] at .*, got other; name it"):
        VLLMEngine(model, transfer=None, url=server.url, api_key="sesame", served_model="other")
    with pytest.raises(ValueError, match="must suit the model served .*Token id 99 is out of vocabulary"):
        VLLMEngine(policy(vocab_size=100), transfer=None, url=server.url, api_key="sesame")


def test_a_server_with_a_short_context_is_refused(model, tmp_path):
    with FakeServer(model, max_model_len=20) as server:
        engine = engine_at(server, model, tmp_path)
        with pytest.raises(ValueError, match="max_model_len .* at least 25 .*got 20; start it with --max-model-len 25"):
            engine.generate([prompt(9)], SamplingParams(16))
        assert engine.generate([prompt(9)], SamplingParams(11))


def test_a_server_without_its_development_endpoints_is_refused(model, tmp_path):
    with FakeServer(model, dev_mode=False) as server:
        with pytest.raises(ValueError, match="must have /resume, got 404; .*VLLM_SERVER_DEV_MODE=1"):
            engine_at(server, model, tmp_path)


def test_nccl_sends_what_it_announced(server, model, monkeypatch):
    """vLLM's trainer side, replaced by one that hands the tensors over in this process."""

    class Trainer:
        @classmethod
        def trainer_init(cls, info, *, client, source):
            client.init_weight_transfer_engine(vars(info))
            trainer = cls()
            trainer.client, trainer.source = client, source
            return trainer

        def send_weights(self):
            announced = [(m.name, m.dtype, m.shape) for m in self.source.metadata()]
            weights = dict(self.source)
            assert announced == [(name, x.dtype, tuple(x.shape)) for name, x in weights.items()]
            server.received["weights"] = weights
            self.client.start_weight_update()
            self.client.update_weights({"names": [name for name, *_ in announced]})
            self.client.finish_weight_update()

    module = types.SimpleNamespace(NCCLTrainerInitInfo=types.SimpleNamespace, NCCLTrainerWeightTransferEngine=Trainer)
    packages = ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer"]
    for name in packages:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{packages[-1]}.nccl_engine", module)
    monkeypatch.setattr(sys.modules[packages[-1]], "nccl_engine", module, raising=False)
    with pytest.raises(ValueError, match="without a CUDA GPU, got NCCLTransfer"):
        NCCLTransfer()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = VLLMEngine(
        model, transfer=NCCLTransfer(address="10.0.0.1"), url=server.url, api_key="sesame", tolerance=1e-4
    )
    monkeypatch.undo()
    for _ in range(2):
        change(model)
        engine.sync_weights(model)
    assert server.calls.count("/init_weight_transfer_engine") == 1 and server.version == "grpo_moe 2"
    assert (server.received["init"]["world_size"], server.received["init"]["master_address"]) == (2, "10.0.0.1")
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in server.received["update"]["names"]


@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("qwen3_moe", True)])
def test_published_weights_are_those_of_save_pretrained(family, tied, tmp_path):
    model = tiny_moe(family, changes={"tie_word_embeddings": tied})
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    made = list(published_weights(model))
    assert len(made) == len(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in made)
    shapes = [(name, x.shape, x.dtype) for name, x in published_weights(model, dtype=torch.bfloat16, meta=True)]
    assert shapes == [(n, x.shape, x.dtype) for n, x in published_weights(model, dtype=torch.bfloat16)]
    assert all(x.dtype == (torch.bfloat16 if x.dim() > 1 else torch.float32) for _, x in buckets_joined(model))


def buckets_joined(model):
    for bucket in buckets(published_weights(model, dtype=torch.bfloat16), 1):
        assert len(bucket) == 1
        yield from bucket.items()


def lora_model(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        **{
            "target_modules": ["q_proj", "embed_tokens"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "modules_to_save": ["norm"],
            **options,
        },
    )
    adapted = peft.get_peft_model(tiny_moe("qwen3_moe"), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return adapted


def test_published_weights_hold_lora(tmp_path):
    adapted = lora_model()
    before = {name: x.clone() for name, x in adapted.state_dict().items()}
    made = {name: x.clone() for name, x in published_weights(adapted)}
    assert all(torch.equal(x, before[name]) for name, x in adapted.state_dict().items())
    plain = dict(published_weights(tiny_moe("qwen3_moe")))
    merged = dict(published_weights(adapted.merge_and_unload()))
    assert made.keys() == merged.keys() == plain.keys()
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, merged[name])
    assert (
        sum(not torch.equal(tensor, plain[name]) for name, tensor in made.items()) == 2 * (1 + 8 * 3 + 4) + 2
    )  # all norms end with norm


def test_other_adapters_are_refused():
    with pytest.raises(ValueError, match="adapters must be plain LoRA .*q_proj; use NativeEngine or HFEngine"):
        list(published_weights(lora_model(use_dora=True, target_parameters=None, target_modules=["q_proj"])))


def test_lora_reaches_the_server(tmp_path):
    adapted = lora_model()
    model = add_token_logps(adapted.get_base_model().eval())
    with FakeServer(tiny_moe("qwen3_moe")) as server:
        engine = engine_at(server, model, tmp_path)
        contract.greedy_equals_full_forward(engine, model, PROMPTS)


SERVED = {"head_dim": 32}  # the least of vLLM's attention on the CPU
TOLERANCE = {"float32": 1e-4, "float16": 0.01}


@pytest.fixture(scope="module", params=list(TOLERANCE))
def vllm_url(request, tmp_path_factory):
    """A real server. VLLM_BIN is its command, e.g. ``python -m vllm.entrypoints.openai.api_server``."""
    command = shlex.split(os.environ.get("VLLM_BIN", "vllm serve"))
    if shutil.which(command[0]) is None:
        pytest.skip(f"VLLM_BIN must be the command of a vLLM server, got {shlex.join(command)}")
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(1)
    tiny_moe("qwen3_moe", changes=SERVED).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = "--served-model-name policy --max-model-len 128 --max-num-seqs 32 --enforce-eager --api-key sesame"
    command += ["--model", str(folder), "--host", "127.0.0.1", "--port", port, "--dtype", request.param]
    command += [*options.split(), "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", "vllm_cpu_experts.PacksExperts"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings["PYTHONPATH"] = str(Path(__file__).parent)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # of conftest.py
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env={**inherited, **settings}, stdout=out, stderr=subprocess.STDOUT)
    try:
        _await_server(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}", request.param
    finally:
        process.terminate()
        process.wait(60)


def _await_server(url: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


@pytest.mark.vllm
def test_a_real_server_follows_the_training(vllm_url, tmp_path):
    url, dtype = vllm_url
    exact = dtype == "float32"
    model = policy(**SERVED)
    model.generation_config.eos_token_id = [2, 11, 17, 23]
    options = {"url": url, "api_key": "sesame", "tolerance": TOLERANCE[dtype]}
    engine = VLLMEngine(model, tokenizer(), transfer=FolderTransfer(tmp_path, bucket_bytes=20_000), **options)
    for _ in range(3):
        if exact:
            contract.greedy_equals_full_forward(engine, model, PROMPTS)
        for temperature in (0.6, 1.0):
            contract.sampled_logps_equal_the_training_forward(
                engine, model, PROMPTS, temperature, tolerance=1e-4 if exact else 0.3
            )
        sampling = SamplingParams(20, num_generations=8, seed=5)
        together = engine.generate(PROMPTS, sampling)
        assert {c.finish_reason for group in together for c in group} == {"stop", "length"}
        if exact:
            apart = [engine.generate([p], sampling)[0] for p in PROMPTS]
            assert [[c.token_ids for c in g] for g in together] == [[c.token_ids for c in g] for g in apart]
        change(model)
        engine.sync_weights(model)


def synced_engine(vllm_url, model, folder):
    url, dtype = vllm_url
    engine = VLLMEngine(model, transfer=FolderTransfer(folder), url=url, api_key="sesame", tolerance=TOLERANCE[dtype])
    engine.sync_weights(model)
    return engine


@pytest.mark.vllm
@pytest.mark.parametrize("fault", [swap_experts, swap_gate_and_up, miss_an_expert, keep_everything])
def test_a_real_server_with_wrong_weights_ends_the_run(vllm_url, tmp_path, fault):
    dtype = vllm_url[1]
    model = policy(**SERVED)
    engine = synced_engine(vllm_url, model, tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(model)
    send = engine.transfer.send

    def send_wrong(server, model):
        right = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fault(model, before)
        send(server, model)
        model.load_state_dict(right)

    engine.transfer.send = send_wrong
    with pytest.raises(RuntimeError, match="probe tokens .* nats of the model's on average, got mean") as error:
        engine.sync_weights(model)
    print(dtype, fault.__name__, error.value)


@pytest.mark.vllm
def test_a_real_server_that_lacks_an_expert_ends_the_run(vllm_url, tmp_path, monkeypatch):
    dtype = vllm_url[1]
    model = policy(**SERVED)
    engine = synced_engine(vllm_url, model, tmp_path)

    def all_but_one(*args, **kwargs):
        return ((name, x) for name, x in published_weights(*args, **kwargs) if "layers.0.mlp.experts.3." not in name)

    monkeypatch.setattr("grpo_moe.rollout.vllm_transfer.published_weights", all_but_one)
    change(model)
    with pytest.raises(RuntimeError, match="do not train on its rollouts") as error:
        engine.sync_weights(model)
    print(dtype, error.value)
    monkeypatch.undo()
    engine.sync_weights(model)
