"""A run's queries and documents in a pre-training corpus: `synthq corpus_overlap`.

No stage: nothing depends on it. A corpus is searched part by part (a file, a
shard); what a part holds is kept, so that a stopped search goes on, and several
processes or machines with one working directory share the parts.

Formal guarantee:
  None. Marks and shares are functions of the private queries without noise:
  they lie under private/.
"""

import os
import pathlib

import numpy as np

from synthq_jax import array_files, artifacts
from synthq_jax.audit import corpus_overlap as overlap_lib
from synthq_jax.audit import corpus_search
from synthq_jax.data import public_corpus
from synthq_jax.pipeline import inputs, workspace
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.report import tables
from synthq_jax.training import progress as progress_lib

__all__ = ["run"]

_NAME = "corpus_overlap"


def run(
  workdir: str | os.PathLike,
  corpus: str,
  *,
  config: overlap_lib.Config,
  share: tuple[int, int] = (0, 1),
  progress: bool = True,
) -> str:
  """Searches a corpus for the queries and documents of a run.

  Args:
    workdir: of a run whose data is prepared.
    corpus: a glob or a name of TFDS, see `public_corpus.parts`.
    config: the samples.
    share: (i, n): of all parts only the i-th, i + n-th, ...; for n processes.
    progress: whether a bar is shown.

  Returns:
    A table, once all parts are searched; before that, how many are.

  Raises:
    ValueError: if the share makes no sense, the run has no prepared data, or
      the corpus is not there, or holds no text.
  """
  if not 0 <= share[0] < share[1]:
    raise ValueError(
      f"expected --share=i/n with 0 <= i < n, got {share[0]}/{share[1]}"
    )
  folders = workspace.Folders(workdir)
  prepared = workspace.prepared(folders, first="prepare_data")
  parts = public_corpus.parts(corpus)
  items = {
    "queries": queries_lib.texts(folders.root / prepared.private_directory),
    "documents": inputs.texts(inputs.corpus(folders, prepared)),
  }
  plan = overlap_lib.prepare(config, items)
  place = folders.private(_NAME)
  digests = [
    artifacts.fingerprint(plan.probe.digest, part.identity) for part in parts
  ]
  paths = [place / "parts" / f"{digest}.npz" for digest in digests]
  _search(plan.probe, parts, paths, share, progress)
  missing = sum(not path.is_file() for path in paths)
  if missing:
    return (
      f"{len(parts) - missing} of {len(parts)} parts are searched; the table"
      " comes when the others are"
    )
  merged = corpus_search.merge(_load(plan.probe, path) for path in paths)
  if not merged.num_texts:
    raise ValueError(
      f"--corpus={corpus}: expected texts, got none in {len(parts)} parts: check"
      " the files"
    )
  found = overlap_lib.summarize(plan, merged)
  artifacts.save(place, found, artifacts.fingerprint(config, digests))
  return _table(corpus, found)


def _search(probe, parts, paths, share: tuple[int, int], progress: bool):
  """Searches the parts of a share that were not searched before."""
  first, step = share
  with progress_lib.bar("", None, progress, unit=" texts") as bar:
    for number in range(first, len(parts), step):
      bar.set_description(f"part {number + 1}/{len(parts)}")
      if not paths[number].is_file():
        texts = parts[number].texts()
        _save(
          paths[number], corpus_search.scan(probe, texts, progress=bar.update)
        )


def _save(path: pathlib.Path, found: corpus_search.Found) -> None:
  path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
  arrays = {
    "ngrams": np.packbits(found.ngrams),
    "items": np.packbits(found.items),
    "counts": (found.num_texts, found.num_words),
  }
  array_files.save_npz(path, arrays, compressed=True)


def _load(
  probe: corpus_search.Probe, path: pathlib.Path
) -> corpus_search.Found:
  sizes = len(probe.ngrams.hashes), len(probe.lengths)
  try:
    stored = array_files.read_npz(path)
    ngrams, items = (
      np.unpackbits(stored[name], count=size).astype(bool)
      for name, size in zip(("ngrams", "items"), sizes, strict=True)
    )
    return corpus_search.Found(ngrams, items, *stored["counts"].tolist())
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{path}: expected what was found in a part, got"
      f" {type(error).__name__}: delete the file, and the part is searched again"
    ) from error


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
