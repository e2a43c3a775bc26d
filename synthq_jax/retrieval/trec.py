"""Defines runs and judgements, and reads and writes runs in TREC files.

trec_eval keeps scores in single precision and breaks ties by document id,
descending. So `write_run` writes scores that fall strictly in single precision, and
every reader sees the same ranking.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from synthq_jax.data import collection, files, ids

__all__ = [
  "Qrels",
  "Run",
  "check_ids",
  "first",
  "ranking",
  "read_run",
  "to_run",
  "without_own",
  "write_run",
]

Run = dict[str, dict[str, float]]
"""The results of a system: query id -> document id -> score."""

Qrels = collection.Qrels
"""Relevance judgements: query id -> document id -> grade."""

_FORM = "query Q0 document rank score tag"


def check_ids(kind: str, ids: Iterable[str]) -> None:
  """Refuses ids that are numbers: 17 equals no "17" of another file.

  Args:
    kind: "query" or "document", for the message.
    ids: the ids.

  Raises:
    ValueError: if an id is no text.
  """
  odd = [each for each in set(map(type, ids)) if not issubclass(each, str)]
  if odd:
    raise ValueError(
      f"expected {kind} ids that are texts, got an {odd[0].__name__}: write"
      " str(id) in runs and judgements alike"
    )


def without_own(run: Run, depth: int, qrels: Qrels) -> Run:
  """Drops documents with their query's id from a run.

  Such a document stays if it is judged relevant: then equal ids are chance.

  >>> run = {"d1": {"d1": 9.0, "d2": 2.0}, "d7": {"d7": 9.0, "d2": 2.0}}
  >>> without_own(run, 1, {"d1": {"d2": 1}, "d7": {"d7": 1}})
  {'d1': {'d2': 2.0}, 'd7': {'d7': 9.0}}

  Args:
    run: query id -> document id -> score, searched to `depth` + 1.
    depth: the most documents of each query.
    qrels: query id -> document id -> grade.
  """
  others = {}
  for query, scores in run.items():
    own = None if qrels.get(query, {}).get(query, 0) > 0 else query
    others[query] = {id_: score for id_, score in scores.items() if id_ != own}
  return first(others, depth)


def first(run: Run, depth: int) -> Run:
  """Returns the best documents of each query, best first.

  >>> first({"q": {"d1": 1.0, "d2": 2.0, "d3": 1.0}}, depth=2)
  {'q': {'d2': 2.0, 'd1': 1.0}}

  Args:
    run: query id -> document id -> score.
    depth: the most documents of each query.
  """
  return {
    query: {id_: scores[id_] for id_ in ranking(scores)[:depth]}
    for query, scores in run.items()
  }


def ranking(scores: Mapping[str, float]) -> list[str]:
  """Returns document ids by descending score; equal scores keep their order.

  >>> ranking({"d1": 0.5, "d2": 2.0, "d3": 0.5})
  ['d2', 'd1', 'd3']

  Args:
    scores: document id -> finite score.

  Raises:
    ValueError: if a score is not finite, or an id is no text.
  """
  check_ids("document", scores)
  values = np.fromiter(scores.values(), np.float64, len(scores))
  if not np.isfinite(values).all():
    bad = next(id_ for id_, x in scores.items() if not np.isfinite(x))
    raise ValueError(
      f"expected finite scores, got {scores[bad]} for document {bad!r}; look "
      "at the vectors it came from"
    )
  ids = list(scores)
  return [ids[position] for position in np.argsort(-values, kind="stable")]


def to_run(
  query_ids: Sequence[str],
  document_ids: Sequence[str],
  scores: Sequence[Sequence[float]] | np.ndarray,
  positions: Sequence[Sequence[int]] | np.ndarray,
) -> Run:
  """Makes a run from the results of an index.

  >>> to_run(["q1"], ["d1", "d2"], [[0.9, 0.1]], [[1, 0]])
  {'q1': {'d2': 0.9, 'd1': 0.1}}

  Args:
    query_ids: one per row of `scores`.
    document_ids: the id at each position of the index.
    scores: the best scores of each query, descending; rows may differ in
      length.
    positions: the positions of these documents in the index, shaped like
      `scores`.
  """
  return {
    query: {
      document_ids[int(position)]: float(score)
      for score, position in zip(row, row_positions, strict=True)
    }
    for query, row, row_positions in zip(
      query_ids, scores, positions, strict=True
    )
  }


def write_run(path: str | os.PathLike, run: Run, tag: str = "synthq") -> None:
  """Writes lines of "query Q0 document rank score tag", best first.

  Args:
    path: the file; it appears only when complete.
    run: the results. Scores are lowered as little as possible, so that they fall
      strictly in single precision in the order of `ranking`.
    tag: the name of the system, without white space.

  Raises:
    ValueError: if an id or the tag holds white space, or a score is not finite.
  """
  collection.check_id("run", tag)
  files.write_lines(
    path,
    (
      f"{query} Q0 {document} {rank} {score:.9g} {tag}"  # 9 digits: exact float32
      for query, scores in run.items()
      for rank, (document, score) in enumerate(_lower_ties(query, scores), 1)
    ),
  )


def _lower_ties(
  query: str, scores: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
  """Yields documents and scores that fall strictly in single precision."""
  collection.check_id("query", query)
  documents = ranking(scores)
  joined = " ".join(documents)
  if joined.split() != documents or not joined.isprintable():
    for document in documents:
      collection.check_id("document", document)
  wide = np.array([scores[document] for document in documents], np.float64)
  wide = np.minimum(wide, np.finfo(np.float32).max)
  with np.errstate(over="ignore"):
    falling = wide.astype(np.float32)
  if not (falling[1:] < falling[:-1]).all():
    below = np.float32(-np.inf)
    for rank in range(1, len(falling)):
      most = np.nextafter(falling[rank - 1], below)
      falling[rank] = min(falling[rank], most)
  if not np.isfinite(falling).all():
    bad = wide[~np.isfinite(falling)][0]
    raise ValueError(f"expected scores within single precision, got {bad}")
  return zip(documents, falling.tolist(), strict=True)


def read_run(path: str | os.PathLike) -> Run:
  """Reads a TREC run, plain or gzipped.

  Args:
    path: the file, six columns a line; rank and tag are ignored.

  Returns:
    The run, in the order of the file.

  Raises:
    ValueError: if a line is malformed, a score is not a finite number, or a
      document occurs twice for a query.
  """
  run: Run = {}
  for where, cells in files.columns(path, _FORM):
    query, _, document, _, score, _ = cells
    document = ids.read(document, "document", where)
    scores = run.setdefault(ids.read(query, "query", where), {})
    if document in scores:
      raise ValueError(
        f"{where}: expected each document once for a query, got one again;"
        " remove one"
      )
    scores[document] = _parse_score(where, score)
  return run


def _parse_score(where: str, text: str) -> float:
  """Parses a finite score: NaN has no rank, and infinities are all equal."""
  try:
    score = float(collection.checked_number(text))
  except ValueError:
    score = math.nan
  if not math.isfinite(score):
    raise ValueError(
      f"{where}: expected a finite number as the score, got another text;"
      " correct it, or remove the line"
    )
  return score
