"""Judgements from rows of text, checked against the ids of a collection."""

from collections.abc import Container, Iterable

from synthq_jax.data import collection

__all__ = ["from_rows"]


def from_rows(
  rows: Iterable[tuple[str, str, str, str]],
  queries: Container[str] | None = None,
  documents: Container[str] | None = None,
) -> collection.Qrels:
  """Gathers judgements by query.

  >>> from_rows([("qrels.tsv:1", "q1", "d7", "2")], {"q1"}, {"d7"})
  {'q1': {'d7': 2}}

  Args:
    rows: where it stands ("file:line"), query id, document id and grade.
    queries: the known query ids; None takes any.
    documents: the known document ids; None takes any.

  Returns:
    Query id -> document id -> grade.

  Raises:
    ValueError: if an id is unknown, a grade is no whole number, or a pair has
      two grades.
  """
  qrels: collection.Qrels = {}
  for where, query, document, grade in rows:
    _check_known(where, "query", query, queries)
    _check_known(where, "document", document, documents)
    value = _grade(where, grade)
    grades = qrels.setdefault(query, {})
    if grades.setdefault(document, value) != value:
      raise ValueError(
        f"{where}: expected one grade for query {query!r} and document "
        f"{document!r}, got {grades[document]} and {value}; keep one"
      )
  return qrels


def _check_known(
  where: str, kind: str, id_: str, known: Container[str] | None
) -> None:
  if known is not None and id_ not in known:
    raise ValueError(
      f"{where}: expected the id of a known {kind}, got {id_!r}; add that "
      f"{kind} or remove the line"
    )


def _grade(where: str, text: str) -> int:
  try:
    return int(text)
  except ValueError as error:
    raise ValueError(
      f"{where}: expected a whole number as the grade, got {text!r}; write "
      "1 for relevant, 0 for not"
    ) from error
