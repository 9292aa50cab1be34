"""The tokenizer of the echo engine: one id per UTF-8 byte, so that every text has ids and every id is text. Ids 0 ..
255 are the bytes, 256 is the end of sequence, 257 the beginning."""

from __future__ import annotations

import json

ECHO_EOS = "<|eos|>"
ECHO_BOS = "<|bos|>"
ECHO_EOS_ID = 256
ECHO_BOS_ID = 257
ECHO_VOCAB_SIZE = 258
ECHO_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def char_to_byte() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (GPT-2): printable Latin-1 bytes stay, the others begin at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def echo_json() -> str:
    """Return the tokenizer as the text of a tokenizer.json."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = ((ECHO_EOS_ID, ECHO_EOS), (ECHO_BOS_ID, ECHO_BOS))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": token, "content": text, **plain} for token, text in special],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": char_to_byte(), "merges": []},
        }
    )
