"""Cuts texts into the tokens of a sentence-transformers folder.

Texts get the prompt of their role and the model's special tokens, and are cut where
the folder says. The tokenizer is Hugging Face's own: tokenizer.json, or a BERT's
vocab.txt.
"""

import dataclasses
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

__all__ = ["SentenceTokens", "TextRows", "check", "load"]

_WHOLE = "tokenizer.json"
_MOST = 512
"""Tokens of a text where no file says how many."""
_ENDLESS = 10**6
"""What no text reaches; `transformers` writes 10**30 for no limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceTokens:
  """How a folder reads texts."""

  tokenizer: Any = dataclasses.field(repr=False)
  """A `tokenizers.Tokenizer`."""
  texts: sentence_folders.TextSettings
  """Prompts, and `max_length`, which is never None here."""
  head: tuple[int, ...] = ()
  """Special tokens before every text."""
  tail: tuple[int, ...] = ()
  """Special tokens behind every text."""
  padding_id: int | None = 0
  """The id that changes places with 0 in arrays; None: ids are one more."""

  @property
  def length(self) -> int:
    """Tokens of a text, special ones included, at most."""
    assert self.texts.max_length is not None
    return self.texts.max_length

  def rows(
    self, texts: Sequence[str], role: str | None = None
  ) -> Int[np.ndarray, "text length"]:
    """Returns the tokens of each text, padded with 0 to the length.

    Formal guarantee: a row is a function of its own text alone, its width of the
    folder and of settings: the longest text of a private log widens no other row.

    Args:
      texts: without prompts.
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
    rows = [[*self.head, *one.ids[:room], *self.tail] for one in encoded]
    if self.padding_id is None:  # an empty text has no token
      return vocabulary.pad([[i + 1 for i in row] for row in rows], width)
    padded = vocabulary.pad(rows, width)
    if not self.padding_id:
      return padded
    inside = np.arange(width) < np.array([len(row) for row in rows])[:, None]
    padded[inside & (padded == 0)] = self.padding_id
    return padded


class TextRows:
  """Rows of tokens of texts on disk, made where they are read."""

  def __init__(self, texts: files.Lines, tokens: SentenceTokens, role: str):
    """Keeps where texts are, and how they are read."""
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
  """Reads how a folder reads texts.

  Args:
    folder: of sentence-transformers, or of a BERT alone.
    length: tokens of a text, special ones included, where the folder allows more;
      0: as many as it does, 512 where nothing ends them.
    query_length: tokens of a query, where these are fewer.
    query_prompt: in place of the folder's; None: its own.
    document_prompt: as `query_prompt`.

  Raises:
    MissingExtraError: if the library is not installed.
    ValueError: if there is no tokenizer, it cannot be read, or the length leaves no
      room for a text.
  """
  root = pathlib.Path(folder)
  chosen = sentence_folders.modules(root)
  texts = sentence_folders.text_settings(root)
  place = _with_tokenizer(root, chosen.place)
  found = _tokenizer(place, texts)
  head, tail = ((), ()) if chosen.is_static else _special(found)
  most = _longest(place, chosen, texts, found)
  room = most if not length else min(length, most)
  shorter = [n for n in (query_length, texts.query_length) if n is not None]
  least = min([room, *shorter])
  if least <= len(head) + len(tail):
    raise ValueError(
      f"{folder}: expected more than {len(head) + len(tail)} tokens, its special"
      f" ones, got length={least}: set a larger ENCODER_LENGTH"
    )
  found.no_truncation()
  found.no_padding()
  prompts = {"query_prompt": query_prompt, "document_prompt": document_prompt}
  texts = dataclasses.replace(
    texts,
    max_length=room,
    query_length=least if shorter else None,
    **{name: text for name, text in prompts.items() if text is not None},
  )
  return SentenceTokens(
    tokenizer=found,
    texts=texts,
    head=head,
    tail=tail,
    padding_id=sentence_encoder.padding_id(chosen),
  )


def check(
  folder: str | os.PathLike,
  tokens: SentenceTokens,
  config: sentence_encoder.SentenceConfig,
) -> None:
  """Refuses a tokenizer with more pieces than its model knows.

  Args:
    folder: for the message.
    tokens: from `load`.
    config: the model's shape.

  Raises:
    ValueError: with both sizes.
  """
  rows = config.vocab_size - (tokens.padding_id is None)
  pieces = tokens.tokenizer.get_vocab_size()
  if pieces > rows:
    raise ValueError(
      f"{folder}: expected at most vocab_size={rows} pieces, as its model has, got"
      f" {pieces}: give its own vocabulary"
    )


def _with_tokenizer(root: pathlib.Path, model: pathlib.Path) -> pathlib.Path:
  """Returns the folder with the tokenizer: the model's, or the whole one's."""
  for place in (model, root):
    if any((place / name).is_file() for name in (_WHOLE, "vocab.txt")):
      return place
  raise ValueError(
    f"{model}: expected {_WHOLE}, or a BERT's vocab.txt, got neither: save it"
    " with transformers' AutoTokenizer.from_pretrained(A).save_pretrained(B)"
  )


def _tokenizer(
  place: pathlib.Path, texts: sentence_folders.TextSettings
) -> Any:
  """Reads a tokenizer, a BERT's with the settings beside it."""
  with extras.required("bert"):
    import tokenizers

  if wordpiece.is_bert(place):
    return wordpiece.load(place).tokenizer
  path = place / _WHOLE
  try:
    found = tokenizers.Tokenizer.from_file(os.fspath(path))
  except Exception as error:  # the library has no kinds of its own
    raise ValueError(
      f"{path}: expected a tokenizer, got a file that cannot be read ({error});"
      " copy it again"
    ) from error
  if texts.lower_case:
    wordpiece.lower_case(found)
  return found


def _special(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the special tokens before and behind a text."""
  plain = tokenizer.encode("a", add_special_tokens=False).ids
  whole = tokenizer.encode("a").ids
  if whole == plain:  # of a vocab.txt, which says nothing of them
    names = [tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")]
    return ((names[0],), (names[1],)) if None not in names else ((), ())
  first = next(
    i for i in range(len(whole)) if whole[i : i + len(plain)] == plain
  )
  return tuple(whole[:first]), tuple(whole[first + len(plain) :])


def _longest(
  place: pathlib.Path,
  chosen: sentence_folders.Modules,
  texts: sentence_folders.TextSettings,
  tokenizer: Any,
) -> int:
  """Returns how many tokens of a text a folder reads."""
  if chosen.is_static:
    cut = tokenizer.truncation
    return cut["max_length"] if cut else _MOST
  fields = wordpiece.read_fields(place / "tokenizer_config.json")
  found = [
    texts.max_length,
    sentence_encoder.num_positions(chosen),
    fields.get("model_max_length"),
  ]
  known = [n for n in found if isinstance(n, int) and 0 < n < _ENDLESS]
  return min(known, default=_MOST)
