"""From text to token ids and back."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freerun.data.extras import require
from freerun.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "[SEP]")
_HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
_PIECE = 1 << 18


class Tokenizer(Protocol):
    """What the rest of freerun asks of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_text(self) -> int:
        """The id that stands between documents."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same ids."""

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """The ids of a text, without an end of text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD, and the end of text becomes nothing."""


@dataclass(frozen=True)
class BytesTokenizer:
    """Ids 0 … 255 are the bytes of the UTF-8 text, 256 is the end of text."""

    vocabulary: int = 257
    end_of_text: int = 256
    fingerprint: str = "bytes"

    def encode(self, text: str) -> NDArray[np.uint16]:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class IdTokenizer:
    """Stands in where only ids are known (data.format tokens without a tokenizer): text is the ids, in decimal.

    The last id of the vocabulary counts as the end of text, as in GPT-2's 50257.
    """

    vocabulary: int

    @property
    def end_of_text(self) -> int:
        return self.vocabulary - 1

    @property
    def fingerprint(self) -> str:
        return f"ids-{self.vocabulary}"

    def encode(self, text: str) -> NDArray[np.int64]:
        try:
            ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        except ValueError:
            raise DataError(
                "Without data.tokenizer a text is written as ids such as '17 42'; "
                "set data.tokenizer to the one that made the data to write words."
            ) from None
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            raise DataError(f"An id of the text is not below data.vocabulary, which is {self.vocabulary}.")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids if i != self.end_of_text)


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A tokenizer.json, with what its folder says about the end of text and chats."""

    backend: Any = field(repr=False)
    vocabulary: int
    end_of_text: int
    fingerprint: str
    chat_template: str
    special_tokens: dict[str, str]
    """Names that chat templates use (bos_token, eos_token, …)."""
    path: str
    """The tokenizer.json on this machine."""

    def encode(self, text: str) -> NDArray[np.uint32]:
        encode = self.backend.encode
        parts = [encode(piece, add_special_tokens=False).ids for piece in _pieces(text)]
        return np.concatenate([np.array(ids, dtype=np.uint32) for ids in parts])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text


def _pieces(text: str) -> Iterator[str]:
    """The text cut at starts of lines, because one call on a whole book takes gigabytes of memory."""
    start = 0
    while len(text) - start > _PIECE:
        boundary = re.compile(r"\n(?=\S)").search(text, start + _PIECE)
        if boundary is None:
            break
        yield text[start : boundary.end()]
        start = boundary.end()
    yield text[start:]


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, a folder that has one, or the name of a tokenizer on the Hugging Face hub."""
    if name == "bytes":
        return BytesTokenizer()
    return _read(_file(name), name)


def _file(name: str) -> Path:
    """The tokenizer.json that a name stands for, fetched from the hub if it is not on this machine."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        folder = path
    elif re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.endswith(".json"):
        folder = _fetch(name)
    else:
        raise DataError(
            f"data.tokenizer is {name!r}, which is no file; "
            "give bytes, a tokenizer.json, its folder or the name of a Hugging Face tokenizer."
        )
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"data.tokenizer is {name!r}, which has no tokenizer.json; AutoTokenizer.from_pretrained(…)"
            ".save_pretrained(folder) writes one for most tokenizers."
        )
    return folder / "tokenizer.json"


def _fetch(name: str) -> Path:
    hub = require("huggingface_hub", f"data.tokenizer {name!r}, which is no file and so a name on the hub,")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"data.tokenizer is {name!r}, which is no file here and could not be fetched from the hub ({reason}); "
            "give bytes, or the path of a tokenizer.json or of its folder."
        ) from None


def _read(path: Path, name: str) -> HuggingFaceTokenizer:
    library = require("tokenizers", f"data.tokenizer {name!r}")
    try:
        backend = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"data.tokenizer is {name!r}, but {str(path)!r} is no tokenizer.json ({error}).") from None
    backend.no_truncation()
    backend.no_padding()
    settings = _settings(path.parent)
    special = {key: _content(value) for key, value in settings.items() if key.endswith("_token") and value}
    end = _end_of_text(backend, special, name)
    digest = hashlib.sha256(path.read_bytes() + end.to_bytes(8, "little")).hexdigest()[:32]
    return HuggingFaceTokenizer(
        backend=backend,
        vocabulary=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        end_of_text=end,
        fingerprint=digest,
        chat_template=_chat_template(path.parent, settings),
        special_tokens=special,
        path=str(path),
    )


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _end_of_text(backend: Any, special: dict[str, str], name: str) -> int:
    for token in (special.get("eos_token"), *_USUAL_ENDS):
        number = backend.token_to_id(token) if token else None
        if number is not None:
            return int(number)
    raise DataError(
        f"data.tokenizer is {name!r}, which has no end-of-text token; "
        "name one as eos_token in a tokenizer_config.json beside its tokenizer.json."
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry["name"] == "default"), "")
    return str(template)


class StreamDecoder:
    """Text as it is generated: push ids one by one, and get back what is certain so far, never half a character."""

    _PATIENCE = 16  # ids without one whole character at their end: this is no text, show what there is

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # decoded again with the new ids: spaces depend on what stands before
        self._pending: list[int] = []

    def push(self, id: int) -> str:
        """The text that this id completes, possibly none."""
        self._pending.append(int(id))
        text = self._tokenizer.decode(self._shown + self._pending)
        if text.endswith("\ufffd") and len(self._pending) < self._PATIENCE:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """What is still held back when no more ids will come."""
        return self._show(self._tokenizer.decode(self._shown + self._pending))

    def _show(self, text: str) -> str:
        new = text[len(self._tokenizer.decode(self._shown)) :]
        if self._pending:
            self._shown, self._pending = self._pending, []
        return new
