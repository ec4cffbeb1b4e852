import numpy as np
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
    (unfinished,) = (tmp_path / "interrupted").iterdir()
    content = unfinished.read_bytes()
    unfinished.write_bytes(content[:100])
    with pytest.raises(ValueError, match=f"{unfinished} must be an unfinished warm start, got .*; remove it"):
        trained("interrupted", interrupted)
    unfinished.write_bytes(content)
    again = trained("interrupted", interrupted)
    assert asked == [*range(1, 8), 8, *range(6, 13)]
    whole = trained("whole", lambda step: [("ab", "cd" * step)])
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    assert [p.suffix for p in (tmp_path / "interrupted").iterdir()] == [".safetensors"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0; give a number of updates"),
        ({"steps": "5"}, "steps must be an integer of at least 1, got '5'; give"),
        ({"steps": 2.5}, "steps must be an integer of at least 1, got 2.5; give"),
        ({"steps": True}, "steps must be an integer of at least 1, got True; give"),
        ({"save_every": -1}, "save_every must be at least 0, got -1; 0 saves nothing"),
        ({"log_every": None}, "log_every must be an integer of at least 0, got None; 0 prints no"),
        ({"learning_rate": np.float32("inf")}, "learning_rate must be a finite number, above 0, got .*inf.*; 3e-3"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef must be 0 or positive, got -0.1; 0 leaves"),
        ({"bf16": "no"}, "bf16 must be True or False, got 'no'"),
    ],
    ids=str,
)
def test_wrong_options_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        WarmStart(**{"steps": 1, **wrong})


def test_options_of_numpy_are_the_same_options():
    given = WarmStart(steps=np.int64(3), learning_rate=np.float32(0.5))
    assert given == WarmStart(steps=3, learning_rate=0.5) and type(given.steps) is int
