"""Ranks documents by weights that were trained on private queries with DP.

BM25 and a retriever find candidates; the sum of ten scores orders them. This folder
holds the weights in ranking.json and the retriever in retriever/.

  pip install "sentence-transformers>=6" bm25s "PyStemmer>=3.1"

  from ranker import Ranker

  ranker = Ranker(ids, texts)  # a text is a document's title, a space, its body
  ranker.search("a query", k=10)  # [(id, score), ...], best first

synthq_jax writes this file, which does not need synthq_jax.
"""

import contextlib
import json
import pathlib
import re
import unicodedata

import bm25s
import numpy as np
import Stemmer

HERE = pathlib.Path(__file__).resolve().parent
_ROWS = 1 << 16  # number of rows that are float64 at a time


class Ranker:
  """Indexes a collection and ranks its documents."""

  def __init__(self, ids, texts, vectors=None, model=None):
    """Indexes and encodes documents.

    Args:
      ids: one per document.
      texts: title and body of each document with a space between.
      vectors: vectors of the documents, float32 [document, dim]; None: the retriever
        encodes the texts.
      model: the retriever; None: the SentenceTransformer in retriever/.
    """
    if len(ids) != len(texts) or not len(ids):
      raise ValueError(
        f"expected documents, and an id for each, got {len(texts)} texts and"
        f" {len(ids)} ids"
      )
    self.settings = json.loads((HERE / "ranking.json").read_text("utf-8"))
    self.weights = [each["weight"] for each in self.settings["features"]]
    if model is None:
      from sentence_transformers import SentenceTransformer  # noqa: PLC0415

      model = SentenceTransformer(str(HERE / "retriever"))
    self.model, self.ids = model, list(ids)
    if vectors is None:
      vectors = model.encode_document(list(texts))
    self.vectors = np.asarray(vectors, np.float32)
    lengths = np.log1p([len(text.split()) for text in texts])
    self.lengths = lengths / max(lengths.max(initial=0.0), 1e-9)
    spaced = [self._normalize(text) for text in texts]
    self.fields = [
      _Field(each["bm25"], spaced)
      for each in self.settings["features"]
      if "bm25" in each
    ]

  def search(self, query, k=10):
    """Returns the ids and scores of the best `k` documents, best first."""
    if not query.strip():
      return []
    depth = self.settings["depth"]
    words = self.fields[0].scores(self._normalize(query))
    lexical = [at for at in _find_best(words, depth) if words[at] > 0]
    asked = self.encode(query)
    cosines = _compute_products(self.vectors, asked)
    return self.rank(query, lexical, _find_best(cosines, depth), asked=asked)[
      :k
    ]

  def rank(self, query, lexical, dense, *, asked=None):
    """Orders candidates that other engines found.

    Args:
      query: the text of the query.
      lexical: positions of the documents that BM25 finds, best first.
      dense: positions of the documents that the retriever finds, best first.
      asked: the query's vector; None: the retriever encodes the query.
    """
    asked = self.encode(query) if asked is None else asked
    dense = np.asarray(dense, np.int64)
    positions = np.array(
      [*dict.fromkeys([*lexical, *dense.tolist()])], np.int64
    )
    if not len(positions):
      return []
    text, columns = self._normalize(query), []
    for field in self.fields:
      scores = field.scores(text)[positions]
      columns.append(scores / max(scores.max(), 1e-9))
    cosines = _scale(_compute_products(self.vectors[dense], asked))
    of_dense = dict(zip(dense.tolist(), cosines, strict=True))
    columns.append(self.lengths[positions])
    columns.append([of_dense.get(at, 0.0) for at in positions.tolist()])
    values = np.array(columns, np.float32).T.astype(np.float64)
    scores = (values * self.weights).sum(axis=1)
    order = np.argsort(-scores, kind="stable")
    return [(self.ids[positions[at]], float(scores[at])) for at in order]

  def _normalize(self, text):
    """Returns the words of a text, separated by single spaces."""
    text = unicodedata.normalize("NFC", text)
    text = re.sub(self.settings["joiners"], "", text)
    return " ".join(re.findall(self.settings["word"], text))

  def encode(self, query):
    """Returns the query's vector, truncated to the length of queries in
    training."""
    with _truncate_at(self.model, self.settings["query_length"]):
      return np.asarray(self.model.encode_query(query), np.float32)


def _compute_products(vectors, asked):
  """Computes inner products in float64; float32's may differ for equal rows."""
  asked = asked.astype(np.float64)
  parts = range(0, len(vectors), _ROWS)
  blocks = [vectors[at : at + _ROWS].astype(np.float64) @ asked for at in parts]
  return np.concatenate([np.zeros(0), *blocks]).astype(np.float32)


class _Field:
  """Indexes a part of the documents' texts for one BM25 score."""

  def __init__(self, reads, texts):
    first = reads["first_words"]
    if first is not None:
      texts = [" ".join(text.split()[:first]) for text in texts]
    stemmer = reads["stemmer"] and Stemmer.Stemmer(reads["stemmer"])
    self.reads = {
      "token_pattern": reads["pattern"],
      "stopwords": reads["stopwords"] or [],
      "stemmer": stemmer or None,
      "show_progress": False,
    }
    words = bm25s.tokenize(list(texts), **self.reads)
    self.size, self.index = len(texts), None
    if any(words.ids):  # bm25s cannot index documents without any token
      self.index = bm25s.BM25(k1=reads["k1"], b=reads["b"], method="lucene")
      self.index.index(words, show_progress=False)

  def scores(self, query):
    if self.index is None:
      return np.zeros(self.size, np.float32)
    words = bm25s.tokenize([query], **self.reads, return_ids=False)[0]
    token_ids = self.index.get_tokens_ids(words)
    if not token_ids:
      return np.zeros(self.size, np.float32)
    return self.index.get_scores_from_ids(token_ids)


def _find_best(scores, depth):
  """Returns the positions of the best scores; the first of equal ones is
  first."""
  return np.argsort(-scores, kind="stable")[:depth]


def _scale(scores):
  """Scales scores to [0, 1]: the least to 0, the best to 1; equal scores to
  1."""
  if not len(scores):
    return scores
  low, high = scores.min(), scores.max()
  if not high - low > len(scores) * np.spacing(np.float32(abs(high))):
    return np.ones_like(scores)
  return (scores - low) / (high - low)


@contextlib.contextmanager
def _truncate_at(model, length):
  """Truncates texts of a static model to `length` tokens in a `with` block.

  A T5 truncates its queries itself."""
  tokenizer = getattr(model[0], "tokenizer", None)
  if not hasattr(tokenizer, "enable_truncation"):
    yield
    return
  before = tokenizer.truncation
  tokenizer.enable_truncation(length)
  try:
    yield
  finally:
    if before is None:
      tokenizer.no_truncation()
    else:
      tokenizer.enable_truncation(**before)
