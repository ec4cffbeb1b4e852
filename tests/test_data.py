"""Prompts from datasets: ids, order, resuming, and what is refused; the character tokenizer."""

import itertools
import json
import warnings

import datasets
import numpy as np
import pandas
import pytest
import torch
from chat_templates import KINDS, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_moe.data import PromptSource, PromptStream, character_tokenizer, prompt_source

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


CONVERSATIONS = [
    [{"role": "user", "content": "The answer is"}],
    [{"role": "system", "content": "think"}, {"role": "user", "content": " 1 + 2 \n"}],
    [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "<think>\n1 + 2\n</think>\n\n3"},
        {"role": "user", "content": "and 4"},
    ],
    [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}],  # one more turn of the assistant
]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_through_templates_of_the_hub_are_the_encoded_text_with_one_bos(kind):
    """Qwen3 takes the thoughts of earlier turns out, and writes an empty one where thinking is off."""
    tokenizer = chat_tokenizer(kind)
    bos, adds_bos = tokenizer.bos_token_id, KINDS[kind][4]
    chats = PromptSource([{"prompt": chat} for chat in CONVERSATIONS], tokenizer, seed=0).all()
    for prompt, chat in zip(chats, CONVERSATIONS, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = [bos] * (adds_bos and expected[0] != bos) + expected
        assert prompt.input_ids == tuple(expected), text
        assert prompt.input_ids.count(bos) == int(adds_bos) and (prompt.input_ids[0] == bos) == adds_bos
    removed = kind == "qwen3"
    assert ("<think>" in tokenizer.decode(chats[2].input_ids)) != removed
    texts = PromptSource([{"prompt": "The answer is"}, {"prompt": " ab"}], tokenizer, seed=0).all()
    assert all((p.input_ids[0] == bos) == adds_bos and p.input_ids.count(bos) == int(adds_bos) for p in texts)
    stream = PromptStream(Again([{"prompt": chat} for chat in CONVERSATIONS]), tokenizer).take(4)
    assert [p.input_ids for p in stream] == [p.input_ids for p in chats]
    if removed:
        source = PromptSource(
            [{"prompt": CONVERSATIONS[0]}], tokenizer, seed=0, chat_template_kwargs={"enable_thinking": False}
        )  # fmt: skip
        thoughtless = "<think>\n\n</think>\n\n"
        assert source[0].input_ids == (*chats[0].input_ids, *tokenizer(thoughtless)["input_ids"])


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


def test_all_and_first_are_in_order_and_move_nothing(tokenizer):
    stream = source(tokenizer)
    stream.take(12)
    before = stream.state_dict()
    assert answers(stream.all()) == [0, 1, 2, 3, 4] and len(stream) == 5 and stream.epochs == 2.4
    assert answers(stream.first(2)) == [0, 1] and len(stream.first(9)) == 5
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


@pytest.mark.parametrize("build", [source, lambda tokenizer, **_: PromptStream(Again(rows(5)), tokenizer)])
def test_other_columns_of_the_same_prompts_are_warned_of(tokenizer, build, monkeypatch):
    state = json.loads(json.dumps(build(tokenizer).state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tokenizer).load_state_dict(state)
        older = {name: value for name, value in state.items() if name != "columns"}
        build(tokenizer).load_state_dict(older)
    monkeypatch.setitem(globals(), "rows", lambda n, known=rows: [{**row, "answer": 7} for row in known(n)])
    with pytest.warns(UserWarning, match="columns beside the prompts are not those of the checkpoint"):
        build(tokenizer).load_state_dict(state)


def test_columns_of_any_kind_are_remembered(tokenizer):
    class Odd:
        pass

    itself = [1]
    itself.append(itself)
    values = [None, Odd(), np.arange(2), torch.ones(2), b"x", {1, 2}, {(1, 2): 3}, float("nan"), 10**400, itself]
    made = [PromptSource([{"prompt": "1", "x": value}], tokenizer, seed=0) for value in [*values, Odd()]]
    digests = [json.loads(json.dumps(x.state_dict()))["columns"] for x in made]
    assert digests[1] == digests[-1] and len(set(digests)) == len(values)


# --- PromptSource: what is refused

TURN = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset must hold at least one row"),
        ([{"question": "1", "answer": 2}], "dataset must have a column 'prompt', got question, answer in row 0"),
        ([{"prompt": "1"}, {"text": "1"}], "dataset must have a column 'prompt', got text in row 1"),
        ([{"prompt": "1", "a": 1}, {"prompt": "1"}], "same columns in every row, got prompt in row 1 and prompt, a in"),
        (["1", "2"], "dataset must hold dicts with a column 'prompt', got str in row 0"),
        ({"train": [{"prompt": "1"}]}, r"dataset must be a single split, got a dict of train; pick dataset\['train'\]"),
        (
            iter([{"prompt": "1"}]),
            "dataset must be a map-style dataset or a sequence of dicts, got list_iterator; .* prompt_source",
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


def test_a_frame_of_pandas_is_told_what_to_become(tokenizer):
    frame = pandas.DataFrame(rows(3))
    for make in (PromptSource, prompt_source):
        with pytest.raises(ValueError, match=r"got pandas' DataFrame; give datasets.Dataset.from_pandas\(...\) of it"):
            make(frame, tokenizer, seed=0)
    assert answers(PromptSource(datasets.Dataset.from_pandas(frame), tokenizer, seed=0).all()) == [0, 1, 2]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": {"degrees": 21}},
        {"role": "assistant", "thinking": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "user", "content": ({"type": "text", "text": "hi"},)},
    ],
)
def test_what_a_message_holds_besides_a_role_is_the_template_s_to_know(message):
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz_':{}[]()0123456789 ,")
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson | lower | replace('\"', '') }}{% endfor %}"
    (prompt,) = PromptSource([{"prompt": [message]}], tokenizer, seed=0).take(1)
    assert len(prompt.input_ids) > 10


