"""Commands that are no stages: calculator, export, corpora, leaks."""

import argparse

from synthq_jax import _flags

__all__ = ["TOOLS"]


def _privacy(options: argparse.Namespace) -> str:
  """What the calculator or the ledger says."""
  from synthq_jax.privacy import calculator, ledger

  given = _flags.privacy_question(options)
  path = given.pop("ledger", None)
  return (
    ledger.describe(path, **given) if path else calculator.describe(**given)
  )


def _export(options: argparse.Namespace) -> str:
  """Writes a checkpoint in another format; says what holds for it."""
  from synthq_jax.pipeline import export

  return export.run(
    options.checkpoint,
    options.to,
    format=options.format,
    step=options.step,
    allow_private=options.allow_private,
  )


def _corpus_overlap(options: argparse.Namespace) -> str:
  """Looks for a run's queries and documents in a pre-training corpus."""
  from synthq_jax.audit import corpus_overlap as overlap_lib
  from synthq_jax.pipeline import corpus_overlap

  config = overlap_lib.Config(
    sample_size=options.sample_size,
    runs=options.runs,
    ngram=options.ngram,
    seed=options.seed,
  )
  return corpus_overlap.run(
    options.workdir,
    options.corpus,
    config=config,
    share=_flags.share(options.share),
    progress=not options.quiet,
  )


def _leakage(options: argparse.Namespace) -> str:
  """Looks for queries of a log among other texts."""
  from synthq_jax.pipeline import near_duplicates

  detectors = [
    near_duplicates.detector(
      name,
      threshold=options.threshold,
      checkpoint=options.checkpoint,
      vocabulary=options.vocabulary,
      bert=options.bert,
    )
    for name in dict.fromkeys(options.detector)
  ]
  return near_duplicates.run(
    options.queries,
    options.targets,
    options.output,
    detectors,
    progress=not options.quiet,
  )


TOOLS = {
  "privacy": _privacy,
  "export": _export,
  "corpus_overlap": _corpus_overlap,
  "leakage": _leakage,
}
"""By command: takes the parsed flags, returns what is printed."""
