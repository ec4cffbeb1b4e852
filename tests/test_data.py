"""Prompts from datasets: ids, order, resuming, and what is refused; the character tokenizer."""

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_moe.data import PromptSource, character_tokenizer

ALPHABET = "0123456789+-=; ?\n"
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
PAD, BOS, EOS = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer(ALPHABET)


def with_template(template):
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    return tokenizer


def rows(n):
    return [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(n)]


def source(tokenizer, n=5, **arguments):
    return PromptSource(rows(n), tokenizer, **{"seed": 0, **arguments})


def answers(prompts):
    return [prompt.columns["answer"] // 2 for prompt in prompts]


# --- character_tokenizer


def test_character_tokenizer_gives_one_token_for_each_character(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD, BOS, EOS)
    assert len(tokenizer) == 3 + len(ALPHABET)
    assert tokenizer("01 ?")["input_ids"] == [BOS, 3, 4, 3 + ALPHABET.index(" "), 3 + ALPHABET.index("?")]
    assert tokenizer("01", add_special_tokens=False)["input_ids"] == [3, 4]
    assert set(tokenizer("01")) == {"input_ids", "attention_mask"}


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=ALPHABET))
def test_character_tokenizer_round_trips_text(text):
    tokenizer = character_tokenizer(ALPHABET)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 1 + len(text)
    assert tokenizer.decode([*ids, EOS, PAD], skip_special_tokens=True) == text


@pytest.mark.parametrize("loader", [PreTrainedTokenizerFast, AutoTokenizer])
def test_character_tokenizer_loads_with_plain_transformers(tokenizer, tmp_path, loader):
    tokenizer.save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path)
    text = "8 8  2=18? ;\n "
    assert loaded(text) == tokenizer(text)
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (PAD, BOS, EOS)


def test_character_tokenizer_raises_on_unknown_characters(tokenizer):
    with pytest.raises(Exception, match="UNK"):
        tokenizer("1x")


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_character_tokenizer_refuses_a_faulty_alphabet(alphabet):
    with pytest.raises(ValueError, match="alphabet must be one or more different characters"):
        character_tokenizer(alphabet)


# --- PromptSource: ids


def test_prompts_carry_ids_text_and_the_other_columns(tokenizer):
    prompt = source(tokenizer).all()[3]
    assert prompt.input_ids == (BOS, 6, 13, 6, 15)
    assert (prompt.raw, prompt.index, prompt.columns) == ("3+3=", 3, {"answer": 6})
    assert all(type(token) is int for token in prompt.input_ids)


def test_a_datasets_dataset_gives_the_same_prompts_as_a_list(tokenizer):
    from_dataset = PromptSource(datasets.Dataset.from_list(rows(7)), tokenizer, seed=3)
    assert from_dataset.take(10) == source(tokenizer, 7, seed=3).take(10)


def test_a_dataset_that_only_indexes_is_enough(tokenizer):
    class Squares:
        def __len__(self):
            return 3

        def __getitem__(self, row):
            return {"prompt": str(row**2)}

    assert [prompt.raw for prompt in PromptSource(Squares(), tokenizer, seed=0).all()] == ["0", "1", "4"]


def test_many_rows_keep_their_order_over_tokenizer_batches(tokenizer):
    prompts = source(tokenizer, 2500).all()
    assert [tokenizer.decode(prompt.input_ids[1:]) for prompt in prompts] == [row["prompt"] for row in rows(2500)]


@pytest.mark.parametrize("use_datasets", [False, True])
def test_a_chat_goes_through_the_template(use_datasets):
    chats = [{"prompt": [{"role": "user", "content": "1+"}, {"role": "user", "content": "2"}]}]
    chats = datasets.Dataset.from_list(chats) if use_datasets else chats
    prompt = PromptSource(chats, with_template(CHAT), seed=0).all()[0]
    assert prompt.input_ids == (BOS, 4, 13, 5, 18)
    assert prompt.raw == [{"role": "user", "content": "1+"}, {"role": "user", "content": "2"}]


