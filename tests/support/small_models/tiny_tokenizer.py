"""The files of a model that generates text, as small as they can be: one token a byte."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BEGIN, END, PAD = 0, 1, 2
"""Token ids of <|im_start|>, <|im_end|> and <|pad|>; byte b is token b + 3."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


MORE = 259
"""The token id of the first further special token."""


def tiny_tokenizer(*more_special: str) -> Tokenizer:
    """A byte-level tokenizer without merges, so that characters and stop texts span tokens."""
    vocabulary = {"<|im_start|>": BEGIN, "<|im_end|>": END, "<|pad|>": PAD}
    # GPT-2's letters of the bytes, in their order: printable ones stand for themselves.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + at) for at, byte in enumerate(others)})
    vocabulary.update({letters[byte]: byte + 3 for byte in range(256)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>", "<|pad|>", *more_special)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    return tokenizer


def tokens_of(text: str) -> list[int]:
    """The tokens of a text without special ones."""
    return [byte + 3 for byte in text.encode()]


def text_model(
    root: Path,
    name: str = "tiny",
    version: str = "1",
    *,
    template: str = TEMPLATE,
    special: tuple[str, ...] = (),
    settings: str = "",
) -> Path:
    """Writes the folder of a model below a repository and returns it.

    `special` are further special tokens; `settings` are lines of its model.yaml, if it has one.
    """
    folder = root / name / version
    folder.mkdir(parents=True)
    tiny_tokenizer(*special).save(str(folder / "tokenizer.json"))
    begin = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    config = {"eos_token": "<|im_end|>", "bos_token": begin}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": MORE + len(special)}))
    if settings:
        manifest = f"platform: decoder\nfile: model.safetensors\n{settings}\n"
        (folder / "model.yaml").write_text(manifest)
    return folder
