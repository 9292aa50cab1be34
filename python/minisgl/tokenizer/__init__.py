"""Text to token ids and back: encoding, chat templates, incremental detokenization, stop strings. No torch."""

from minisgl.tokenizer.bad_words import bad_token_ids
from minisgl.tokenizer.chat_template import ChatTemplate, ChatTemplateError, read_chat_template
from minisgl.tokenizer.decode import IncrementalDecoder, StopMatcher, TextStream
from minisgl.tokenizer.fill_in import FillIn
from minisgl.tokenizer.tokenizer import NotEncodable, Tokenizer, TokenizerError, TooManyTokens

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "FillIn",
    "IncrementalDecoder",
    "NotEncodable",
    "StopMatcher",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "TooManyTokens",
    "bad_token_ids",
    "read_chat_template",
]