def test_chat_template_kwargs_reach_the_template():
    tokenizer = with_template(CHAT + "{% if think %};{% endif %}")
    chats = [{"prompt": [{"role": "user", "content": "1"}]}]
    assert PromptSource(chats, tokenizer, seed=0, chat_template_kwargs={"think": True}).all()[0].input_ids[-1] == 16
    assert PromptSource(chats, tokenizer, seed=0).all()[0].input_ids[-1] == 18


@pytest.mark.parametrize("template", [CHAT, "{{ bos_token }}" + CHAT, "{{ bos_token }}{{ bos_token }}" + CHAT])
def test_a_prompt_starts_with_exactly_one_bos(template):
    tokenizer = with_template(template)
    chat = PromptSource([{"prompt": [{"role": "user", "content": "1"}]}], tokenizer, seed=0)
    text = PromptSource([{"prompt": "1?"}, {"prompt": "<bos>1?"}], tokenizer, seed=0)
    assert [prompt.input_ids for prompt in chat.all() + text.all()] == [(BOS, 4, 18)] * 3


def test_a_tokenizer_that_adds_no_bos_gets_none_but_keeps_the_template_s():
    tokenizer = with_template("{{ bos_token }}" + CHAT)
    tokenizer.backend_tokenizer.post_processor = None  # as Qwen
    assert PromptSource([{"prompt": "1?"}], tokenizer, seed=0).all()[0].input_ids == (4, 18)
    chat = [{"prompt": [{"role": "user", "content": "1"}]}]
    assert PromptSource(chat, tokenizer, seed=0).all()[0].input_ids == (BOS, 4, 18)
    tokenizer.bos_token = None
    assert PromptSource([{"prompt": "1?"}], tokenizer, seed=0).all()[0].input_ids == (4, 18)


# --- PromptSource: order and resuming


def test_each_epoch_is_another_permutation_that_the_seed_fixes(tokenizer):
    first, second = (answers(s.take(20)) for s in [source(tokenizer, 20)] * 2)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    assert answers(source(tokenizer, 20).take(40)) == first + second
    assert answers(source(tokenizer, 20, seed=1).take(20)) != first


def test_take_wraps_within_a_call_and_numbers_the_stream(tokenizer):
    prompts = source(tokenizer, 3).take(8)
    assert [prompt.index for prompt in prompts] == list(range(8))
    for epoch in (prompts[:3], prompts[3:6]):
        assert sorted(answers(epoch)) == [0, 1, 2]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=6))
def test_take_does_not_depend_on_how_many_are_taken_at_once(tokenizer, sizes):
    stream = source(tokenizer)
    taken = [prompt for n in sizes for prompt in stream.take(n)]
    assert taken == source(tokenizer).take(sum(sizes))


def test_without_shuffle_the_dataset_is_repeated_in_order(tokenizer):
    assert answers(source(tokenizer, 3, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_all_is_in_order_and_moves_nothing(tokenizer):
    stream = source(tokenizer)
    before = stream.state_dict()
    assert answers(stream.all()) == [0, 1, 2, 3, 4] and len(stream) == 5
    assert stream.state_dict() == before


@pytest.mark.parametrize("taken", [0, 3, 5, 7, 23])
def test_a_resumed_source_goes_on_where_it_stopped(tokenizer, taken):
    stream = source(tokenizer)
    stream.take(taken)
    resumed = source(tokenizer)
    resumed.take(2)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.take(12) == stream.take(12)
    assert resumed.state_dict() == stream.state_dict()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"n": 6}, "num_rows must be that of the checkpoint, 5, got 6; resume with the same dataset and seed"),
        ({"seed": 1}, "seed must be that of the checkpoint, 0, got 1"),
        ({"shuffle": False}, "shuffle must be that of the checkpoint, True, got False"),
    ],
)
def test_the_state_of_another_source_is_refused(tokenizer, other, message):
    with pytest.raises(ValueError, match=message):
        source(tokenizer, **other).load_state_dict(source(tokenizer).state_dict())


