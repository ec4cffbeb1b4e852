import pytest

from grpo_moe.rewards.text import completion_text


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "said"}], "said"),
        ([{"role": "tool", "content": "x"}, {"role": "assistant", "content": "last"}], "last"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant"}], ""),
        ([], ""),
    ],
)
def test_completion_text_of_every_form(completion, text):
    assert completion_text(completion) == text
