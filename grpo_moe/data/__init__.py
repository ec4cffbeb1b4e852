"""Turns a dataset or a stream with a prompt column into tokenised prompts, in an order that can be resumed."""

from .source import PromptSource, prompt_source
from .stream import PromptStream
from .tokens import character_tokenizer

__all__ = ["PromptSource", "PromptStream", "character_tokenizer", "prompt_source"]
