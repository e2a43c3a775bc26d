"""Trains SentencePiece vocabularies on PUBLIC text, and tokenizes with SeqIO's ids.

Each model has its own ids of the end of a text and of unknown characters
(`SentencePiece.token_ids`). Arrays are padded with 0, as in SeqIO and T5X: a model
whose piece 0 may occur in a text is refused.

A vocabulary trained on private queries leaks their words, so the pipeline passes
only documents to `train`.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from synthq_jax import extras
from synthq_jax.models import token_ids as token_ids_lib

with extras.required("run"):
  import sentencepiece


if TYPE_CHECKING:
  import seqio

__all__ = [
  "EOS_ID",
  "PAD_ID",
  "SentencePiece",
  "as_seqio",
  "check_ids",
  "cut",
  "load",
  "native_stderr",
  "pad",
  "tokenize",
  "tokenize_and_count",
  "train",
]

_SPACE = "\u2581"  # SentencePiece's space
PAD_ID = 0
"""Id of padding in every array."""
EOS_ID = 1
"""Id of the end of a text in vocabularies of `train`; others have their own."""


def train(
  texts: Iterable[str],
  path: str | os.PathLike,
  *,
  vocab_size: int,
) -> None:
  """Trains a unigram SentencePiece model with T5's special ids.

  Args:
    texts: public sentences.
    path: the `.model` file to write.
    vocab_size: number of pieces, without the extra ids.

  Raises:
    ValueError: if there is too little text for that many pieces.
  """
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts),
      model_writer=model,
      vocab_size=vocab_size,
      pad_id=PAD_ID,
      eos_id=EOS_ID,
      unk_id=2,
      bos_id=-1,
      normalization_rule_name="nmt_nfkc_cf",  # folds case: for small models
      character_coverage=0.9995,
      num_threads=1,  # the same text always gives the same model
      minloglevel=2,
    )
  except RuntimeError as error:
    reason = str(error).splitlines()[-1]
    raise ValueError(
      f"expected public text enough for vocab_size={vocab_size}, got"
      f" SentencePiece's refusal: {reason}; choose a smaller one"
    ) from error
  pathlib.Path(path).write_bytes(model.getvalue())


@dataclasses.dataclass(frozen=True)
class SentencePiece:
  """Converts texts to ids and back with a SentencePiece model.

  Ids and texts are those of `seqio.SentencePieceVocabulary`, whose sentinels follow
  the pieces, `<extra_id_0>` last. There is one difference: "<extra_id_0>" in a text
  becomes pieces like any other word, never the id of a sentinel.
  """

  path: str
  """Path of a `.model` file."""
  extra_ids: int = 0
  """Number of sentinels behind the pieces, for span corruption."""

  pad_id = PAD_ID

  @functools.cached_property
  def tokenizer(self) -> sentencepiece.SentencePieceProcessor:
    """The model without sentinels, read lazily."""
    return sentencepiece.SentencePieceProcessor(model_file=self.path)

  @functools.cached_property
  def _with_sentinels(self) -> sentencepiece.SentencePieceProcessor:
    """The model with the sentinels as pieces, which decodes their ids."""
    model = pathlib.Path(self.path).read_bytes()
    pieces = map(_make_sentinel, reversed(range(self.extra_ids)))
    return sentencepiece.SentencePieceProcessor(
      model_proto=model + b"".join(pieces)
    )

  @property
  def vocab_size(self) -> int:
    """Number of pieces and sentinels."""
    return self.tokenizer.get_piece_size() + self.extra_ids

  @property
  def token_ids(self) -> token_ids_lib.TokenIds:
    """The special ids; `pad` is 0 if the model has no padding of its own."""
    pad = max(self.tokenizer.pad_id(), PAD_ID)
    return token_ids_lib.TokenIds(pad=pad, eos=self.eos_id, unk=self.unk_id)

  @property
  def eos_id(self) -> int:
    """Id of the end of a text; 1 for T5."""
    return self.tokenizer.eos_id()

  @property
  def unk_id(self) -> int:
    """Id of characters without a piece; 2 for T5."""
    return self.tokenizer.unk_id()

  @functools.cached_property
  def sentinels(self) -> tuple[int, ...]:
    """Ids of sentinels that are pieces of the model itself, as in mT5."""
    sentinel_ids = []
    for number in range(self.tokenizer.get_piece_size()):
      names = (f"{space}<extra_id_{number}>" for space in (_SPACE, ""))
      ids = map(self.tokenizer.piece_to_id, names)
      if not (pieces := [id_ for id_ in ids if id_ != self.unk_id]):
        break
      sentinel_ids += pieces
    return tuple(sentinel_ids)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without EOS."""
    return self.tokenizer.encode(text)

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of ids up to the first EOS; ids beyond the pieces are
    unknown."""
    size, unknown = self.vocab_size, self.unk_id
    pieces = [int(i) if i < size else unknown for i in ids]
    if self.eos_id in pieces:
      pieces = pieces[: pieces.index(self.eos_id) + 1]
    return self._with_sentinels.decode(pieces)


def _make_sentinel(number: int) -> bytes:
  """Returns a sentinel as a user-defined piece of a serialized ModelProto.

  Repeated fields of protocol buffers may be appended. The fields of a piece
  (sentencepiece_model.proto) are 1: text, 2: score (float32 0), 3: kind (4).
  """
  text = f"\u2581<extra_id_{number}>".encode()
  piece = b"\x0a%c%b\x15\0\0\0\0\x18\x04" % (len(text), text)
  return b"\x0a%c%b" % (len(piece), piece)


def load(path: str | os.PathLike, *, extra_ids: int = 0) -> SentencePiece:
  """Loads a vocabulary.

  Args:
    path: a SentencePiece `.model` file.
    extra_ids: number of sentinels to append for span corruption.

  Raises:
    ValueError: if the file is missing, SentencePiece cannot read it, or its
      special ids leave none for padding (`check_ids`).
  """
  if not pathlib.Path(path).is_file():
    raise ValueError(f"expected a SentencePiece model, got no file {path}")
  vocabulary = SentencePiece(os.fspath(path), extra_ids)
  try:
    vocabulary.tokenizer  # noqa: B018  reads the file
  except Exception as error:
    raise ValueError(
      f"{path}: expected a SentencePiece model, got something that cannot"
      f" be read as one ({type(error).__name__}); give another file"
    ) from error
  check_ids(vocabulary, path)
  return vocabulary


def check_ids(vocabulary: Any, name: str | os.PathLike) -> None:
  """Refuses a vocabulary without an end of text, or without room for padding.

  Id 0 pads arrays, so that no text may hold it. SentencePiece's default for id 0 is
  `<unk>`, which is harmless if unknown characters become bytes.

  Args:
    vocabulary: a SentencePiece model, or a vocabulary of SeqIO.
    name: the vocabulary's name in messages.

  Raises:
    ValueError: if the vocabulary cannot be used.
  """
  unknown, end = vocabulary.unk_id, vocabulary.eos_id
  if end is None or end < 1:
    raise ValueError(
      f"{name}: expected a vocabulary with an end of text (</s>) other than id"
      f" 0, which is padding, got eos_id={end}: train it with pad_id=0, eos_id=1"
    )
  pieces = getattr(vocabulary, "tokenizer", None)
  has_bytes = pieces is not None and pieces.is_byte(
    pieces.piece_to_id("<0x00>")
  )
  is_text = pieces is not None and not (
    pieces.is_control(0) or pieces.is_unknown(0) or pieces.is_unused(0)
  )
  if is_text or (unknown == 0 and not has_bytes):
    kind = pieces.id_to_piece(0) if pieces is not None else "<unk>"
    raise ValueError(
      f"{name}: expected a vocabulary with padding (<pad>) as id 0, got {kind!r}"
      " there, which texts may hold: give a model trained with pad_id=0"
    )


def as_seqio(vocabulary: Any) -> "seqio.Vocabulary":
  """Converts a vocabulary to SeqIO's class, which tasks and T5X need.

  Args:
    vocabulary: a vocabulary from `load`; one of SeqIO's is returned as it is.
  """
  if not isinstance(vocabulary, SentencePiece):
    return vocabulary
  with extras.required("seqio"), native_stderr():  # hides TensorFlow's messages
    import seqio

  return seqio.SentencePieceVocabulary(vocabulary.path, vocabulary.extra_ids)


def tokenize(
  vocabulary: SentencePiece,
  texts: Sequence[str],
  *,
  length: int,
  prefix: str = "",
) -> Int[np.ndarray, "text length"]:
  """Tokenizes texts to rows of ids that end with EOS and are padded with 0.

  Args:
    vocabulary: a vocabulary from `load`.
    texts: the texts to tokenize.
    length: number of columns; longer texts are truncated and keep their EOS.
    prefix: text before each text, tokenized once on its own.

  Returns:
    int32, one row per text.
  """
  head = vocabulary.encode(prefix) if prefix else []
  array = np.zeros((len(texts), length), np.int32)
  for index, tokens in enumerate(map(vocabulary.encode, texts)):
    row = [*head, *tokens][: length - 1]
    array[index, : len(row)] = row
    array[index, len(row)] = vocabulary.eos_id
  return array


def tokenize_and_count(
  vocabulary: SentencePiece,
  texts: Sequence[str],
  *,
  length: int,
  **options: Any,
) -> tuple[Int[np.ndarray, "text length"], int]:
  """Tokenizes texts and counts those that are truncated.

  Args:
    vocabulary: a vocabulary from `load`.
    texts: the texts to tokenize.
    length: number of columns.
    **options: options of `tokenize`.

  Returns:
    The rows of `tokenize`, and the number of texts that, with prefix and EOS, are
    longer than `length` tokens.
  """
  rows = tokenize(vocabulary, texts, length=length + 1, **options)
  longer = rows[:, -1] > 0  # an extra column marks the texts to truncate
  return cut(rows, length), int(np.sum(longer))


def cut(
  rows: Int[np.ndarray, "row longer"], length: int
) -> Int[np.ndarray, "row length"]:
  """Truncates rows of `tokenize` to fewer columns and keeps each EOS.

  >>> cut(np.array([[5, 6, 7, 1], [5, 1, 0, 0]]), 3)
  array([[5, 6, 1],
         [5, 1, 0]])

  Args:
    rows: rows of `tokenize`, each ending with EOS; they are not changed.
    length: number of columns, at most that of the rows.
  """
  rows = np.asarray(rows)
  shorter = np.array(rows[:, :length])
  full = np.flatnonzero(shorter[:, -1])
  lasts = np.count_nonzero(rows[full], axis=1) - 1
  shorter[full, -1] = rows[full, lasts]
  return shorter


def pad(
  rows: Sequence[Sequence[int]], length: int
) -> Int[np.ndarray, "row length"]:
  """Packs rows of ids into an array, each truncated or padded with 0 to
  `length`."""
  array = np.zeros((len(rows), length), np.int32)
  for index, row in enumerate(rows):
    shortened = row[:length]
    array[index, : len(shortened)] = shortened
  return array


@contextlib.contextmanager
def native_stderr() -> Iterator[None]:
  """Silences the process's standard error while the `with` block runs.

  Libraries that print below Python cannot be filtered by warnings. Exceptions are
  not touched. Other threads are silenced, too.
  """
  sys.stderr.flush()
  saved = os.dup(2)
  with open(os.devnull, "wb") as nowhere:
    os.dup2(nowhere.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(saved, 2)
      os.close(saved)
