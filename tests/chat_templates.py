"""Tokenizers as those of Qwen, Llama, Gemma and Mistral, with what matters of their chat templates, without a hub."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN3 = """\
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.searching and m.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- else %}
        {%- set thought, said = '', m.content %}
        {%- if '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- said + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """\
{{ bos_token }}
{%- for m in messages %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """\
{{ bos_token }}
{%- for m in messages %}
    {{- ' [INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token }}
{%- endfor %}"""
CORPUS = ["user assistant system model", "The answer is 12, 34 or 56.", "think about it: 1 + 2 = 3\n\nyes", "ab abc"]

KINDS = {  # template, bos, eos, other special tokens, whether encoding puts BOS first, whether words carry spaces
    "qwen2.5": (CHATML, None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"], False, False),
    "qwen3": (QWEN3, None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>", "<think>", "</think>"], False, False),
    "qwen with a bos that it never adds": (CHATML, "<|endoftext|>", "<|im_end|>", ["<|im_start|>"], False, False),
    "llama3": (
        LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"], True, False,
    ),
    "gemma": (GEMMA, "<bos>", "<end_of_turn>", ["<start_of_turn>"], True, False),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"], True, True),
    "llama with chatml": (CHATML, "<s>", "<|im_end|>", ["<|im_start|>"], True, True),  # leaves BOS to the tokenizer
}  # fmt: skip


def chat_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, or one whose first word gets a space, with the template and special tokens."""
    template, bos, eos, others, adds_bos, has_spaces = KINDS[kind]
    special = [token for token in (bos, eos, *others) if token is not None]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if has_spaces else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if has_spaces:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace()
        special, alphabet = ["<unk>", *special], list("▁\n") + [chr(i) for i in range(33, 127)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(vocab_size=420, **options))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=eos)
    made.chat_template = template
    return made