@pytest.mark.parametrize("own", [{"padding": True}, {"tokenize": False}, {"truncation": True, "max_length": 2}])
def test_arguments_that_are_not_the_template_s_are_refused(own):
    with pytest.raises(ValueError, match=f"chat_template_kwargs must be arguments of the template.*{min(own)}"):
        PromptSource(
            [{"prompt": [{"role": "user", "content": "1"}]}], with_template(CHAT), chat_template_kwargs=own, seed=0
        )


def test_a_template_that_writes_nothing_gives_no_prompt():
    with pytest.raises(ValueError, match="prompt must give at least one token, got none in row 0"):
        PromptSource([{"prompt": [{"role": "user", "content": "1"}]}], with_template("{{ bos_token }}"), seed=0)


def test_an_iterable_dataset_of_torch_is_a_stream_also_with_a_length(tokenizer):
    class Three(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows(3))

        def __len__(self):
            return 3

    assert isinstance(prompt_source(Three(), tokenizer, seed=0, shuffle=False), PromptStream)


def test_a_chat_that_the_template_refuses_is_named():
    tokenizer = with_template(
        "{% for m in messages %}{{ raise_exception('no ' + m['role']) if m['role'] == 'x' }}{% endfor %}1"
    )
    chats = [{"prompt": TURN}, {"prompt": [{"role": "x", "content": ""}]}]
    with pytest.raises(ValueError, match="chat template accepts, got .* in row 1 .*no x"):
        PromptSource(chats, tokenizer, seed=0)


def test_a_prompt_at_the_limit_is_kept_and_bad_numbers_are_refused(tokenizer):
    assert len(PromptSource([{"prompt": "1234"}], tokenizer, seed=0, max_prompt_tokens=5)) == 1
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        source(tokenizer, seed=-1)
    with pytest.raises(ValueError, match="n must be at least 0, got -2; give a number of prompts"):
        source(tokenizer).take(-2)
    for wrong in (True, 2.0, "2"):
        with pytest.raises(ValueError, match="n must be an integer of at least 0, got "):
            source(tokenizer).first(wrong)
    assert source(tokenizer).take(np.int64(2)) == source(tokenizer).take(2)
    assert source(tokenizer).first(np.int64(2)) == source(tokenizer).first(2)


# --- PromptStream


