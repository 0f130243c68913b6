"""Counts tokens as the server does: by a model's own tokenizer, from Hugging Face's files.

Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. It also adds what vLLM
adds through transformers. The tokenizer's post-processor adds special tokens; if the configuration
has `add_bos_token` or `add_eos_token`, these replace what it adds. Prompts are neither truncated
nor padded.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from schedsvc_lab.workload.chat import ChatTemplate, Messages, plain_text

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
HOW_TO_GIVE_ONE = (
    f"give a folder that holds the model's {_FILE} (and {_CONFIG}), for example what "
    f"`hf download MODEL --include 'tokenizer*' '*.jinja' --local-dir DIR` fetches"
)


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the text names the file, says why, and how to give one."""


class ModelTokenizer:
    """Encodes, counts and decodes with a model's tokenizer.

    `template` is its chat template, None if it has none.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template

    @classmethod
    def load(cls, path: Path) -> "ModelTokenizer":
        """Load a folder, or one `tokenizer.json`. Raises TokenizerError and ChatTemplateError."""
        file = path / _FILE if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(f"{file}: no such file; {HOW_TO_GIVE_ONE}")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file}: not a tokenizer: {error}; {HOW_TO_GIVE_ONE}") from None
        config = _read_config(file.with_name(_CONFIG))
        special_tokens = _special_tokens(config)
        if config.keys() & {"add_bos_token", "add_eos_token"}:
            _set_post_processor(tokenizer, config, special_tokens)
        source = _template_source(file.with_name(_TEMPLATE), config)
        template = None if source is None else ChatTemplate(source, special_tokens)
        return cls(tokenizer, template)

    @cached_property
    def vocab_size(self) -> int:
        """Return how many tokens there are; ids are below the largest one that exists, plus 1."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def vocabulary(self) -> list[tuple[str, int]]:
        """Return the pieces of the model itself, as it spells them, by id: O(n log n)."""
        pieces = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        return sorted(
            ((piece, number) for piece, number in pieces.items() if number not in added),
            key=lambda item: item[1],
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Give the ids of a text. O(length).

        Lone surrogates, which are no text, are encoded as question marks.
        """
        ids: list[int] = self._tokenizer.encode(
            _sound(text), add_special_tokens=add_special_tokens
        ).ids
        return ids

    def encode_many(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Give the ids of many texts, on all cores."""
        sound = [_sound(text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(sound, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def count(self, text: str, add_special_tokens: bool = False) -> int:
        """Count the tokens of a text. O(length)."""
        return len(self.encode(text, add_special_tokens))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Give the text of ids, special tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def chat_text(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Return a conversation's text by the template, or plainly if there is none.

        The template writes its special tokens itself, so encode it without adding any. Raises
        ChatTemplateError if the template refuses the conversation.
        """
        if self.template is None:
            return plain_text(messages, add_generation_prompt)
        return self.template.render(messages, add_generation_prompt)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True
    ) -> list[int]:
        """Give the ids of a conversation. Raises ChatTemplateError."""
        return self.encode(self.chat_text(messages, add_generation_prompt))


def _sound(text: str) -> str:
    """Replace content that is no text, or the library refuses all of it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TokenizerError(f"{path}: {why}") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Find `bos_token` and its like, which are names or objects with a `content`."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            found[name] = value
    return found


def _set_post_processor(
    tokenizer: Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Add the tokens of `add_bos_token` and `add_eos_token` instead of the tokenizer's."""
    added: dict[str, list[tuple[str, int]]] = {"bos_token": [], "eos_token": []}
    for name, tokens in added.items():
        token = special_tokens.get(name)
        if config.get(f"add_{name}") and token is not None:
            number = tokenizer.token_to_id(token)
            if number is None:
                raise TokenizerError(f"{_CONFIG}: {name} {token!r} is not in the vocabulary")
            tokens.append((token, number))
    before, after = ([f"{token}:0" for token, _ in tokens] for tokens in added.values())
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=None,
        special_tokens=[*added["bos_token"], *added["eos_token"]],
    )


def _template_source(path: Path, config: dict[str, Any]) -> str | None:
    """Find the chat template: a separate file, or in the configuration, alone or by name."""
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise TokenizerError(f"{path}: {why}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
