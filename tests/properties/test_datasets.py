"""Any rows become prompts in order, or the row at fault is named."""

import math
import re

import datasets
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties.effort import few
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_moe.data import PromptSource, PromptStream, prompt_source

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def by_bytes():
    """One token a byte: every text can be encoded, and comes back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    made.chat_template = CHAT
    return made


class Again:
    """Can be iterated over again, and nothing else."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
values = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
messages = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts})
chats = st.lists(messages, min_size=1, max_size=3)


@few(60)
@given(prompts=st.lists(st.one_of(texts), min_size=1, max_size=6), answers=st.lists(values, min_size=6, max_size=6))
def test_text_of_any_script_comes_back_with_its_columns(by_bytes, prompts, answers):
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=False)]
    source = PromptSource(rows, by_bytes, seed=0)
    for row, prompt in enumerate(source.all()):
        assert by_bytes.decode(prompt.input_ids) == prompts[row] == prompt.raw
        assert len(prompt.input_ids) == len(prompts[row].encode()) and prompt.index == row
        assert repr(prompt.columns) == repr({"answer": answers[row]})  # of mixed types, NaN among them


@few(40)
@given(
    prompts=st.one_of(st.lists(texts, min_size=1, max_size=5), st.lists(chats, min_size=1, max_size=5)),
    seed=st.integers(0, 9),
)
def test_an_epoch_takes_every_row_once_and_a_stream_gives_the_same(by_bytes, prompts, seed):
    rows = [{"prompt": prompt, "number": number} for number, prompt in enumerate(prompts)]
    source, stream = PromptSource(rows, by_bytes, seed=seed), PromptStream(Again(rows), by_bytes)
    for _ in range(2):  # duplicate rows too: each by its number
        taken = source.take(len(rows))
        assert sorted(p.columns["number"] for p in taken) == list(range(len(rows)))
    assert stream.all() == source.all()
    assert [p.raw for p in stream.take(2 * len(rows))] == prompts * 2


faults = st.sampled_from(
    [None, 0, 1.5, math.nan, True, b"a", (), {}, [], "", [None], ["a"], [{}], [{"role": "user"}], "\ud800", "a\udfff",
     [{"role": "user", "content": None}], [{"role": None, "content": "a"}], [{"role": "user", "content": "\ud800"}]]
)  # fmt: skip


@few(80)
@given(good=st.lists(texts, max_size=4), after=st.lists(texts, max_size=3), fault=faults)
def test_one_bad_row_among_good_ones_is_named_by_its_number(by_bytes, good, after, fault):
    bad = [{"prompt": prompt} for prompt in [*good, fault, *after]]
    for make in (lambda: PromptSource(bad, by_bytes, seed=0), lambda: PromptStream(Again(bad), by_bytes).all()):
        with pytest.raises(ValueError) as caught:
            make()
        text = str(caught.value)
        assert "\n" not in text and re.match(r"prompt must (be|give) .+, got .+; .+", text), text
        # a chat among texts: the first text after it may be the one that is reported
        assert re.search(rf"row {len(good)}\b", text) or "rows 0 and" in text, text


@few(40)
@given(st.lists(st.one_of(texts, chats, faults), max_size=5), st.sampled_from([None, 1, 4, 30]))
def test_any_rows_become_prompts_or_one_clear_error(by_bytes, prompts, limit):
    rows = [{"prompt": prompt} for prompt in prompts]
    try:
        made = prompt_source(rows, by_bytes, seed=0, max_prompt_tokens=limit).all()
    except ValueError as error:
        assert re.match(r"(prompt|dataset) must .+, got .+; .+", str(error)), str(error)
        return
    assert [p.raw for p in made] == prompts and len(made) > 0
    assert all(1 <= len(p.input_ids) <= (limit or 10**9) for p in made)


@few(30)
@given(st.lists(st.one_of(st.none(), texts), min_size=1, max_size=5))
def test_a_column_of_arrow_is_read_or_refused_as_a_list_is(by_bytes, prompts):
    assume(any(prompts))
    rows = [{"prompt": prompt} for prompt in prompts]
    said = []
    for dataset in (rows, datasets.Dataset.from_list(rows)):
        try:
            said.append([p.input_ids for p in PromptSource(dataset, by_bytes, seed=0).all()])
        except ValueError as error:
            said.append(str(error))
    assert said[0] == said[1]


def test_a_prompt_of_100k_tokens_is_kept_whole(by_bytes):
    (prompt,) = PromptSource([{"prompt": "\u202eab\x00\x1b" * 14_300}], by_bytes, seed=0).all()
    assert len(prompt.input_ids) == 14_300 * 7 > 100_000 and by_bytes.decode(prompt.input_ids) == prompt.raw
