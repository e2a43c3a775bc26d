"""Ranks documents by BM25 with Lucene's weights, on bm25s and Snowball.

bm25s is imported when an index is built, not with this module: it starts JAX's
backend on import, which must not happen before jax.distributed is set up.

References:
  Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and
  Beyond", 2009, section 3.4.
  Kamphuis et al., "Which BM25 Do You Mean?", ECIR 2020, Table 1 (Lucene).
"""

import array
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from synthq_jax import checks, extras
from synthq_jax.data import word_patterns
from synthq_jax.retrieval import trec

with extras.required("run"):
  import Stemmer

__all__ = ["BM25", "Index", "Reader", "chunks"]

_CHUNK = 4096
"""The number of documents that are split into words at a time."""
_FEW = 65_536
"""Documents up to which scoring all of them is faster than looking up some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BM25:
  """The settings by which BM25 reads and weighs words.

  >>> index = BM25().build(["d1", "d2"], ["red apples", "green pears"])
  >>> index.search(["an apple"], k=10)[1]
  [['d1']]

  Attributes:
    k1: saturation of a word's count, >= 0.
    b: share of the length normalisation, in [0, 1].
    stemmer: a Snowball algorithm such as "english", or "" for none.
    stopwords: a language with a stop word list in bm25s, or "" for none.
    pattern: a regular expression of one word. It is applied to lower-cased text
      in NFC, whatever the input's normal form. Marks, such as the vowel signs of
      Hindi, belong to their word. Words that are written without spaces are not
      split. The default stemmer and stop words are English.
  """

  k1: float = 1.2
  b: float = 0.75
  stemmer: str = "english"
  stopwords: str = "english"
  pattern: str = word_patterns.WORD

  def __post_init__(self):
    checks.at_least(0, k1=self.k1)
    checks.within("[0, 1]", b=self.b)
    if self.stemmer and self.stemmer not in Stemmer.algorithms():
      raise ValueError(
        f"expected a stemmer of {Stemmer.algorithms()}, got "
        f"stemmer={self.stemmer!r}; choose one, or '' for none"
      )

  def build(self, ids: Sequence[str], texts: Iterable[str]) -> "Index":
    """Indexes documents.

    The texts are read once, a few thousand at a time. So the index needs memory,
    the texts and lists of their words do not.

    Args:
      ids: one per document.
      texts: the texts of the documents, such as `Document.contents`; may be an
        iterator.

    Raises:
      ValueError: if there are no documents, or no word in any of them.
    """
    reader = Reader(self)
    for chunk in chunks(texts):
      reader.read(chunk)
    return reader.build(ids)

  def words(self, texts: Iterable[str]) -> list[list[str]]:
    """Returns the stemmed words of each text, without stop words."""
    stemmer = Stemmer.Stemmer(self.stemmer) if self.stemmer else None
    return _import_bm25s().tokenize(
      [word_patterns.compose(text) for text in texts],
      token_pattern=self.pattern,
      stopwords=self.stopwords or [],
      stemmer=stemmer,
      return_ids=False,
      show_progress=False,
    )


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
  """Yields a few thousand texts at a time, to limit the memory for their words."""
  texts = iter(texts)
  while chunk := list(itertools.islice(texts, _CHUNK)):
    yield chunk


class Reader:
  """Reads documents, and stores the numbers of their words for an index."""

  def __init__(self, config: BM25):
    self.config = config
    self._rows = _Rows()
    self._vocab: dict[str, int] = {}  # in the order of first appearance

  def read(self, texts: Sequence[str]) -> None:
    """Reads more documents."""
    vocab = self._vocab
    for words in self.config.words(texts):
      self._rows.append([vocab.setdefault(word, len(vocab)) for word in words])

  def build(self, ids: Sequence[str], config: BM25 | None = None) -> "Index":
    """Indexes all read documents, as `BM25.build` does.

    Args:
      ids: one per document.
      config: settings that read the same words and may weigh them differently;
        None: the reader's settings.

    Raises:
      ValueError: if there are no documents, or no word in any of them.
    """
    if len(ids) != len(self._rows) or not self._vocab:
      raise ValueError(
        f"expected one id per document and a word somewhere, got {len(ids)} "
        f"ids and {len(self._rows)} documents; check the collection"
      )
    config = config or self.config
    model = _import_bm25s().BM25(k1=config.k1, b=config.b, method="lucene")
    # A copy, since bm25s adds the empty word to it.
    vocab = dict(self._vocab)
    documents = _import_bm25s().tokenization.Tokenized(self._rows, vocab)
    model.index(documents, show_progress=False)
    return Index(tuple(ids), config, model)


class _Rows:
  """Stores rows of integers in four bytes each, and yields them as lists."""

  def __init__(self):
    self._numbers = array.array("i")
    self._ends = array.array("q", [0])

  def append(self, row: list[int]) -> None:
    self._numbers.extend(row)
    self._ends.append(len(self._numbers))

  def __len__(self) -> int:
    return len(self._ends) - 1

  def __iter__(self) -> Iterator[list[int]]:
    for start, end in itertools.pairwise(self._ends):
      yield self._numbers[start:end].tolist()


@dataclasses.dataclass(frozen=True)
class Index:
  """Documents indexed by `BM25.build`.

  Attributes:
    ids: the document ids, by position.
    config: the settings of the index.
    model: the bm25s object.
  """

  ids: tuple[str, ...]
  config: BM25
  model: Any = dataclasses.field(repr=False)

  @property
  def num_bytes(self) -> int:
    """The size of the words and weights in memory, in bytes."""
    arrays = sum(
      np.asarray(array).nbytes for array in self.model.scores.values()
    )
    return arrays + sum(len(word.encode()) for word in self.model.vocab_dict)

  def search(
    self, queries: Sequence[str], k: int
  ) -> tuple[list[np.ndarray], list[list[str]]]:
    """Finds the best documents for each query.

    A document that shares no word with the query is not a result, so rows can be
    shorter than k. Equal scores keep the order of the documents.

    Args:
      queries: the texts of the queries.
      k: the most documents per query, >= 1.

    Returns:
      The scores, descending, and the document ids, one row per query.

    Raises:
      ValueError: if k < 1.
    """
    checks.at_least(1, k=k)
    results = [
      self._search_words(words, k) for words in self.config.words(queries)
    ]
    scores = [values for values, _ in results]
    return scores, [
      [self.ids[position] for position in positions] for _, positions in results
    ]

  def scores_at(
    self, words: Sequence[str], positions: Int[np.ndarray, " some"]
  ) -> Float[np.ndarray, " some"]:
    """Scores some documents; equals the scores of `search` to the last bit.

    In large collections the time hardly grows with the collection.

    Args:
      words: the words of a query, as `BM25.words` returns them.
      positions: positions of the documents.

    Returns:
      Scores, float32; 0 for a document that shares no word with the query.
    """
    word_ids = self.model.get_tokens_ids(words)
    if word_ids and len(self.ids) <= _FEW:
      return self.model.get_scores_from_ids(word_ids)[positions]
    matrix = self.model.scores
    scores = np.zeros(len(positions), np.float32)
    # With another type, searchsorted would copy the documents instead.
    positions = np.asarray(positions, matrix["indices"].dtype)
    for word in word_ids:
      start, end = matrix["indptr"][word : word + 2]
      documents = matrix["indices"][start:end]  # ascending
      at = documents.searchsorted(positions)
      at[at == len(documents)] = 0  # another document
      has_word = documents[at] == positions
      scores[has_word] += matrix["data"][start:end][at[has_word]]
    return scores

  def search_run(
    self, query_ids: Sequence[str], queries: Sequence[str], k: int
  ) -> trec.Run:
    """Finds the best documents for each query, as a run.

    Args:
      query_ids: one per query.
      queries: the texts of the queries.
      k: the most documents per query, >= 1.

    Returns:
      Query id -> document id -> score, best first; may be empty for a query.
    """
    rows = zip(query_ids, *self.search(queries, k), strict=True)
    return {
      query: dict(zip(ids, scores.tolist(), strict=True))
      for query, scores, ids in rows
    }

  def _search_words(
    self, words: list[str], k: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores and positions of the best documents."""
    word_ids = self.model.get_tokens_ids(words)
    if not word_ids:
      return np.zeros(0, np.float32), np.zeros(0, np.int64)
    scores = self.model.get_scores_from_ids(word_ids)
    positions = np.flatnonzero(scores > 0)
    if (
      len(positions) > k
    ):  # keep all with at least the k-th score, ties included
      values, kth = scores[positions], len(positions) - k
      positions = positions[values >= np.partition(values, kth)[kth]]
    positions = positions[np.argsort(-scores[positions], kind="stable")][:k]
    return scores[positions], positions


def _import_bm25s() -> Any:
  with extras.required("run"):
    import bm25s  # noqa: PLC0415

  logging.getLogger("bm25s").setLevel(logging.WARNING)
  return bm25s
