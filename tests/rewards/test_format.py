"""The layout that format_reward accepts."""

import time

import pytest

from grpo_moe.rewards import format_reward


def reward(completion, *arguments, **options):
    return format_reward(*arguments, **options)(["q"], [completion], answer=["ignored"])[0]


@pytest.mark.parametrize(
    "completion",
    [
        "<think>a\nb</think><answer>c</answer>",
        " <think>a</think>\n\n<answer>c</answer>\n",
        "<think></think><answer></answer>",
        "<think>1 < 2 > 0 </ think></think><answer><b></answer>",
        [{"role": "assistant", "content": "<think>a</think><answer>c</answer>"}],
    ],
)
def test_format_reward_accepts_the_layout(completion):
    assert reward(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "c",
        "<think>a</think>",
        "<answer>c</answer><think>a</think>",
        "<think>a<answer>c</answer></think>",
        "<think>a</think>between<answer>c</answer>",
        "before<think>a</think><answer>c</answer>",
        "<think>a</think><answer>c</answer>after",
        "<think>a</think><answer>c",
        "<think><think>a</think><answer>c</answer>",
        "<think>a</think><answer>c</answer><answer>d</answer>",
        "</think>a<think><answer>c</answer>",
        "<THINK>a</THINK><answer>c</answer>",
        [{"role": "assistant", "content": None}],
    ],
)
def test_format_reward_refuses_all_else(completion):
    assert reward(completion) == 0.0


def test_format_reward_reads_what_the_template_wrote_in_front():
    assert reward("a</think><answer>c</answer>", prefill="<think>\n") == 1.0
    assert reward("<think>a</think><answer>c</answer>", prefill="<think>\n") == 0.0


def test_format_reward_of_other_tags_and_text_after():
    assert reward("<think>a</think> so c", ["think"], text_after=True) == 1.0
    assert reward("<think>a</think> so c", ["think"]) == 0.0
    assert reward("so <think>a</think> c", ["think"], text_after=True) == 0.0


@pytest.mark.parametrize("text", ["<think>" * 100_000, "<think>" + "</thin" * 200_000, " " * 1_000_000 + "x"])
def test_format_reward_is_quick_on_long_text(text):
    start = time.perf_counter()
    assert reward(text) == 0.0
    assert time.perf_counter() - start < 2  # linear: a few milliseconds


@pytest.mark.parametrize("tags", [(), "think", ("think", "think"), ("<think>",), ("",)])
def test_format_reward_refuses_tags_that_are_no_names(tags):
    with pytest.raises(ValueError, match="tags must be different names, got .*; write them as"):
        format_reward(tags)
