"""SentencePiece vocabularies: trained on PUBLIC text only; ids as SeqIO's.

Each model says its own ids of the end of a text and of unknown characters
(`SentencePiece.token_ids`). Arrays hold 0 for padding, as SeqIO's and T5X's do:
a model whose piece 0 may stand in a text is refused.

A vocabulary trained on private queries leaks their words, so `train` takes
documents, and the pipeline never hands it anything else.
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

_SPACE = "\u2581"  # SentencePiece's
PAD_ID = 0
"""Padding in every array."""
EOS_ID = 1
"""The end of a text in vocabularies that `train` makes; others have their own."""


def train(
  texts: Iterable[str],
  path: str | os.PathLike,
  *,
  vocab_size: int,
) -> None:
  """Trains a unigram SentencePiece model with T5's special ids.

  Args:
    texts: public sentences.
    path: where the `.model` file goes.
    vocab_size: pieces without the extra ids.

  Raises:
    ValueError: if the text is too small for that many pieces.
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
  """A SentencePiece model: texts to ids and back.

  Ids and texts are those of `seqio.SentencePieceVocabulary`, whose sentinels lie
  behind the pieces, `<extra_id_0>` last. One thing differs: what is encoded is
  text, so "<extra_id_0>" in it becomes pieces like any other word, never the id
  of a sentinel.
  """

  path: str
  """A `.model` file."""
  extra_ids: int = 0
  """Sentinels behind its pieces, for span corruption."""

  pad_id = PAD_ID

  @functools.cached_property
  def tokenizer(self) -> sentencepiece.SentencePieceProcessor:
    """The model without its sentinels, read when it is first needed."""
    return sentencepiece.SentencePieceProcessor(model_file=self.path)

  @functools.cached_property
  def _with_sentinels(self) -> sentencepiece.SentencePieceProcessor:
    """The model that reads ids of sentinels."""
    model = pathlib.Path(self.path).read_bytes()
    pieces = map(_sentinel, reversed(range(self.extra_ids)))
    return sentencepiece.SentencePieceProcessor(
      model_proto=model + b"".join(pieces)
    )

  @property
  def vocab_size(self) -> int:
    """Pieces and sentinels."""
    return self.tokenizer.get_piece_size() + self.extra_ids

  @property
  def token_ids(self) -> token_ids_lib.TokenIds:
    """The special ids; `pad` is 0 where the model has no padding of its own."""
    pad = max(self.tokenizer.pad_id(), PAD_ID)
    return token_ids_lib.TokenIds(pad=pad, eos=self.eos_id, unk=self.unk_id)

  @property
  def eos_id(self) -> int:
    """The end of a text; T5's is 1."""
    return self.tokenizer.eos_id()

  @property
  def unk_id(self) -> int:
    """What stands for characters without a piece; T5's is 2."""
    return self.tokenizer.unk_id()

  @functools.cached_property
  def sentinels(self) -> tuple[int, ...]:
    """Ids of the sentinels that are pieces of the model itself, as mT5's are."""
    found = []
    for number in range(self.tokenizer.get_piece_size()):
      names = (f"{space}<extra_id_{number}>" for space in (_SPACE, ""))
      ids = map(self.tokenizer.piece_to_id, names)
      if not (known := [one for one in ids if one != self.unk_id]):
        break
      found += known
    return tuple(found)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without EOS."""
    return self.tokenizer.encode(text)

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of ids up to the first EOS; unknown ids read as one."""
    size, unknown = self.vocab_size, self.unk_id
    known = [int(i) if i < size else unknown for i in ids]
    if self.eos_id in known:
      known = known[: known.index(self.eos_id) + 1]
    return self._with_sentinels.decode(known)


def _sentinel(number: int) -> bytes:
  """Returns a user-defined piece as it stands in a serialized ModelProto.

  Repeated fields of protocol buffers may be appended. The fields of a piece
  (sentencepiece_model.proto) are 1: text, 2: score (float32 0), 3: kind (4).
  """
  text = f"\u2581<extra_id_{number}>".encode()
  piece = b"\x0a%c%b\x15\0\0\0\0\x18\x04" % (len(text), text)
  return b"\x0a%c%b" % (len(piece), piece)


def load(path: str | os.PathLike, *, extra_ids: int = 0) -> SentencePiece:
  """Reads a vocabulary.

  Args:
    path: a SentencePiece `.model` file.
    extra_ids: how many sentinels are appended for span corruption.

  Raises:
    ValueError: if there is no such file, SentencePiece cannot read it, or its
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

  Id 0 pads arrays, so that no text may hold it. SentencePiece's own defaults
  have `<unk>` there, which does no harm where unknown characters become bytes.

  Args:
    vocabulary: a SentencePiece model, or a vocabulary of SeqIO.
    name: what messages call it.

  Raises:
    ValueError: if it cannot be used.
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
  """Returns SeqIO's own object for a vocabulary, as tasks and T5X need it.

  Args:
    vocabulary: from `load`; one of SeqIO's is returned as it is.
  """
  if not isinstance(vocabulary, SentencePiece):
    return vocabulary
  with extras.required("seqio"), native_stderr():  # TensorFlow greets
    import seqio

  return seqio.SentencePieceVocabulary(vocabulary.path, vocabulary.extra_ids)


def tokenize(
  vocabulary: SentencePiece,
  texts: Sequence[str],
  *,
  length: int,
  prefix: str = "",
) -> Int[np.ndarray, "text length"]:
  """Turns texts into rows of ids that end with EOS and are padded with 0.

  Args:
    vocabulary: from `load`.
    texts: what to tokenize.
    length: columns; longer texts are cut, and keep their EOS.
    prefix: stands before each text, tokenized once on its own.

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
  """Tokenizes, and counts the texts that were cut.

  Args:
    vocabulary: from `load`.
    texts: what to tokenize.
    length: columns.
    **options: of `tokenize`.

  Returns:
    What `tokenize` returns, and how many texts are longer than `length`.
  """
  rows = tokenize(vocabulary, texts, length=length + 1, **options)
  longer = rows[:, -1] > 0  # one token more shows who was cut
  return cut(rows, length), int(np.sum(longer))


def cut(
  rows: Int[np.ndarray, "row longer"], length: int
) -> Int[np.ndarray, "row length"]:
  """Returns rows as they would be had they been tokenized to fewer columns.

  >>> cut(np.array([[5, 6, 7, 1], [5, 1, 0, 0]]), 3)
  array([[5, 6, 1],
         [5, 1, 0]])

  Args:
    rows: of `tokenize`, each with its EOS last; they stay as they are.
    length: columns, at most those of the rows.
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
  """Lays rows of ids into one array, cut or padded with 0 to `length`."""
  array = np.zeros((len(rows), length), np.int32)
  for index, row in enumerate(rows):
    kept = row[:length]
    array[index, : len(kept)] = kept
  return array


@contextlib.contextmanager
def native_stderr() -> Iterator[None]:
  """Sends the process's standard error nowhere while the block runs.

  For libraries that print below Python, where warnings cannot be filtered;
  exceptions are not touched. Other threads are silent meanwhile, too.
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
