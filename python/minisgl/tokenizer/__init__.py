"""Text to token ids and back, by `rust/minisgl-text`, and chat templates. No torch."""

from minisgl.tokenizer.chat_template import ChatTemplate, ChatTemplateError, read_chat_template
from minisgl.tokenizer.fill_in import FillIn
from minisgl.tokenizer.tokenizer import NotEncodable, Tokenizer, TokenizerError, TooManyTokens, bad_token_ids

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
