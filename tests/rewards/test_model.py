"""A reward model as a reward function: the right logit for chats and texts, whatever the batch."""

import pytest
import torch
from tiny import ALPHABET
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from grpo_moe.data import character_tokenizer
from grpo_moe.rewards import ModelReward, RewardCaller

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}\n{% endfor %}"


def tokenizer(**changes):
    made = character_tokenizer(ALPHABET + "\n")
    made.chat_template = TEMPLATE
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def config(**changes):
    values = dict(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=1,
        initializer_range=0.5,
    )
    return LlamaConfig(**{**values, **changes})


def model(**changes):
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config(**changes))


def truth(text, special_tokens=True):
    """The logit at the last token of one row without padding."""
    reference = model()
    reference.config.pad_token_id = None
    token_ids = tokenizer()(text, add_special_tokens=special_tokens)["input_ids"]
    with torch.no_grad():
        return reference(torch.tensor([token_ids])).logits.item()


PROMPTS, COMPLETIONS = ["hello ", "a", "some question ", "x"], ["you", "", "and a long answer", "y"]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_texts_are_put_together_and_scored_at_their_last_token(batch_size):
    rewards = ModelReward(model(), tokenizer(), batch_size=batch_size)(PROMPTS, COMPLETIONS, answer=[0] * 4)
    expected = [truth(p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert rewards == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == 4


def test_chats_go_through_the_chat_template():
    prompt = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    completion = [{"role": "assistant", "content": "hello"}]
    rewards = ModelReward(model(), tokenizer())([prompt], [completion])
    assert rewards == pytest.approx([truth("s be kind\nu hi\na hello\n", special_tokens=False)], rel=1e-4, abs=1e-5)


def test_a_tokenizer_without_padding_pads_with_eos():
    plain = tokenizer()
    plain.pad_token = None
    eos = plain.eos_token_id
    made = model()
    rewards = ModelReward(made, plain)(PROMPTS, COMPLETIONS)
    assert made.config.pad_token_id == eos and plain.pad_token is None
    assert rewards == pytest.approx([truth(p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)], rel=1e-4)


def test_rows_too_long_are_not_scored():
    rewards = ModelReward(model(), tokenizer())(["a" * 29, "a" * 30], ["bb", "bb"])
    assert rewards[0] == pytest.approx(truth("a" * 29 + "bb"), rel=1e-4) and rewards[1] is None
    assert ModelReward(model(), tokenizer(), max_length=4)(["aa", "aa"], ["b", "bb"])[1] is None
    assert ModelReward(model(), tokenizer(model_max_length=2))(["aa", "b"], ["b", "b"]) == [None, None]


def test_the_model_is_in_eval_mode_without_gradients():
    training = model(attention_dropout=0.9).train()
    reward = ModelReward(training, tokenizer())
    assert not training.training
    reward(["a"], ["b"])
    assert all(parameter.grad is None for parameter in training.parameters())
    assert ModelReward(model().bfloat16(), tokenizer(), device="cpu")(["a"], ["b"])[0] == pytest.approx(
        truth("ab"), abs=0.3
    )


def test_a_path_is_loaded_with_its_tokenizer(tmp_path):
    path = tmp_path / "judge"
    model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    caller = RewardCaller([ModelReward(str(path)), ModelReward(path)])
    assert caller.names == ["judge", "judge_2"]
    output = caller(PROMPTS, COMPLETIONS, {})
    assert (
        output.values[0]
        == output.values[1]
        == pytest.approx([truth(p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)], rel=1e-4)
    )


def test_a_path_without_a_head_is_refused(tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must be those of a reward model, got none for \['score.weight'\]"):
        ModelReward(tmp_path, tokenizer())


def test_a_model_that_gives_no_single_label_is_refused():
    with pytest.raises(ValueError, match="with one label, got LlamaForSequenceClassification with 3 labels"):
        ModelReward(model(num_labels=3), tokenizer())
    with pytest.raises(ValueError, match="got Linear with no labels"):
        ModelReward(torch.nn.Linear(1, 1), tokenizer())
    with pytest.raises(ValueError, match=r"logits must be one number for each of 1 rows, got the shape \(1, 3, "):
        ModelReward(LlamaForCausalLM(config()), tokenizer())(["a"], ["b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "tokenizer must be given with a model, got None"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"tokenizer": tokenizer(pad_token=None, eos_token=None)}, "got neither PAD nor EOS"),
    ],
)
def test_a_faulty_construction_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelReward(model(), **{"tokenizer": tokenizer(), **options})
