"""Measures how much of a run a public corpus holds: `synthq corpus_overlap`.

The command is no stage: no other result depends on it.

Formal guarantee:
  None. The shares are functions of the private queries without noise, so they are
  written under private/.
"""

import itertools
import os

from synthq_jax.audit import corpus_overlap as overlap_lib
from synthq_jax.data import public_corpus
from synthq_jax.report import tables
from synthq_jax.runtime import prepared_files, workspace
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.storage import artifacts
from synthq_jax.training import progress as progress_lib

__all__ = ["run"]


def run(workdir: str | os.PathLike, corpus: str) -> str:
  """Searches a corpus for the queries and documents of a run, and saves the shares.

  Args:
    workdir: working directory of a run whose data is prepared.
    corpus: a glob of files, see `public_corpus.parts`.

  Returns:
    A table for the screen.

  Raises:
    ValueError: if the run has no prepared data, or the corpus is missing or holds
      no text.
  """
  config, folders = overlap_lib.Config(), workspace.Folders(workdir)
  prepared = workspace.prepared(folders, first="prepare_data")
  parts = public_corpus.parts(corpus)
  items = {
    "queries": queries_lib.texts(folders.root / prepared.private_directory),
    "documents": prepared_files.texts(prepared_files.corpus(folders, prepared)),
  }
  with progress_lib.bar("", None, unit=" texts") as bar:
    texts = itertools.chain.from_iterable(part.texts() for part in parts)
    overlap = overlap_lib.measure(config, items, texts, progress=bar.update)
  if not overlap.num_texts:
    raise ValueError(
      f"--corpus={corpus}: expected texts, got none in {len(parts)} parts: check"
      " the files"
    )
  digest = artifacts.fingerprint(config, [part.identity for part in parts])
  artifacts.save(folders.private("corpus_overlap"), overlap, digest)
  return _render_table(corpus, overlap)


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
