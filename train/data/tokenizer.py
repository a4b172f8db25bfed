"""Text to token ids and back: bytes, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np

from train.data.errors import DataError

# Names that published tokenizers give the end of a document, where no tokenizer_config.json says which it is.
_END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# One call of a tokenizer needs many times the memory of its text.
_PIECE = 1 << 20


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    vocab_size: int
    """One more than the largest id, with the end of document: the smallest legal vocabulary of a model."""
    eod: int
    """The id that closes each document."""
    needs_utf8: bool
    fingerprint: str
    """Equal where the same text gives the same ids."""

    def encode(self, text: str) -> np.ndarray: ...

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@attrs.frozen
class ByteTokenizer:
    """A token is a byte of the UTF-8 text, ids 0 to 255; 256 ends a document."""

    vocab_size: int = attrs.field(default=257, init=False)
    eod: int = attrs.field(default=256, init=False)
    needs_utf8: bool = attrs.field(default=False, init=False)
    fingerprint: str = attrs.field(default="bytes", init=False)

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of a text, without an end of document."""
        return self.encode_documents([text.encode(errors="replace")])[0]

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids [n] of each text, without an end of document."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids: what is no UTF-8 becomes U+FFFD; ids that are no byte (as 256) are left out."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")


@attrs.frozen(eq=False)
class HFTokenizer:
    """A `tokenizers.Tokenizer`, read by :func:`load_tokenizer`."""

    vocab_size: int
    eod: int
    fingerprint: str
    inner: Any = attrs.field(repr=False)
    needs_utf8: bool = attrs.field(default=True, init=False)

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of a text, without begin or end of document. Long texts are encoded in pieces, see `_pieces`."""
        return self.encode_documents([text.encode(errors="replace")])[0]

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids [n] of each text (UTF-8), without begin or end of document; in parallel over the texts."""
        pieces = [list(_pieces(text.decode())) for text in texts]
        try:
            encodings = iter(self.inner.encode_batch_fast([p for ps in pieces for p in ps], add_special_tokens=False))
        except Exception as error:  # tokenizers raises bare Exception: a vocabulary without its unknown token, say
            raise DataError(f"the tokenizer cannot encode this text: {error}; use another tokenizer.json") from error
        return [np.concatenate([np.asarray(next(encodings).ids, np.uint32) for _ in ps]) for ps in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids; special tokens and ids that the tokenizer lacks (a padded vocabulary) are left out."""
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self.inner.decode(known, skip_special_tokens=True)


def load_tokenizer(name: str) -> Tokenizer:
    """`"bytes"`, or the path of a tokenizer.json or its folder.

    The end of a document is the `eos_token` of the tokenizer_config.json beside it, else a special token with a usual
    name, else a new id after the last. Raises :class:`DataError` when the file is missing or is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer: cannot read {path}: {error.strerror or error}; "
            "legal are 'bytes' and the path of a tokenizer.json"
        ) from error
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError as error:
        raise DataError(
            f"{path}: needs the tokenizers package; install it with: pip install 'functitan[text]'"
        ) from error
    try:
        inner = Inner.from_buffer(content)
    except Exception as error:  # tokenizers raises bare ValueError and Exception for every fault of the file
        raise DataError(f"{path} is not a Hugging Face tokenizer.json: {error}; fetch or export it again") from error
    # The file may carry the truncation and padding of the model that it was made for: texts would lose their ends.
    inner.no_truncation()
    inner.no_padding()
    vocab = inner.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    end = _end_token(path, vocab)
    eod = size if end is None else vocab[end]
    return HFTokenizer(
        vocab_size=max(size, eod + 1), eod=eod, fingerprint=f"{hashlib.sha256(content).hexdigest()}:{eod}", inner=inner
    )


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises :class:`DataError` if the tokenizer can give an id that a model with `vocab_size` ids has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1} and the model a vocabulary of {vocab_size}: "
            f"set the model's vocab_size to {tokenizer.vocab_size} or more, or choose another --data.tokenizer"
        )


def _end_token(path: Path, vocab: dict[str, int]) -> str | None:
    beside = path.with_name("tokenizer_config.json")
    if beside.exists():
        try:
            token = json.loads(beside.read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(
                f"{beside} cannot be read as a JSON object: {error}; fetch it again, or remove it"
            ) from error
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in vocab:
            return token
    return next((name for name in _END_NAMES if name in vocab), None)


def _pieces(text: str) -> Iterator[str]:
    """Cuts a text of more than `_PIECE` characters after a newline, where hardly a tokenizer joins tokens."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.find("\n", start + _PIECE) + 1
        if stop == 0:
            break
        yield text[start:stop]
        start = stop
    yield text[start:]
