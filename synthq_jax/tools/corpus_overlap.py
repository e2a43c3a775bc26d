"""Measures how much of a run a public corpus holds: `synthq corpus_overlap`.

The command is no stage: no other result depends on it.

Formal guarantee:
  None. The shares are functions of the private queries without noise, so they are
  written under private/.
"""

import glob
import itertools
import os
from collections.abc import Iterator

from synthq_jax.audit import corpus_overlap as overlap_lib
from synthq_jax.data import files, table_files
from synthq_jax.report import tables
from synthq_jax.runtime import prepared_files, workspace
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.storage import artifacts
from synthq_jax.training import progress as progress_lib

__all__ = ["find_files", "read_texts", "run"]

_TABLES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


def run(workdir: str | os.PathLike, corpus: str) -> str:
  """Searches a corpus for the queries and documents of a run, and saves the shares.

  Args:
    workdir: working directory of a run whose data is prepared.
    corpus: a glob of files, see `find_files`.

  Returns:
    A table for the screen.

  Raises:
    ValueError: if the run has no prepared data, or the corpus is missing or holds
      no text.
  """
  config, folders = overlap_lib.Config(), workspace.Folders(workdir)
  prepared = workspace.prepared(folders, first="prepare_data")
  paths = find_files(corpus)
  items = {
    "queries": queries_lib.texts(folders.root / prepared.private_directory),
    "documents": prepared_files.texts(prepared_files.corpus(folders, prepared)),
  }
  with progress_lib.bar("", None, unit=" texts") as bar:
    texts = itertools.chain.from_iterable(map(read_texts, paths))
    overlap = overlap_lib.measure(config, items, texts, progress=bar.update)
  if not overlap.num_texts:
    raise ValueError(
      f"--corpus={corpus}: expected texts, got none in {len(paths)} parts: check"
      " the files"
    )
  digest = artifacts.fingerprint(config, corpus)
  artifacts.save(folders.private("corpus_overlap"), overlap, digest)
  return _render_table(corpus, overlap)


def find_files(source: str) -> list[str]:
  """Finds the files of a corpus without reading them.

  C4 is 1,024 files c4-train.*.json.gz of JSON lines with a "text".

  Args:
    source: a glob of files, plain or compressed: JSON lines with a "text" (.jsonl,
      .ndjson, .json), tables with such a column (.parquet, .arrow), or else one text a
      line.

  Returns:
    The files in the order of their names.

  Raises:
    ValueError: if no file matches.
  """
  paths = sorted(glob.glob(os.path.expanduser(source), recursive=True))
  if not (paths := [*filter(os.path.isfile, paths)]):
    raise ValueError(
      f"expected files of a corpus, got none for {source!r}: give a path or a"
      ' glob in quotes, e.g. "c4/*.json.gz"'
    )
  return paths


def read_texts(path: str) -> Iterator[str]:
  """Yields the texts of a file of a corpus; an error names the malformed line."""
  if files.remove_suffix(path).endswith(_TABLES):
    return (
      files.field(where, row, "text") for where, row in table_files.rows(path)
    )
  return (line for _, line in files.lines(path))


def _render_table(corpus: str, overlap: overlap_lib.Overlap) -> str:
  config = overlap.config
  shares = {"Exact": "exact", "Under 8 words": "short"}
  table = tables.of(
    overlap.kinds.items(),
    {
      "Shares in %": lambda pair: pair[0],
      "Items": lambda pair: f"{pair[1].num_items:,}",
      "Sampled": lambda pair: f"{pair[1].sample_size:,}",
      **{
        title: lambda pair, name=name: _format_share(getattr(pair[1], name))
        for title, name in shares.items()
      },
    },
  )
  return (
    "PRIVATE: computed from real queries; do not share it\n"
    f"{corpus}: {overlap.num_texts:,} texts, {overlap.num_words:,} words;"
    f" mean and standard deviation of {config.runs} samples\n\n"
    f"{table.text()}"
  )


def _format_share(share: overlap_lib.Spread) -> str:
  return f"{100 * share.mean:.3f} +- {100 * share.deviation:.3f}"
