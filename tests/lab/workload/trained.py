"""Trains small tokenizers of different kinds on the standard library's own text."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCABULARY = 1_500
_LIBRARY = Path(sysconfig.get_path("stdlib"))
TEXTS = [str(_LIBRARY / name) for name in ("argparse.py", "typing.py", "asyncio/base_events.py")]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if loop.index0 and message['role'] == messages[loop.index0 - 1]['role'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level_bpe() -> Tokenizer:
    """Train GPT's kind: bytes, and no special tokens are added."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train(TEXTS, trainer)
    return made


def unigram() -> Tokenizer:
    """Train SentencePiece's kind: a space before each text, and a token that begins it."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    made.train(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    return made


def word_piece() -> Tokenizer:
    """Train BERT's kind: lower case, and tokens on both sides of a text."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    made.train(
        TEXTS,
        trainers.WordPieceTrainer(
            vocab_size=VOCABULARY, special_tokens=special, show_progress=False
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def across_words() -> Tokenizer:
    """Train a BPE that joins words: hardly a row of words stays as many tokens."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    made.decoder = decoders.Replace("▁", " ")
    made.train(TEXTS, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    return made


def bytes_alone() -> Tokenizer:
    """Each byte is a token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train(TEXTS, trainer)
    return made


KINDS = {
    "bpe": byte_level_bpe,
    "unigram": unigram,
    "word-piece": word_piece,
    "across-words": across_words,
    "bytes": bytes_alone,
}


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write a folder as models are published."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
