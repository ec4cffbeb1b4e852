import pytest
import torch
from tiny import prompt, tiny_model, tokenizer

from grpo_moe.rollout import HFEngine, NativeEngine
from grpo_moe.rollout.base import sequence_keys, stop_token_ids, uniforms, with_text
from grpo_moe.types import Completion, SamplingParams


def splitmix64(seed, n):
    """The generator in plain Python, from the paper."""
    mask, out = (1 << 64) - 1, []
    state = seed & mask
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(((z ^ (z >> 31)) >> 11) * 2.0**-53)
    return out


def test_uniforms_are_splitmix64():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 1234567]
    drawn = uniforms(torch.tensor(keys)[:, None], torch.arange(5))
    assert drawn.tolist() == [splitmix64(key, 5) for key in keys]


def test_uniforms_are_uniform():
    drawn = uniforms(torch.arange(200)[:, None], torch.arange(500))
    assert 0 <= drawn.min() and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.004 and abs(drawn.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(drawn[:2])[0, 1]) < 0.15


def test_keys_differ_by_seed_prompt_and_completion():
    prompts = [prompt(3), prompt(3), prompt(4), prompt(3, index=1), prompt(3, index=2)]
    keys = torch.cat([sequence_keys(prompts, SamplingParams(1, num_generations=3, seed=s)) for s in (0, 1)])
    assert len(set(keys.tolist())) == 2 * 3 * len(prompts)


@pytest.mark.parametrize("engine_of", [NativeEngine, HFEngine])
@pytest.mark.parametrize("on_model", [2, None, [2, 9]])
def test_an_eos_of_the_tokenizer_alone_ends_completions_too(engine_of, on_model):
    """As that of a turn, <|im_end|>, which a base model's files do not know; with a pad token that is another's EOS."""
    reads, model = tokenizer(), tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = on_model
    reads.eos_token, reads.pad_token = "q", "<eos>"
    expected = {*([on_model] if isinstance(on_model, int) else on_model or []), reads.eos_token_id}
    assert set(stop_token_ids(model, reads)) == expected and reads.eos_token_id == 19
    groups = engine_of(model, reads).generate([prompt(n) for n in range(1, 9)], SamplingParams(24, num_generations=4))
    for completion in (c for group in groups for c in group):
        *before, last = completion.token_ids
        assert not set(before) & expected
        assert completion.finish_reason == ("stop" if last in expected else "length")
    ended = {c.token_ids[-1] for group in groups for c in group if c.finish_reason == "stop"}
    assert ended == expected


def test_a_slow_tokenizer_may_fail_on_tokens_that_it_does_not_have_and_on_no_others():
    class Slow:
        letters = "abcdefghij"

        def __len__(self):
            return 10

        def batch_decode(self, sequences, **options):
            return ["".join(self.letters[token] for token in ids) for ids in sequences]

    made = [Completion(ids, (0.0,) * len(ids), "stop") for ids in ((1, 2), (29, 3, 10))]
    assert [c.text for c in with_text(made, Slow())] == ["bc", "d"]
    Slow.letters = "ab"
    with pytest.raises(ValueError, match=r"must decode each of its 10 tokens, got IndexError \(.*\) of Slow; mend it"):
        with_text(made, Slow())
