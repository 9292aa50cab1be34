"""Writes a trace in Qwen-Bailian's format to stdout: 300 requests, half of which go on from an earlier one. The real
files were not at hand."""

import json
import random

draw = random.Random(0)
chats, now, next_id = [], 0.0, 0
for number in range(300):
    now += draw.expovariate(4.0)
    parent = draw.choice(chats) if chats and draw.random() < 0.5 else None
    kept = parent["hash_ids"][:-1] if parent else list(range(8))  # a system prompt of 128 tokens
    length = 16 * len(kept) + draw.randint(40, 900)
    new = -(-length // 16) - len(kept)
    one = {
        "chat_id": number,
        "parent_chat_id": parent["chat_id"] if parent else -1,
        "timestamp": round(now, 3),
        "input_length": length,
        "output_length": draw.randint(20, 300),
        "type": "text",
        "turn": parent["turn"] + 1 if parent else 1,
        "hash_ids": kept + [8 + next_id + i for i in range(new)],
    }
    next_id += new
    chats.append(one)
    print(json.dumps(one))
