"""WordPiece, the vocabularies of BERT, through Hugging Face's tokenizers.

The library is an extra (`bert`): only who brings a BERT of their own needs it.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax import extras
from synthq_jax.data import vocabulary

__all__ = ["WordPiece", "load"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordPiece:
  """A vocabulary of BERT, with the methods of SentencePiece's."""

  tokenizer: Any = dataclasses.field(repr=False)
  """A `tokenizers.Tokenizer`."""
  vocab_size: int
  """Its pieces, special ones included."""
  cls_id: int
  """[CLS], the first token of every row."""
  sep_id: int
  """[SEP], the last token of every text."""

  def encode(self, text: str) -> list[int]:
    """Returns the pieces of a text, without special ones."""
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def rows(
    self, texts: Sequence[str], *, length: int
  ) -> Int[np.ndarray, "text length"]:
    """Returns "[CLS] text [SEP]" for each text, cut and padded to `length`."""
    found = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
    rows = [
      [self.cls_id, *encoding.ids[: length - 2], self.sep_id]
      for encoding in found
    ]
    return vocabulary.pad(rows, length)


def load(folder: str | os.PathLike) -> WordPiece:
  """Reads the vocabulary of a BERT folder: tokenizer.json, or vocab.txt.

  Args:
    folder: as Hugging Face writes it.

  Raises:
    MissingExtraError: if the library is not installed.
    ValueError: if there is no such file, it cannot be read, or it is not one of
      BERT's, whose piece 0 is [PAD].
  """
  with extras.required("bert"):
    import tokenizers

  folder = pathlib.Path(folder)
  whole, pieces = folder / "tokenizer.json", folder / "vocab.txt"
  if not whole.is_file() and not pieces.is_file():
    raise ValueError(
      f"{folder}: expected the vocabulary of a BERT, got neither"
      f" {whole.name} nor {pieces.name}"
    )
  path = whole if whole.is_file() else pieces
  try:
    if path == whole:
      tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
    else:
      tokenizer = _from_pieces(tokenizers, path)
  except Exception as error:  # the library has no kinds of its own
    raise ValueError(
      f"{path}: expected the vocabulary of a BERT, got a file that cannot be"
      f" read ({error}); copy it again"
    ) from error
  tokenizer.no_truncation()
  tokenizer.no_padding()
  names = ("[PAD]", "[CLS]", "[SEP]")
  ids = {name: tokenizer.token_to_id(name) for name in names}
  if ids["[PAD]"] != 0 or None in ids.values():
    raise ValueError(
      f"{path}: expected the pieces [CLS] and [SEP], and [PAD] as piece 0, got"
      f" {ids}"
    )
  return WordPiece(
    tokenizer=tokenizer,
    vocab_size=tokenizer.get_vocab_size(),
    cls_id=ids["[CLS]"],
    sep_id=ids["[SEP]"],
  )


def _from_pieces(tokenizers: Any, path: pathlib.Path) -> Any:
  settings = path.with_name("tokenizer_config.json")
  fields = json.loads(settings.read_text()) if settings.is_file() else {}
  model = tokenizers.models.WordPiece.from_file(
    os.fspath(path), unk_token="[UNK]"
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
    lowercase=fields.get("do_lower_case", True)
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  return tokenizer
