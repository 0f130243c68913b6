"""Renders chat templates: how a conversation becomes the text that a model sees.

Templates are Jinja, rendered as Hugging Face's transformers does: in a sandbox, with blocks
trimmed, `raise_exception`, and the `generation` and `break` tags. There is no `strftime_now`, since
a workload must not change with the day; templates that use it ask whether it is there.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, object]]


class ChatTemplateError(ValueError):
    """A template cannot be read, or it refuses a conversation; the text says why."""


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks what the model says; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - so Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the block's body in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: str) -> NoReturn:
    raise ChatTemplateError(reason)


def _json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class ChatTemplate:
    """Holds one template with its tokenizer's special tokens (`bos_token`, `eos_token`, ...).

    Raises ChatTemplateError if the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except JinjaError as error:
            raise ChatTemplateError(f"the chat template cannot be read: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation. Raises ChatTemplateError if the template refuses.

        Many refuse roles that do not alternate, or a system message.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may raise anything, from arithmetic to lookups
            raise ChatTemplateError(f"the chat template fails: {error}") from None


def plain_text(messages: Messages, add_generation_prompt: bool = True) -> str:
    """Join a conversation without a template: a line `<role>` and the content for each message.

    A line `<assistant>` asks for the answer.
    """
    parts = [f"<{message['role']}>\n{message['content']}\n" for message in messages]
    if add_generation_prompt:
        parts.append("<assistant>\n")
    return "".join(parts)
