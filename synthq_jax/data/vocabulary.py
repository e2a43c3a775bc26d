"""SentencePiece vocabularies: trained on PUBLIC text only, read through seqio.

A vocabulary trained on private queries leaks their words, so `train` takes
documents, and the pipeline never hands it anything else.
"""

import contextlib
import io
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
  import seqio

__all__ = [
  "EOS_ID",
  "PAD_ID",
  "load",
  "native_stderr",
  "pad",
  "tokenize",
  "tokenize_and_count",
  "train",
]

PAD_ID = 0
EOS_ID = 1
_CHUNK = 4096
"""Texts tokenized at a time."""


def train(
  texts: Iterable[str],
  path: str | os.PathLike,
  *,
  vocab_size: int,
  case_folding: bool = True,
) -> None:
  """Trains a unigram SentencePiece model with T5's special ids.

  Args:
    texts: public sentences.
    path: where the `.model` file goes.
    vocab_size: pieces without the extra ids.
    case_folding: whether upper case is folded, which suits small models.

  Raises:
    ValueError: if the text is too small for that many pieces.
  """
  import sentencepiece

  model = io.BytesIO()
  rule = "nmt_nfkc_cf" if case_folding else "nmt_nfkc"
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts),
      model_writer=model,
      vocab_size=vocab_size,
      pad_id=PAD_ID,
      eos_id=EOS_ID,
      unk_id=2,
      bos_id=-1,
      normalization_rule_name=rule,
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


def load(
  path: str | os.PathLike, *, extra_ids: int = 0
) -> "seqio.SentencePieceVocabulary":
  """Reads a vocabulary through seqio.

  What is encoded is text: "<extra_id_0>" and "</s>" in it become pieces like any
  other word, never the ids of sentinels and of the end.

  Args:
    path: a SentencePiece `.model` file.
    extra_ids: how many sentinels are appended for span corruption.

  Raises:
    ValueError: if there is no such file or SentencePiece cannot read it.
  """
  if not pathlib.Path(path).is_file():
    raise ValueError(f"expected a SentencePiece model, got no file {path}")
  with native_stderr():  # TensorFlow greets while it is imported
    import sentencepiece
    import seqio

  vocabulary = seqio.SentencePieceVocabulary(os.fspath(path), extra_ids)
  try:
    vocabulary.vocab_size  # noqa: B018  reads the file
    vocabulary.plain = sentencepiece.SentencePieceProcessor(
      model_file=os.fspath(path)
    )
  except Exception as error:
    raise ValueError(
      f"{path}: expected a SentencePiece model, got something that cannot"
      f" be read as one ({type(error).__name__}); give another file"
    ) from error
  vocabulary._encode = vocabulary.plain.encode
  return vocabulary


def tokenize(
  vocabulary: "seqio.SentencePieceVocabulary",
  texts: Sequence[str],
  *,
  length: int,
  prefix: str = "",
  threads: int = 1,
) -> Int[np.ndarray, "text length"]:
  """Turns texts into rows of ids that end with EOS and are padded with 0.

  Args:
    vocabulary: from `load`.
    texts: what to tokenize.
    length: columns; longer texts are cut, and keep their EOS.
    prefix: stands before each text, tokenized once on its own.
    threads: that tokenize at once; changes the speed only.

  Returns:
    int32, one row per text.
  """
  head = vocabulary.encode(prefix) if prefix else []
  array = np.zeros((len(texts), length), np.int32)
  for start in range(0, len(texts), _CHUNK):  # collections are large
    encoded = _encode(vocabulary, texts[start : start + _CHUNK], threads)
    for index, tokens in enumerate(encoded, start):
      row = [*head, *tokens][: length - 1]
      array[index, : len(row)] = row
      array[index, len(row)] = EOS_ID
  return array


def tokenize_and_count(
  vocabulary: "seqio.SentencePieceVocabulary",
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
  rows[longer, length - 1] = EOS_ID
  return rows[:, :length], int(np.sum(longer))


def _encode(vocabulary, texts: Sequence[str], threads: int) -> list[list[int]]:
  """Encodes texts; with several threads below Python, by SentencePiece."""
  if threads == 1:
    return [vocabulary.encode(text) for text in texts]
  return vocabulary.plain.encode(list(texts), num_threads=threads)


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
