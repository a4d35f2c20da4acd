"""From a conversation to ids, and which of them are the responses to learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.config import DataConfig
from freerun.data.extras import require
from freerun.data.records import Message
from freerun.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from freerun.errors import DataError


@dataclass(frozen=True)
class Span:
    """A stretch of rendered text."""

    text: str
    learn: bool
    """It is a response: the loss is taken here."""
    ends: bool
    """An end of text follows."""


def chat_template(config: DataConfig, tokenizer: Tokenizer) -> str:
    """The template that a config asks for; empty stands for the plain rendering."""
    given = config.chat_template
    if not given:
        return tokenizer.chat_template if isinstance(tokenizer, HuggingFaceTokenizer) else ""
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except OSError:
        raise DataError(
            f"data.chat_template is {given!r}, which is neither a file that can be read nor a Jinja template."
        ) from None


class Chat:
    """Renders and encodes conversations with one tokenizer and one template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = _compile(template) if template else None
        self._names = tokenizer.special_tokens if isinstance(tokenizer, HuggingFaceTokenizer) else {}

    def encode(self, messages: list[Message]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Ids, and a 1 for each that is part of a response or ends one."""
        responses = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: responses[-1] + 1] if responses else []
        spans = _plain(messages) if self._template is None else self._templated(messages, responses)
        ids: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)]
        learn: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
        for span in spans:
            part = self._tokenizer.encode(span.text).astype(np.uint32)
            if span.ends and self._tokenizer.end_of_text not in part:  # a template may write it itself
                part = np.append(part, np.uint32(self._tokenizer.end_of_text))
            ids.append(part)
            learn.append(np.full(len(part), span.learn, dtype=np.uint8))
        return np.concatenate(ids), np.concatenate(learn)

    def _templated(self, messages: list[Message], responses: list[int]) -> list[Span]:
        """All responses, or only the last where a template shows earlier turns in another way (without thoughts)."""
        for chosen in (responses, responses[-1:]):
            spans = self._continuations(messages, chosen)
            if spans is not None:
                return spans
        raise DataError(
            "data.chat_template does not show a response as a continuation of its prompt, so the response can't be "
            "told apart; give a template that does, or one that heeds add_generation_prompt."
        )

    def _continuations(self, messages: list[Message], responses: list[int]) -> list[Span] | None:
        spans: list[Span] = []
        written = ""
        for place in responses:
            prompt = self._render(messages[:place], answer=True)
            whole = self._render(messages[: place + 1], answer=False)
            if not (prompt.startswith(written) and whole.startswith(prompt)):
                return None
            last = place == responses[-1]
            spans += [Span(prompt[len(written) :], False, False), Span(whole[len(prompt) :], True, last)]
            written = whole
        return spans

    def _render(self, messages: list[Message], answer: bool) -> str:
        assert self._template is not None
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=answer, **self._names)
        except require("jinja2.exceptions", "A chat template").TemplateError as error:
            raise DataError(f"data.chat_template can't render a conversation of the data ({error}).") from None
        return text


def _plain(messages: list[Message]) -> Iterator[Span]:
    """The rendering without a template: each message on a new line, after the name of its role."""
    for place, message in enumerate(messages):
        opening = ("\n" if place else "") + message["role"].capitalize() + ":"
        if message["role"] == "assistant":
            yield Span(opening, False, False)
            yield Span(" " + message["content"], True, True)
        else:
            yield Span(opening + " " + message["content"], False, False)


def _compile(template: str) -> Any:
    sandbox = require("jinja2.sandbox", "A chat template")
    exceptions = require("jinja2.exceptions", "A chat template")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse  # no strftime_now: what is learnt must not depend on the day
    try:
        return environment.from_string(template)
    except exceptions.TemplateError as error:
        raise DataError(f"data.chat_template is no valid Jinja template ({error}).") from None


def _refuse(message: str) -> None:
    """What templates call on conversations that they don't accept."""
    raise DataError(f"data.chat_template refuses a conversation of the data ({message}).")
