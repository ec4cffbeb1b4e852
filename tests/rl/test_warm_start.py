import pytest
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


def test_an_interrupted_call_goes_on_from_its_last_save_to_the_same_bits(tmp_path):
    def trained(folder, demonstrations):
        model = tiny_model(initializer_range=0.1)
        options = WarmStart(steps=12, learning_rate=1e-2, save_every=5)
        warm_start(model, tokenizer(), demonstrations, options, cache_dir=tmp_path / folder, cache_key={})
        return model

    asked = []

    def interrupted(step):
        if step == 8 and 8 not in asked:
            asked.append(8)
            raise KeyboardInterrupt
        asked.append(step)
        return [("ab", "cd" * step)]

    with pytest.raises(KeyboardInterrupt):
        trained("interrupted", interrupted)
    again = trained("interrupted", interrupted)
    assert asked == [*range(1, 8), 8, *range(6, 13)]
    whole = trained("whole", lambda step: [("ab", "cd" * step)])
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    assert [p.suffix for p in (tmp_path / "interrupted").iterdir()] == [".safetensors"]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"save_every": -1}, {"log_every": -1}])
def test_wrong_options_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be at least .*, got {value}"):
        WarmStart(**{"steps": 1, **wrong})
