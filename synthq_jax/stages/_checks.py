"""Refuses, before any work, settings that name what is not there or does not fit."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from synthq_jax import stages
from synthq_jax.data import shipped, sources
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.runtime import fingerprints, inputs
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.stages import prepare_data, prepare_test_set
from synthq_jax.storage import object_store

__all__ = [
  "check_checkpoints",
  "check_named",
  "check_size",
  "check_t5",
  "check_test_sets",
  "vocabulary",
]


def vocabulary(config: Any) -> vocabulary_lib.SentencePiece | None:
  """Returns the vocabulary of a run, checked against its checkpoints.

  None: it is trained, or lies under a URL, where looking would download it.
  """
  data, start = config.prepare_data, config.checkpoint
  if object_store.is_url(start) or object_store.is_url(data.vocabulary):
    return None
  place = shipped.checkpoint(start)
  found = prepare_data.check_vocabulary(
    data.vocabulary or inputs.vocabulary_beside(place), data.extra_ids
  )
  if found is not None:
    _check_ids(start, found)
    if config.encoder.folder and not config.encoder.has_tokenizer:
      _check_ids(config.encoder.folder, found)
  return found


def _check_ids(checkpoint: str, pieces: vocabulary_lib.SentencePiece) -> None:
  """Refuses a checkpoint that says another end of a text than its vocabulary."""
  if object_store.is_url(checkpoint):
    return
  place = shipped.checkpoint(checkpoint)
  try:
    shape = t5_checkpoints.load_config(place)
  except ValueError:  # who reads it says more
    return
  t5_checkpoints.with_token_ids(place, shape, pieces.token_ids)


def check_test_sets(config: Any) -> None:
  """Refuses sets that are not there or are the private log, and a main table of
  none of them."""
  further = prepare_test_set.expand(config.test_sets)
  if not config.has_public_queries:
    prepare_test_set.refuse_private(further, config.prepare_data.source)
  known = [*rows_lib.OWN_TEST_SETS, *(one.name for one in further)]
  if config.compare_queries.test_set not in known:
    raise ValueError(
      f"compare_queries.Config.test_set must be one of {', '.join(known)}, got"
      f" {config.compare_queries.test_set!r}: change it, or name the set in"
      " TEST_SETS"
    )


def check_named(config: Any, wanted: Sequence[str]) -> None:
  """Refuses data and checkpoints that are not there, before they are read.

  What lies under a URL is taken to be there: looking would download it.
  """
  data = config.prepare_data
  prepare_data.check_source(data)
  private = None if config.has_public_queries else data.source
  prepare_test_set.check_named(config.test_sets, private)
  check_checkpoints(config, wanted)
  if object_store.is_url(config.checkpoint):
    return
  check_t5(config)
  vocabulary(config)


def check_t5(config: Any) -> None:
  """Refuses a checkpoint of another shape than the model."""
  assert not isinstance(config.model, str)  # a name is replaced by its shape
  inputs.check_t5(shipped.checkpoint(config.checkpoint), config.model)


def check_checkpoints(config: Any, wanted: Sequence[str]) -> None:
  """Refuses checkpoints that a stage would read and could not."""
  named = {stages.get(name).starts_from for name in wanted} - {""}
  if config.encoder.folder and "encoder" in named:
    _check_encoder(config)
  if named:  # the one stands in for the other
    _check_checkpoint(config.checkpoint)


def _check_encoder(config: Any) -> None:
  """Refuses an encoder that cannot be read, or not with passages."""
  folder = config.encoder.folder
  if object_store.is_url(folder):
    return
  place = os.fspath(shipped.checkpoint(folder))
  encoder = dataclasses.replace(config.encoder, folder=place)
  if not encoder.has_tokenizer:
    _check_checkpoint(folder)
    return
  if config.prepare_data.passage_stride:
    raise ValueError(
      f"{folder}: expected documents read whole by an encoder's own tokenizer, got"
      f" passage_stride={config.prepare_data.passage_stride}: set"
      " --gin.PASSAGE_STRIDE=0"
    )
  encoder.check()


def _check_checkpoint(named: str) -> None:
  if not object_store.is_url(named):
    fingerprints.check_checkpoint(shipped.checkpoint(named))


def check_size(config: Any, wanted: Sequence[str]) -> None:
  """Refuses, before the data is read, more documents than it can have."""
  number, source = config.generate.num_documents, config.prepare_data.source
  if number is None or "generate" not in wanted:
    return
  sources.open(source, "prepare_data.source").check_size(number)
