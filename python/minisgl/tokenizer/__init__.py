"""Text to token ids and back, by `rust/minisgl-text` or its reference, and chat templates. No torch.

What a request's fields mean belongs to `server/`, the parts of an answer to `parsers/`. Start with `tokenizer.py`, then
`chat_template.py`; `pool.py` has the threads that encode.
"""

from minisgl.tokenizer.chat_template import ChatTemplate, read_chat_template
from minisgl.tokenizer.fill_in import FillIn
from minisgl.tokenizer.reference import NotEncodable, TooManyTokens
from minisgl.tokenizer.rendering import ChatTemplateError
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
