import torch
from tiny import tiny_model, tokenizer

from grpo_moe.rl.warm_start import WarmStart, warm_start


def demonstrations(step):
    return [("ab", "cd"), ("abc", "d")]


def run(tmp_path, seed=0, key=None, steps=40):
    model = tiny_model(seed, initializer_range=0.1)
    options = WarmStart(steps=steps, learning_rate=1e-2, log_every=0)
    warm_start(model, tokenizer(), demonstrations, options, cache_dir=tmp_path, cache_key={"key": key})
    return model


def test_the_policy_learns_its_demonstrations(tmp_path):
    model = run(tmp_path)
    ids = torch.tensor([tokenizer()("ab").input_ids])
    out = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert tokenizer().decode(out[0, ids.shape[1] :]) == "cd<eos>"


def test_an_equal_call_loads_the_cache_and_another_does_not(tmp_path):
    first = run(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    again = run(tmp_path, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    run(tmp_path, key="another")
    run(tmp_path, steps=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
