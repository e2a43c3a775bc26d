"""Ranks documents by weights that private queries taught with DP.

BM25 and a retriever find candidates; the sum of ten scores orders them. The weights
lie in ranking.json beside this file, the retriever in retriever/.

  pip install "sentence-transformers>=6" bm25s "PyStemmer>=3.1"

  from ranker import Ranker

  ranker = Ranker(ids, texts)  # of each document: its title, a space, its text
  ranker.search("a query", k=10)  # [(id, score), ...], best first

It was written by synthq_jax, which it does not need.
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
_ROWS = 1 << 16  # that are float64 at a time


class Ranker:
  """A collection, indexed as the weights expect it."""

  def __init__(self, ids, texts, vectors=None, model=None):
    """Indexes and encodes documents.

    Args:
      ids: one per document.
      texts: of each, its title and text with a space between.
      vectors: of the documents, float32 [document, dim]; None: the retriever
        encodes them here.
      model: what encodes; None: the SentenceTransformer in retriever/.
    """
    if len(ids) != len(texts) or not len(ids):
      raise ValueError(
        f"expected documents, and an id for each, got {len(texts)} texts and"
        f" {len(ids)} ids"
      )
    self.settings = json.loads((HERE / "ranking.json").read_text("utf-8"))
    self.weights = [one["weight"] for one in self.settings["features"]]
    if model is None:
      from sentence_transformers import SentenceTransformer  # noqa: PLC0415

      model = SentenceTransformer(str(HERE / "retriever"))
    self.model, self.ids = model, list(ids)
    if vectors is None:
      vectors = model.encode_document(list(texts))
    self.vectors = np.asarray(vectors, np.float32)
    lengths = np.log1p([len(text.split()) for text in texts])
    self.lengths = lengths / max(lengths.max(initial=0.0), 1e-9)
    spaced = [self._spaced(text) for text in texts]
    self.fields = [
      _Field(one["bm25"], spaced)
      for one in self.settings["features"]
      if "bm25" in one
    ]

  def search(self, query, k=10):
    """Returns the ids and scores of the best documents, best first."""
    if not query.strip():
      return []
    depth = self.settings["depth"]
    words = self.fields[0].scores(self._spaced(query))
    lexical = [place for place in _best(words, depth) if words[place] > 0]
    asked = self.encode(query)
    cosines = _products(self.vectors, asked)
    return self.rank(query, lexical, _best(cosines, depth), asked=asked)[:k]

  def rank(self, query, lexical, dense, *, asked=None):
    """Orders what other engines found.

    Args:
      query: its text.
      lexical: positions of the documents that BM25 finds, best first.
      dense: positions of those that the retriever finds, best first.
      asked: the query's vector; None: the retriever encodes it here.
    """
    asked = self.encode(query) if asked is None else asked
    dense = np.asarray(dense, np.int64)
    places = np.array([*dict.fromkeys([*lexical, *dense.tolist()])], np.int64)
    if not len(places):
      return []
    text, columns = self._spaced(query), []
    for field in self.fields:
      scores = field.scores(text)[places]
      columns.append(scores / max(scores.max(), 1e-9))
    cosines = _scaled(_products(self.vectors[dense], asked))
    of_dense = dict(zip(dense.tolist(), cosines, strict=True))
    columns.append(self.lengths[places])
    columns.append([of_dense.get(place, 0.0) for place in places.tolist()])
    values = np.array(columns, np.float32).T.astype(np.float64)
    scores = (values * self.weights).sum(axis=1)
    order = np.argsort(-scores, kind="stable")
    return [(self.ids[places[at]], float(scores[at])) for at in order]

  def _spaced(self, text):
    """Returns the words of a text with a space between them and nothing else."""
    text = unicodedata.normalize("NFC", text)
    text = re.sub(self.settings["joiners"], "", text)
    return " ".join(re.findall(self.settings["word"], text))

  def encode(self, query):
    """Returns the query's vector, cut where queries were cut in training."""
    with _cut_at(self.model, self.settings["query_length"]):
      return np.asarray(self.model.encode_query(query), np.float32)


def _products(vectors, asked):
  """Inner products, equal for equal rows: float32's sum in ways of their own."""
  asked = asked.astype(np.float64)
  parts = range(0, len(vectors), _ROWS)
  made = [vectors[at : at + _ROWS].astype(np.float64) @ asked for at in parts]
  return np.concatenate([np.zeros(0), *made]).astype(np.float32)


class _Field:
  """A part of the documents, as one BM25 reads it."""

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
    if any(words.ids):  # else no document has, say, two words
      self.index = bm25s.BM25(k1=reads["k1"], b=reads["b"], method="lucene")
      self.index.index(words, show_progress=False)

  def scores(self, query):
    if self.index is None:
      return np.zeros(self.size, np.float32)
    words = bm25s.tokenize([query], **self.reads, return_ids=False)[0]
    known = self.index.get_tokens_ids(words)
    if not known:
      return np.zeros(self.size, np.float32)
    return self.index.get_scores_from_ids(known)


def _best(scores, depth):
  """Returns the positions of the best, of equal ones the first ones first."""
  return np.argsort(-scores, kind="stable")[:depth]


def _scaled(scores):
  """Moves scores to [0, 1]: the least to 0, the best to 1; equal ones to 1."""
  if not len(scores):
    return scores
  low, high = scores.min(), scores.max()
  if not high - low > len(scores) * np.spacing(np.float32(abs(high))):
    return np.ones_like(scores)
  return (scores - low) / (high - low)


@contextlib.contextmanager
def _cut_at(model, length):
  """Cuts texts for a table of vectors; a T5 cuts its queries itself."""
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
