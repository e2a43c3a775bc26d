"""Tokenizes texts with the tokenizer of a sentence-transformers folder.

Texts get the prompt of their role and the model's special tokens, and are truncated
to the folder's length. The tokenizer is Hugging Face's: tokenizer.json, or a BERT's
vocab.txt.
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
from synthq_jax.data import files, vocabulary, wordpiece
from synthq_jax.models import sentence_encoder
from synthq_jax.models.checkpoints import sentence_folders

__all__ = ["ENDLESS", "SentenceTokens", "TextRows", "check", "load"]

_WHOLE = "tokenizer.json"
_SETTINGS = {
  "do_lower_case": "lowercase",
  "strip_accents": "strip_accents",
  "tokenize_chinese_chars": "handle_chinese_chars",
  "add_prefix_space": "add_prefix_space",
}
"""Names of settings in tokenizer_config.json and in tokenizer.json."""
_MOST = 512
"""Largest number of tokens of a text if no file sets one."""
ENDLESS = 10**6
"""Limits from this number on mean no limit; `transformers` writes 10**30."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceTokens:
  """Tokenizes texts as a folder's settings ask for."""

  tokenizer: Any = dataclasses.field(repr=False)
  """A `tokenizers.Tokenizer`."""
  texts: sentence_folders.TextSettings
  """Prompts, and `max_length`, which is not None."""
  head: tuple[int, ...] = ()
  """Special tokens before every text."""
  tail: tuple[int, ...] = ()
  """Special tokens after every text."""
  padding_id: int | None = 0
  """The padding id, which is swapped with 0 in arrays; None: ids are shifted by
  1."""

  @property
  def length(self) -> int:
    """Largest number of tokens of a text, special ones included."""
    assert self.texts.max_length is not None
    return self.texts.max_length

  def rows(
    self, texts: Sequence[str], role: str | None = None
  ) -> Int[np.ndarray, "text length"]:
    """Returns the tokens of each text, padded with 0 to the length.

    Formal guarantee: the tokens of a row are a function of its own text alone, and
    its width is a function of the folder and of settings: the longest text of a
    private log widens no other row.

    Args:
      texts: texts without prompts.
      role: `sentence_folders.QUERY`, DOCUMENT, or None for the default prompt.
    """
    prompt = self.texts.prompt_of(role)
    width = self.length
    if role == sentence_folders.QUERY and self.texts.query_length is not None:
      width = min(width, self.texts.query_length)
    room = width - len(self.head) - len(self.tail)
    encoded = self.tokenizer.encode_batch(
      [prompt + text for text in texts], add_special_tokens=False
    )
    rows = [[*self.head, *each.ids[:room], *self.tail] for each in encoded]
    if self.padding_id is None:  # an empty text has no token
      return vocabulary.pad([[i + 1 for i in row] for row in rows], width)
    padded = vocabulary.pad(rows, width)
    if not self.padding_id:
      return padded
    inside = np.arange(width) < np.array([len(row) for row in rows])[:, None]
    is_zero, is_padding = padded == 0, padded == self.padding_id
    padded[inside & is_zero] = self.padding_id
    padded[is_padding] = 0  # of a text that holds the name of padding
    return padded


class TextRows:
  """Tokenizes texts on disk lazily: each row when it is read."""

  def __init__(self, texts: files.Lines, tokens: SentenceTokens, role: str):
    """Stores the lines of texts, their tokenizer and their role."""
    self._texts, self._tokens, self._role = texts, tokens, role
    self.shape = (len(texts), tokens.length)

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(
    self, rows: Int[np.ndarray, " some"] | slice
  ) -> Int[np.ndarray, "some length"]:
    """Tokenizes some texts."""
    numbers = np.arange(len(self))[rows].tolist()
    return self._tokens.rows(self._texts.at(numbers), self._role)


def load(
  folder: str | os.PathLike,
  *,
  length: int = 0,
  query_length: int | None = None,
  query_prompt: str | None = None,
  document_prompt: str | None = None,
) -> SentenceTokens:
  """Loads a folder's tokenizer and its settings for texts.

  Args:
    folder: a folder of sentence-transformers, or of a BERT alone.
    length: largest number of tokens of a text, special ones included; the folder's
      own limit applies, too. 0: only the folder's limit, or 512 if it has none.
    query_length: largest number of tokens of a query, if it is smaller.
    query_prompt: a prompt that replaces the folder's; None: the folder's prompt.
    document_prompt: as `query_prompt`.

  Raises:
    MissingExtraError: if the library is not installed.
    ValueError: if there is no tokenizer, it cannot be read, or the length leaves no
      room for a text.
  """
  root = pathlib.Path(folder)
  chosen = sentence_folders.modules(root)
  for role in (sentence_folders.QUERY, sentence_folders.DOCUMENT):
    if sentence_folders.modules(root, role).folder != chosen.folder:
      raise ValueError(
        f"{folder}: expected one model that reads all texts, got a Router with"
        " another one for queries than for documents: save one route as a"
        " SentenceTransformer of its own, and give that"
      )
  texts = sentence_folders.text_settings(root)
  tokenizer_folder = _find_tokenizer_folder(root, chosen.folder)
  tokenizer = _load_tokenizer(tokenizer_folder, texts, chosen.is_static)
  tokenizer.no_padding()
  head, tail = ((), ()) if chosen.is_static else _get_special_tokens(tokenizer)
  most = _get_max_length(tokenizer_folder, chosen, texts, tokenizer)
  room = min([n for n in (length, most) if n], default=_MOST)
  shorter = [n for n in (query_length, texts.query_length) if n is not None]
  least = min([room, *shorter])
  if least <= len(head) + len(tail):
    raise ValueError(
      f"{folder}: expected more than {len(head) + len(tail)} tokens, its special"
      f" ones, got length={least}: set a larger ENCODER_LENGTH"
    )
  padding_id = sentence_encoder.padding_id(chosen)
  if padding_id in (*head, *tail):
    raise ValueError(
      f"{folder}: expected padding that is no token of a text, got id {padding_id},"
      " which every text has: write the tokenizer's pad_token_id into config.json"
    )
  tokenizer.no_truncation()
  prompts = {"query_prompt": query_prompt, "document_prompt": document_prompt}
  texts = dataclasses.replace(
    texts,
    max_length=room,
    query_length=least if shorter else None,
    **{name: text for name, text in prompts.items() if text is not None},
  )
  return SentenceTokens(
    tokenizer=tokenizer,
    texts=texts,
    head=head,
    tail=tail,
    padding_id=padding_id,
  )


