"""A run's queries and documents in a pre-training corpus: `synthq corpus_overlap`.

No stage: nothing depends on it.

Formal guarantee:
  None. Shares are functions of the private queries without noise: they lie under
  private/.
"""

import itertools
import os

from synthq_jax.audit import corpus_overlap as overlap_lib
from synthq_jax.data import public_corpus
from synthq_jax.report import tables
from synthq_jax.runtime import inputs, workspace
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.storage import artifacts
from synthq_jax.training import progress as progress_lib

__all__ = ["run"]


def run(
  workdir: str | os.PathLike,
  corpus: str,
  *,
  config: overlap_lib.Config,
  progress: bool = True,
) -> str:
  """Searches a corpus for the queries and documents of a run.

  Args:
    workdir: of a run whose data is prepared.
    corpus: a glob or a name of TFDS, see `public_corpus.parts`.
    config: the samples.
    progress: whether a bar is shown.

  Returns:
    A table.

  Raises:
    ValueError: if the run has no prepared data, or the corpus is not there, or
      holds no text.
  """
  folders = workspace.Folders(workdir)
  prepared = workspace.prepared(folders, first="prepare_data")
  parts = public_corpus.parts(corpus)
  items = {
    "queries": queries_lib.texts(folders.root / prepared.private_directory),
    "documents": inputs.texts(inputs.corpus(folders, prepared)),
  }
  with progress_lib.bar("", None, progress, unit=" texts") as bar:
    texts = itertools.chain.from_iterable(part.texts() for part in parts)
    found = overlap_lib.measure(config, items, texts, progress=bar.update)
  if not found.num_texts:
    raise ValueError(
      f"--corpus={corpus}: expected texts, got none in {len(parts)} parts: check"
      " the files"
    )
  digest = artifacts.fingerprint(config, [part.identity for part in parts])
  artifacts.save(folders.private("corpus_overlap"), found, digest)
  return _table(corpus, found)


def _table(corpus: str, found: overlap_lib.Overlap) -> str:
  config = found.config
  size = f"{config.ngram}-grams"
  shares = {
    "Exact": "exact",
    size: "contained",
    "Half of them": "half",
    "All of them": "full",
    f"Under {config.ngram} words": "short",
  }
  table = tables.of(
    found.kinds.items(),
    {
      "Shares in %": lambda pair: pair[0],
      "Of": lambda pair: f"{pair[1].num_items:,}",
      "Each run": lambda pair: f"{pair[1].sample_size:,}",
      **{
        title: lambda pair, name=name: _share(getattr(pair[1], name))
        for title, name in shares.items()
      },
    },
  )
  return (
    "PRIVATE: computed from real queries; do not share it\n"
    f"{corpus}: {found.num_texts:,} texts, {found.num_words:,} words;"
    f" mean and standard deviation of {config.runs} runs\n\n"
    f"{table.text()}"
  )


def _share(share: overlap_lib.Spread) -> str:
  return f"{100 * share.mean:.3f} +- {100 * share.deviation:.3f}"
