"""The tokenizer of the echo engine: one id per UTF-8 byte, so that every text has ids and every id a meaning.

Ids 0 .. 255 are the bytes, 256 is the end of sequence, 257 the beginning.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minisgl.tokenizer.decode import char_to_byte

ECHO_EOS = "<|eos|>"
ECHO_BOS = "<|bos|>"
ECHO_EOS_ID = 256
ECHO_BOS_ID = 257
ECHO_VOCAB_SIZE = 258
ECHO_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def echo_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=char_to_byte(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([ECHO_EOS, ECHO_BOS])
    return tokenizer
