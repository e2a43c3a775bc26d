"""Tokenizes with BERT's WordPiece vocabularies, through Hugging Face tokenizers.

tokenizer_config.json sets how letter case, accents and Chinese characters are
treated; it overrides tokenizer.json, as in transformers. The lower-casing of
sentence-transformers comes before both. The library is an extra (`bert`): only
users with their own BERT need it.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from synthq_jax import extras
from synthq_jax.data import vocabulary
from synthq_jax.models.checkpoints import sentence_folders

__all__ = [
  "WHOLE",
  "WordPiece",
  "is_bert",
  "load",
  "lower_case",
]

_SETTINGS = "tokenizer_config.json"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BERTS = (
  "BertTokenizer",
  "BertTokenizerFast",
  "DistilBertTokenizer",
  "DistilBertTokenizerFast",
)
_OPTIONS = {
  "lowercase": ("do_lower_case", True),
  "strip_accents": ("strip_accents", None),  # None: as lower case
  "handle_chinese_chars": ("tokenize_chinese_chars", True),
}
"""Options of a normalizer, their names in tokenizer_config.json and defaults."""
_read = functools.partial(sentence_folders.read_fields, missing_ok=True)
WHOLE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of tokenizers whose settings stand in tokenizer.json alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordPiece:
  """Tokenizes texts with a vocabulary of BERT."""

  tokenizer: Any = dataclasses.field(repr=False)
  """A `tokenizers.Tokenizer`."""
  vocab_size: int
  """Number of pieces, including special ones."""
  cls_id: int
  """Id of [CLS], the first token of every row."""
  sep_id: int
  """Id of [SEP], the last token of every text."""

  def encode(self, text: str) -> list[int]:
    """Returns the piece ids of a text, without special ones."""
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def rows(
    self, texts: Sequence[str], *, length: int
  ) -> Int[np.ndarray, "text length"]:
    """Returns "[CLS] text [SEP]" for each text, cut and padded to `length`."""
    encodings = self.tokenizer.encode_batch(
      list(texts), add_special_tokens=False
    )
    rows = [
      [self.cls_id, *encoding.ids[: length - 2], self.sep_id]
      for encoding in encodings
    ]
    return vocabulary.pad(rows, length)


def load(folder: str | os.PathLike) -> WordPiece:
  """Loads the vocabulary of a BERT folder from tokenizer.json, or else vocab.txt.

  Args:
    folder: a model folder of Hugging Face or sentence-transformers.

  Raises:
    MissingExtraError: if the library is not installed.
    ValueError: if neither file exists, it cannot be read, it lacks [CLS], [SEP] or
      [PAD] as piece 0, or its settings ask for another tokenizer.
  """
  with extras.required("bert"):
    import tokenizers

  folder = pathlib.Path(folder)
  json_path, txt_path = folder / "tokenizer.json", folder / "vocab.txt"
  if not json_path.is_file() and not txt_path.is_file():
    raise ValueError(
      f"{folder}: expected the vocabulary of a BERT, got neither"
      f" {json_path.name} nor {txt_path.name}"
    )
  path = json_path if json_path.is_file() else txt_path
  options, is_whole = _read_settings(folder)
  texts = sentence_folders.model_settings(folder)
  try:
    if path == json_path:
      tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
    else:
      tokenizer = _build_tokenizer(tokenizers, path)
    if path == txt_path or not is_whole:
      tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(**options)
      tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if texts.lower_case:
      lower_case(tokenizer)
  except Exception as error:  # the library has no error classes of its own
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


def lower_case(tokenizer: Any) -> None:
  """Adds a first step to a tokenizer that lower-cases texts."""
  with extras.required("bert"):
    import tokenizers

  steps = [tokenizers.normalizers.Lowercase(), tokenizer.normalizer]
  tokenizer.normalizer = tokenizers.normalizers.Sequence(
    [step for step in steps if step is not None]
  )


def is_bert(folder: pathlib.Path) -> bool:
  """Returns True if a tokenizer's class is BERT's, whose settings `load` reads.

  Args:
    folder: a folder with tokenizer.json or vocab.txt.
  """
  if not (folder / "tokenizer.json").is_file():
    return True
  kind = _read(folder / _SETTINGS).get("tokenizer_class")
  if kind is None:
    return _read(folder / "config.json").get("model_type") in (
      "bert",
      "distilbert",
    )
  return kind in _BERTS


def _read_settings(folder: pathlib.Path) -> tuple[dict[str, Any], bool]:
  """Reads the settings of a tokenizer and refuses one that is not BERT's.

  Returns:
    Options of a BertNormalizer, and whether tokenizer.json alone holds them.
  """
  path = folder / _SETTINGS
  fields = _read(path)
  model = _read(folder / "config.json")
  kind = fields.get("tokenizer_class") or model.get("tokenizer_class")
  if kind is not None and kind not in (*_BERTS, *WHOLE):
    raise ValueError(
      f"{path}: expected a tokenizer of BERT's kind, got tokenizer_class={kind}:"
      " it tokenizes texts in another way, give another model"
    )
  options = {}
  for name, (field, default) in _OPTIONS.items():
    options[name] = value = fields.get(field, default)
    if not isinstance(value, bool) and (name, value) != ("strip_accents", None):
      raise ValueError(
        f"{path}: expected {field} to be true or false, got {value!r}"
      )
  return options, kind in WHOLE


def _build_tokenizer(tokenizers: Any, path: pathlib.Path) -> Any:
  """Builds the tokenizer of a vocab.txt; it finds special pieces in texts."""
  model = tokenizers.models.WordPiece.from_file(
    os.fspath(path), unk_token="[UNK]"
  )
  tokenizer = tokenizers.Tokenizer(model)
  special = [
    name for name in _SPECIAL if tokenizer.token_to_id(name) is not None
  ]
  tokenizer.add_special_tokens(special)
  added = _get_added_tokens(path.parent) - set(special)
  if added:
    raise ValueError(
      f"tokens added to the vocabulary, {min(added)!r} among them, which vocab.txt"
      " does not hold: save tokenizer.json, with transformers'"
      " AutoTokenizer.from_pretrained(A).save_pretrained(B)"
    )
  return tokenizer


def _get_added_tokens(folder: pathlib.Path) -> set[str]:
  """Returns the tokens that other files of the folder add to vocab.txt."""
  listed = _read(folder / _SETTINGS).get("added_tokens_decoder") or {}
  return {token["content"] for token in listed.values()} | set(
    _read(folder / "added_tokens.json")
  )
