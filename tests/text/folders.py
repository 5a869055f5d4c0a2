"""Folders with tokenizers, small: a tokenizer.json trained here, and a tiktoken.model as the Kimi releases have it."""

import base64
import json
from pathlib import Path

TEXT = (
    """def walk(tree):
    for node in tree:
        if node.accepted:
            yield node.token  # déjà vu, naïve café, 草稿树, 🌲🌳
class Tree:
    def __init__(self, tokens, parents):
        self.tokens, self.parents = tokens, parents
"""
    * 20
)

CHAT = (
    "{%- for message in messages -%}<|im_{{ message.role }}|>{{ message.content }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>{%- endif -%}"
)
SPECIAL = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>"]


def settings(first_special: int) -> dict:
    tokens = {str(first_special + i): {"content": name, "special": True} for i, name in enumerate(SPECIAL)}
    tokens[str(first_special + len(SPECIAL))] = {"content": "<think>", "special": False}
    return {
        "added_tokens_decoder": tokens,
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "chat_template": CHAT,
    }


def write_json_tokenizer(folder: Path, vocab_size: int = 300) -> Path:
    """A byte-level BPE whose special tokens come first, as `tokenizers` trains it."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(0)))
    return folder


def merges() -> list[bytes]:
    """The bytes, then a few words and every prefix of them, longest last, so that each is a merge of two others."""
    words = ["def", " tree", " node", " self", "tokens", "草稿", "🌲", "  ", " for", "123"]
    found = [bytes([byte]) for byte in range(256)]
    for word in words:
        data = word.encode()
        for length in range(2, len(data) + 1):
            if data[:length] not in found:
                found.append(data[:length])
    return found


def write_tiktoken(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ranks = merges()
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(len(ranks))))
    return folder
