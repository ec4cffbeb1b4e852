import pytest

from grpo_moe.rewards import answer_reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so it is\n42", "42", 1.0),
        ("so it is\n42\n\n", 42, 1.0),
        ("<answer> 1,234 </answer> done", "1234", 1.0),
        ("first <answer>1</answer> then <answer>2</answer>", "2", 1.0),
        ("first <answer>1</answer> then <answer>2</answer>", "1", 0.0),
        ("\\boxed{7.0}", "7", 1.0),
        ("\\boxed{7", "7", 0.0),
        ("", "7", 0.0),
        ("nan", "nan", 1.0),
        ("x" * 10**6, "x", 0.0),
        ([{"role": "assistant", "content": "It is\n9"}], "9", 1.0),
        ([{"role": "assistant", "content": None}], "9", 0.0),
    ],
)
def test_final_answers(completion, answer, reward):
    assert answer_reward(["q"], [completion], answer=[answer]) == [reward]