def test_the_state_of_other_prompts_is_refused(tokenizer):
    other = PromptSource([{"prompt": f"{i}-{i}="} for i in range(5)], tokenizer, seed=0)
    with pytest.raises(ValueError, match="fingerprint must be that of the checkpoint"):
        other.load_state_dict(source(tokenizer).state_dict())


# --- PromptSource: what is refused

TURN = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset must hold at least one row"),
        ([{"question": "1", "answer": 2}], "dataset must have a column 'prompt', got question, answer in row 0"),
        ([{"prompt": "1"}, {"text": "1"}], "dataset must have a column 'prompt', got text in row 1"),
        (["1", "2"], "dataset must hold dicts with a column 'prompt', got str in row 0"),
        ({"train": [{"prompt": "1"}]}, r"dataset must be a single split, got a dict of train; pick dataset\['train'\]"),
        (
            iter([{"prompt": "1"}]),
            "dataset must be a map-style dataset or a sequence of dicts, got list_iterator; .*from_gen",
        ),
        (
            [{"prompt": "1"}, {"prompt": ""}],
            "prompt must be text or a list of chat messages and not empty, got '' in row 1",
        ),
        ([{"prompt": "1"}, {"prompt": None}], "got None in row 1"),
        ([{"prompt": 5}], "got 5 in row 0"),
        ([{"prompt": []}], r"got \[\] in row 0"),
        ([{"prompt": ["1"]}], r"got \['1'\] in row 0"),
        (
            [{"prompt": "1"}, {"prompt": TURN}],
            r"text in every row or chat messages in every row, got both \(rows 0 and 1\)",
        ),
        ([{"prompt": TURN}, {"prompt": "1"}], "got both"),
        ([{"prompt": "1"}, {"prompt": "2 x"}, {"prompt": "3"}], "tokenizer can encode .*got '2 x' in row 1 .*UNK"),
        ([{"prompt": "1"}, {"prompt": "123456"}, {"prompt": "1234567"}], r"\(5\) tokens, got 7 in row 1 \(2 rows"),
    ],
)
def test_a_faulty_dataset_is_refused_at_construction(tokenizer, dataset, message):
    with pytest.raises(ValueError, match=message):
        PromptSource(dataset, tokenizer, seed=0, max_prompt_tokens=5)


def test_faulty_datasets_of_the_datasets_library_are_refused(tokenizer):
    dataset = datasets.Dataset.from_dict({"question": ["1"]})
    with pytest.raises(ValueError, match="dataset must have a column 'prompt', got question in row 0"):
        PromptSource(dataset, tokenizer, seed=0)
    with pytest.raises(ValueError, match="got IterableDataset"):
        PromptSource(dataset.to_iterable_dataset(), tokenizer, seed=0)
    with pytest.raises(ValueError, match="got a dict of test"):
        PromptSource(datasets.DatasetDict(test=dataset), tokenizer, seed=0)


def test_a_chat_that_the_template_refuses_is_named():
    tokenizer = with_template(
        "{% for m in messages %}{{ raise_exception('no ' + m['role']) if m['role'] == 'x' }}{% endfor %}1"
    )
    chats = [{"prompt": TURN}, {"prompt": [{"role": "x", "content": ""}]}]
    with pytest.raises(ValueError, match="chat template accepts, got .* in row 1 .*no x"):
        PromptSource(chats, tokenizer, seed=0)


def test_a_prompt_at_the_limit_is_kept_and_bad_numbers_are_refused(tokenizer):
    assert len(PromptSource([{"prompt": "1234"}], tokenizer, seed=0, max_prompt_tokens=5)) == 1
    with pytest.raises(ValueError, match="seed must be 0 or positive, got -1"):
        source(tokenizer, seed=-1)
    with pytest.raises(ValueError, match="n must be 0 or positive, got -2"):
        source(tokenizer).take(-2)