def check(
  folder: str | os.PathLike,
  tokens: SentenceTokens,
  config: sentence_encoder.SentenceConfig,
) -> None:
  """Refuses a tokenizer with more pieces than its model has rows.

  Args:
    folder: the folder, for the message.
    tokens: tokenizer and settings from `load`.
    config: the model's shape.

  Raises:
    ValueError: if there are more pieces; the message has both sizes.
  """
  rows = config.vocab_size - (tokens.padding_id is None)
  pieces = tokens.tokenizer.get_vocab_size()
  if pieces > rows:
    raise ValueError(
      f"{folder}: expected at most vocab_size={rows} pieces, as its model has, got"
      f" {pieces}: give its own vocabulary"
    )


def _find_tokenizer_folder(
  root: pathlib.Path, model: pathlib.Path
) -> pathlib.Path:
  """Returns the folder with the tokenizer: the model's folder, or the root
  folder."""
  for folder in (model, root):
    if any((folder / name).is_file() for name in (_WHOLE, "vocab.txt")):
      return folder
  raise ValueError(
    f"{model}: expected {_WHOLE}, or a BERT's vocab.txt, got neither: save it"
    " with transformers' AutoTokenizer.from_pretrained(A).save_pretrained(B)"
  )


def _load_tokenizer(
  folder: pathlib.Path, texts: sentence_folders.TextSettings, is_static: bool
) -> Any:
  """Loads a tokenizer; a BERT's with the settings in its folder."""
  with extras.required("bert"):
    import tokenizers

  if wordpiece.is_bert(folder):
    return wordpiece.load(folder).tokenizer
  path = folder / _WHOLE
  try:
    tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
  except Exception as error:  # the library has no error classes of its own
    raise ValueError(
      f"{path}: expected a tokenizer, got a file that cannot be read ({error});"
      " copy it again"
    ) from error
  if not is_static:  # of static vectors tokenizer.json alone is read
    _check_settings(folder, json.loads(tokenizer.to_str()))
  if texts.lower_case:
    wordpiece.lower_case(tokenizer)
  return tokenizer


def _check_settings(folder: pathlib.Path, stored: dict[str, Any]) -> None:
  """Refuses a tokenizer.json that tokenizer_config.json contradicts.

  The latter decides in transformers, unless the tokenizer's class has no settings.
  """
  path = folder / "tokenizer_config.json"
  fields = sentence_folders.read_fields(path, missing_ok=True)
  if fields.get("tokenizer_class") in wordpiece.WHOLE:
    return
  steps = (stored["normalizer"] or {}) | (stored["pre_tokenizer"] or {})
  for name, own in _SETTINGS.items():
    if name in fields and own in steps and fields[name] != steps[own]:
      raise ValueError(
        f"{path}: expected {name}={steps[own]}, as {_WHOLE} has, got"
        f" {name}={fields[name]}: save both anew, with transformers'"
        " AutoTokenizer.from_pretrained(A).save_pretrained(B)"
      )


def _get_special_tokens(
  tokenizer: Any,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the special tokens before and after a text."""
  plain = tokenizer.encode("a", add_special_tokens=False).ids
  marked = tokenizer.encode("a").ids
  if marked == plain:  # a vocab.txt does not define them
    names = [tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")]
    return ((names[0],), (names[1],)) if None not in names else ((), ())
  first = next(
    i for i in range(len(marked)) if marked[i : i + len(plain)] == plain
  )
  return tuple(marked[:first]), tuple(marked[first + len(plain) :])


def _get_max_length(
  folder: pathlib.Path,
  chosen: sentence_folders.Modules,
  texts: sentence_folders.TextSettings,
  tokenizer: Any,
) -> int | None:
  """Returns the largest number of tokens of a text by a folder's settings.

  None: the folder sets no limit.

  As in sentence-transformers, max_seq_length replaces the tokenizer's own limit.

  Raises:
    ValueError: if the tokenizer keeps the end of a long text.
  """
  path, cut = folder / "tokenizer_config.json", tokenizer.truncation or {}
  fields = {}
  if not chosen.is_static:
    fields = sentence_folders.read_fields(path, missing_ok=True)
  side = fields.get("truncation_side") or cut.get("direction", "right")
  if side != "right":
    raise ValueError(
      f"{folder}: expected a tokenizer that keeps the beginning of a long text, got"
      f" truncation_side={side}: save it with truncation_side='right'"
    )
  if chosen.is_static:
    return cut.get("max_length")
  own = fields.get("model_max_length")
  limits = [texts.max_length or own, sentence_encoder.num_positions(chosen)]
  finite = [n for n in limits if isinstance(n, int) and 0 < n < ENDLESS]
  return min(finite, default=None)
