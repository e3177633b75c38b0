"""Text to token ids and back, from the checkpoint's own vocabulary and merges."""

from collections.abc import Iterable
from typing import Any

from jaxcp.errors import JaxcpError, invalid
from jaxcp.models.checkpoint import Vocabulary


class Tokenizer:
    """Byte-level BPE with llama.cpp's pre-tokenizer `smollm`: every digit alone, then GPT-2's cut.

    Special tokens (<|im_end|>) are recognised in the text. Nothing is added: no start token, no template, no strip.

    Args:
      vocabulary: as read from the file.

    Raises:
      JaxcpError: the `tokenizers` library is not installed.
      NotImplementedError: another pre-tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary):
        if vocabulary.pre_tokenizer != "smollm":
            raise invalid(
                "model_file",
                f"pre-tokenizer {vocabulary.pre_tokenizer!r}",
                "'smollm'",
                "Other pre-tokenizers are not built.",
                NotImplementedError,
            )
        self.end = vocabulary.end
        self._bpe = _byte_level_bpe(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, taken verbatim."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._bpe.decode(list(tokens), skip_special_tokens=False)

    def stream(self) -> "TextStream":
        """Turns tokens into text as they arrive."""
        return TextStream(self)


class TextStream:
    """Text of tokens that arrive one by one; a character spread over several tokens comes out whole.

    All pieces joined are `Tokenizer.decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        return "" if text.endswith("\ufffd") else self._flushed(text)

    def rest(self) -> str:
        """What is still held back at the end of the text."""
        return self._flushed(self._tokenizer.decode(self._held))

    def _flushed(self, text: str) -> str:
        self._held = []
        return text


def _byte_level_bpe(vocabulary: Vocabulary) -> Any:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ModuleNotFoundError as missing:
        raise JaxcpError(f"a tokenizer needs the package {missing.name}. Run: pip install 'jaxcp[models]'") from missing
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    bpe = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [  # pyright: ignore[reportAttributeAccessIssue]
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    bpe.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in vocabulary.special]
    )
    return bpe
