"""Text to token ids and back, by `rust/minisgl-text` or its Python reference, and chat templates. No torch. The meaning
of request fields belongs to `server/`, the parsing of outputs to `parsers/`. Start with `tokenizer.py`, then
`chat_template.py`; `pool.py` has the threads that encode."""

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
