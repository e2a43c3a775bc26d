"""Tables as text, where the pages of the studies still look for them."""

from collections.abc import Sequence

from synthq_jax import text_tables

__all__ = ["aligned", "escaped", "markdown"]

escaped = text_tables.escaped


def aligned(
  header: Sequence[str], rows: Sequence[Sequence[str]], numeric=()
) -> str:
  """Returns a table as lines of ASCII; see `synthq_jax.text_tables`."""
  return _table(header, rows, numeric).text()


def markdown(
  header: Sequence[str], rows: Sequence[Sequence[str]], numeric=()
) -> str:
  """Returns a table in Markdown; see `synthq_jax.text_tables`."""
  return _table(header, rows, numeric).markdown()


def _table(header, rows, numeric) -> text_tables.Table:
  return text_tables.Table(
    header=tuple(header), rows=tuple(rows), numeric=tuple(numeric)
  )
