"""Text to token ids and back, by `rust/minisgl-text` or its reference, and chat templates. No torch."""

from minisgl.tokenizer.chat_template import ChatTemplate, ChatTemplateError, read_chat_template
from minisgl.tokenizer.fill_in import FillIn
from minisgl.tokenizer.reference import NotEncodable, TooManyTokens
from minisgl.tokenizer.tokenizer import Tokenizer, TokenizerError, bad_token_ids

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "FillIn",
    "NotEncodable",
    "Tokenizer",
    "TokenizerError",
    "TooManyTokens",
    "bad_token_ids",
    "read_chat_template",
]