class Again:
    """Not of the datasets library: can be iterated over again, and nothing else."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def from_generator(n):
    return datasets.IterableDataset.from_generator(lambda: iter(rows(n)))


def from_shards(n):
    return datasets.Dataset.from_list(rows(n)).to_iterable_dataset(num_shards=min(n, 3))


STREAMS = {
    "generator": from_generator,
    "shards": from_shards,
    "mapped": lambda n: from_shards(n).map(lambda row: {"double": 2 * row["answer"]}),
    "filtered in batches": lambda n: from_shards(n).filter(lambda batch: [True] * len(batch["prompt"]), batched=True),
    "shuffled": lambda n: from_shards(n).shuffle(seed=3, buffer_size=4),
    "shuffled, then mapped": lambda n: from_generator(n).shuffle(seed=3, buffer_size=3).map(lambda row: row),
    "interleaved with shuffled": lambda n: datasets.interleave_datasets(
        [from_generator(n), from_shards(n).shuffle(seed=1, buffer_size=2)]
    ),
    "not of datasets": lambda n: Again(rows(n)),
}
kinds_of_streams = pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())


def test_prompt_source_chooses_by_the_dataset(tokenizer):
    shared = dict(seed=0, max_prompt_tokens=9, chat_template_kwargs={})
    assert isinstance(prompt_source(rows(3), tokenizer, **shared), PromptSource)
    assert isinstance(prompt_source(datasets.Dataset.from_list(rows(3)), tokenizer, **shared), PromptSource)
    for make in STREAMS.values():
        assert isinstance(prompt_source(make(3), tokenizer, shuffle=False, **shared), PromptStream)
    for wrong in ({"train": rows(3)}, iter(rows(3)), 3, datasets.IterableDatasetDict(train=from_shards(3))):
        with pytest.raises(ValueError, match="dataset must be"):
            prompt_source(wrong, tokenizer, **shared)


def test_asking_for_shuffle_warns_unless_the_stream_shuffles_itself(tokenizer):
    with pytest.warns(UserWarning, match="shuffle works on map-style datasets only.*dataset.shuffle"):
        prompt_source(from_shards(5), tokenizer, seed=0, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompt_source(from_shards(5).shuffle(seed=0, buffer_size=3), tokenizer, seed=0, shuffle=True)


@pytest.mark.parametrize("kind", [kind for kind in STREAMS if "interleaved" not in kind])  # that one repeats rows
def test_a_stream_gives_every_row_once_an_epoch(tokenizer, kind):
    prompts = PromptStream(STREAMS[kind](7), tokenizer).take(14)
    assert sorted(answers(prompts[:7])) == sorted(answers(prompts[7:])) == list(range(7))
    assert [prompt.index for prompt in prompts] == list(range(14))
    assert all(tokenizer.decode(p.input_ids[1:]) == p.raw for p in prompts)


def test_a_stream_gives_the_prompts_of_a_map_style_dataset(tokenizer):
    assert PromptStream(from_generator(7), tokenizer).take(14) == source(tokenizer, 7, shuffle=False).take(14)


@kinds_of_streams
@pytest.mark.parametrize("taken", [0, 3, 7, 8, 17])
def test_a_resumed_stream_goes_on_where_it_stopped(tokenizer, make, taken):
    stream = PromptStream(make(7), tokenizer)
    stream.take(taken)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(make(7), tokenizer)
    resumed.take(2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == stream.state_dict() and resumed.position == taken
    again = PromptStream(make(7), tokenizer)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))  # saved before anything was taken
    expected = stream.take(30)
    assert resumed.take(13) + resumed.take(17) == expected == again.take(30)
    assert resumed.state_dict() == stream.state_dict() and resumed.epochs == stream.epochs >= 1


def test_a_saved_state_spares_reading_what_was_taken(tokenizer):
    read = []

    def watched(shard):
        for number in range(shard[0], shard[0] + 10):
            read.append(number)
            yield {"prompt": str(number)}

    def make():
        return PromptStream(datasets.IterableDataset.from_generator(watched, gen_kwargs={"shard": [0, 10]}), tokenizer)

    stream = make()
    stream.take(15)
    resumed = make()
    read.clear()
    resumed.load_state_dict(stream.state_dict())
    assert resumed.take(1)[0].raw == "15"
    assert 0 not in read and read[-1] == 15


@kinds_of_streams
def test_two_processes_see_the_same_stream(tokenizer, make):
    first, second = PromptStream(make(5), tokenizer), PromptStream(make(5), tokenizer)
    for n in (3, 0, 4, 9):
        assert first.take(n) == second.take(n)
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize("n", [1, 2])
@kinds_of_streams
def test_a_stream_shorter_than_a_batch_is_repeated(tokenizer, make, n):
    stream = PromptStream(make(n), tokenizer)
    assert set(answers(stream.take(16))) == set(range(n)) and stream.epochs >= 3


@kinds_of_streams
def test_first_and_all_move_nothing(tokenizer, make):
    stream, other = PromptStream(make(5), tokenizer), PromptStream(make(5), tokenizer)
    stream.take(8), other.take(8)
    before = stream.state_dict()
    first = stream.first(2)
    assert len(first) == 2 and stream.all()[:2] == first and set(answers(stream.all())) == set(range(5))
    assert stream.state_dict() == before and stream.take(9) == other.take(9)


def test_a_stream_of_chats_goes_through_the_template():
    chats = [{"prompt": [{"role": "user", "content": "1+"}]}, {"prompt": [{"role": "user", "content": "2"}]}]
    stream = prompt_source(
        datasets.IterableDataset.from_generator(lambda: iter(chats)), with_template(CHAT + "{{ think }}"), seed=0,
        shuffle=False, chat_template_kwargs={"think": ";"},
    )  # fmt: skip
    assert [p.input_ids for p in stream.take(3)] == [(BOS, 4, 13, 18, 16), (BOS, 5, 18, 16), (BOS, 4, 13, 18, 16)]
    assert stream.first(1)[0].raw == chats[0]["prompt"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": ""}, "not empty, got '' in row 2"),
        ({"prompt": None}, "got None in row 2"),
        ({"prompt": "1 x"}, "tokenizer can encode .*got '1 x' in row 2 .*UNK"),
        ({"prompt": "123456"}, r"max_prompt_tokens \(5\) tokens, got 7 in row 2"),
        ({"prompt": TURN}, "text in every row or chat messages in every row, got both .rows 0 and 2"),
        ({"text": "1"}, "column 'prompt', got text in row 2"),
        ({"prompt": "1", "answer": 2}, "same columns in every row, got prompt, answer in row 2 and prompt in row 0"),
        ("1", "dicts with a column 'prompt', got str in row 2"),
    ],
)
def test_a_bad_row_of_a_stream_is_named_when_it_comes(tokenizer, bad, message):
    stream = PromptStream(Again([{"prompt": "1"}, {"prompt": "2"}, bad]), tokenizer, max_prompt_tokens=5)
    stream.take(2)
    with pytest.raises(ValueError, match=message):
        stream.take(4)


def test_a_bad_row_keeps_its_number_in_later_batches(tokenizer):
    stream = PromptStream(Again([*rows(9), {"prompt": "x", "answer": 0}]), tokenizer)
    stream.take(4), stream.take(4)
    with pytest.raises(ValueError, match="got 'x' in row 9"):
        stream.take(2)


def test_faulty_streams_are_refused_at_construction(tokenizer):
    once = iter(rows(4))
    for dataset, message in (
        (Again([]), "dataset must hold at least one row, got an empty one"),
        (Again([{"question": "1"}]), "dataset must have a column 'prompt', got question in row 0"),
        (datasets.IterableDataset.from_generator(lambda: iter([{"prompt": ""}])), "got '' in row 0"),
        (iter(rows(2)), "dataset must be an iterable that can start again, got list_iterator; wrap"),
        (rows(2), "got list; .* give map-style datasets to PromptSource"),
    ):
        with pytest.raises(ValueError, match=message):
            PromptStream(dataset, tokenizer)
    stream = PromptStream(datasets.IterableDataset.from_generator(lambda: once), tokenizer)
    with pytest.raises(ValueError, match="rows in every epoch, got none in epoch 1; a generator function must start"):
        stream.take(9)


def test_the_state_of_another_stream_is_refused(tokenizer):
    state = PromptStream(from_generator(7), tokenizer).state_dict()
    with pytest.raises(ValueError, match="fingerprint must be that of the checkpoint"):
        PromptStream(from_generator(7).shuffle(seed=5, buffer_size=7), tokenizer).load_state_dict(state)
    with pytest.raises(ValueError, match="num_rows must be that of the checkpoint, None, got 7"):
        source(tokenizer, 7).load_state_dict(state)
    with pytest.raises(ValueError, match="num_rows must be that of the checkpoint, 7, got None"):
        PromptStream(from_generator(7), tokenizer).load_state_dict(source(tokenizer, 7).state_dict())
    longer = PromptStream(Again(rows(7)), tokenizer)
    longer.take(5)
    with pytest.raises(ValueError, match="dataset must have the 5 rows of the checkpoint's epoch, got 3"):
        PromptStream(Again(rows(3)), tokenizer).load_state_dict(longer.state_dict())


def test_a_stream_without_an_end_is_refused_where_all_of_it_is_needed(tokenizer, monkeypatch):
    monkeypatch.setattr("grpo_moe.data.stream._MOST_ROWS", 5)
    endless = datasets.IterableDataset.from_generator(lambda: ({"prompt": f"{i}"} for i in itertools.count()))
    assert len(PromptStream(endless.take(5), tokenizer).all()) == 5
    stream = PromptStream(endless, tokenizer)
    with pytest.raises(ValueError, match=r"must end within 5 rows .*, got a stream that goes on; .*dataset.take\(n\)"):
        stream.all()
    assert [prompt.raw for prompt in stream.take(7)] == [f"{i}" for i in range(7)]
