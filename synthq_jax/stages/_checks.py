"""Refuses settings that name missing files or do not fit, before any work."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from synthq_jax import stages
from synthq_jax.data import sentence_tokens, shipped, sources, tokenizer_json
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.runtime import fingerprints, model_files
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.stages import prepare_data, prepare_test_set, train_retriever
from synthq_jax.storage import object_store

__all__ = [
  "check_batches",
  "check_checkpoints",
  "check_named",
  "check_rows",
  "check_size",
  "check_t5",
  "check_test_sets",
  "describe_prompts",
  "load_vocabulary",
]


def load_vocabulary(
  config: Any,
) -> tuple[vocabulary_lib.SentencePiece | None, list[str]]:
  """Loads the vocabulary of a run, checked against its checkpoints.

  Returns:
    The vocabulary, None if it is trained or lies under a URL: a look would download
    it; and the tokens that the checkpoint's tokenizer adds to it.
  """
  data, start = config.prepare_data, config.checkpoint
  if object_store.is_url(start) or object_store.is_url(data.vocabulary):
    return None, []
  folder = shipped.checkpoint(start)
  pieces = prepare_data.check_vocabulary(
    data.vocabulary or model_files.vocabulary_beside(folder), data.extra_ids
  )
  if pieces is None:
    return None, []
  added = _find_added(start, pieces)
  if config.encoder.folder and not config.encoder.has_tokenizer:
    _find_added(config.encoder.folder, pieces)
  return pieces, added


def _find_added(
  checkpoint: str, pieces: vocabulary_lib.SentencePiece
) -> list[str]:
  """Finds added tokens; refuses a checkpoint with ids of another vocabulary."""
  if object_store.is_url(checkpoint):
    return []
  folder = shipped.checkpoint(checkpoint)
  added = tokenizer_json.find_added(folder, pieces)
  try:
    shape = t5_checkpoints.load_config(folder)
  except ValueError:  # the reader's message says more
    return added
  t5_checkpoints.with_token_ids(folder, shape, pieces.token_ids)
  return added


def check_test_sets(config: Any) -> None:
  """Refuses missing or private test sets, and an unknown set for the main
  table."""
  test_sets = prepare_test_set.expand(config.test_sets)
  if not config.has_public_queries:
    prepare_test_set.refuse_private(test_sets, config.prepare_data.source)
  names = [*rows_lib.OWN_TEST_SETS, *(test_set.name for test_set in test_sets)]
  if config.compare_queries.test_set not in names:
    raise ValueError(
      f"compare_queries.Config.test_set must be one of {', '.join(names)}, got"
      f" {config.compare_queries.test_set!r}: change it, or name the set in"
      " TEST_SETS"
    )


def check_named(config: Any, stage_names: Sequence[str]) -> None:
  """Refuses data and checkpoints that are missing, before they are read.

  Files under a URL are assumed to exist: a look would download them.
  """
  data = config.prepare_data
  prepare_data.check_source(data)
  private = None if config.has_public_queries else data.source
  prepare_test_set.check_named(config.test_sets, private)
  check_checkpoints(config, stage_names)
  if object_store.is_url(config.checkpoint):
    return
  check_t5(config)
  load_vocabulary(config)


def check_t5(config: Any) -> None:
  """Refuses a checkpoint of another shape than the model."""
  assert not isinstance(config.model, str)  # a name is replaced by its shape
  model_files.check_t5(shipped.checkpoint(config.checkpoint), config.model)


def _list_starts(stage_names: Sequence[str]) -> set[str]:
  return {stages.get(name).starts_from for name in stage_names} - {""}


def describe_prompts(config: Any, stage_names: Sequence[str]) -> list[str]:
  """Returns notes on an encoder's prompts, pooling, similarity and length of texts.

  Folders of E5 and BGE lack the prompts that their cards ask for. An index whose
  vectors are of longer texts, or not of length 1, is another one than the run's.
  """
  encoder = config.encoder
  if "encoder" not in _list_starts(stage_names) or object_store.is_url(
    encoder.folder
  ):
    return []
  tokens = encoder.tokens()
  if tokens is None:
    return []
  texts = tokens.texts
  query, document = (
    repr(prompt) if prompt else "nothing"
    for prompt in (texts.query_prompt, texts.document_prompt)
  )
  notes = [
    f"note: the encoder reads {query} before queries and {document} before"
    " documents. If your index has others (as the cards of E5 and BGE ask for):"
    " --gin.QUERY_PROMPT='...' --gin.DOCUMENT_PROMPT='...'"
  ]
  folder = pathlib.Path(encoder.folder)
  if not (folder / sentence_folders.MODULES).is_file():
    notes.append(
      "note: the encoder's folder has no modules.json: a text's vector is the mean"
      " of its tokens', as in sentence-transformers. If your index has others (BGE"
      " takes the first token's), give the whole folder of the hub"
    )
  if not sentence_folders.says_cosine(folder):
    notes.append(
      "note: the encoder's vectors are scaled to length 1, and compared by cosines."
      " Rankings by dot products of its vectors as they are (as Contriever's and"
      " TAS-B's) are others: your index must hold vectors of length 1"
    )
  uncut = dataclasses.replace(encoder, length=sentence_tokens.ENDLESS).tokens()
  assert uncut is not None
  if tokens.length < uncut.length:
    most, length = str(uncut.length), "0"
    # Static vectors: nothing is cut.
    if uncut.length == sentence_tokens.ENDLESS:
      most, length = "all of them", str(4 * tokens.length)
    notes.append(
      f"note: the encoder reads the first {tokens.length} tokens of a document, its"
      f" folder {most}. If your index has vectors of {most}:"
      f" --gin.ENCODER_LENGTH={length}"
    )
  return notes


def check_checkpoints(config: Any, stage_names: Sequence[str]) -> None:
  """Refuses checkpoints that a stage reads and cannot load."""
  starts = _list_starts(stage_names)
  if config.encoder.folder and "encoder" in starts:
    _check_encoder(config)
  if starts:  # without an encoder, the checkpoint is the start
    _check_checkpoint(config.checkpoint)


def _check_encoder(config: Any) -> None:
  """Refuses an encoder that cannot be loaded, or not with passages."""
  folder = config.encoder.folder
  if object_store.is_url(folder):
    return
  path = os.fspath(shipped.checkpoint(folder))
  encoder = dataclasses.replace(config.encoder, folder=path)
  if not os.path.exists(path):
    raise ValueError(
      f"ENCODER must be the folder of a model, got {folder!r}, which is none:"
      " download it with `hf download MODEL --local-dir=FOLDER`"
    )
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


def _check_checkpoint(checkpoint: str) -> None:
  if not object_store.is_url(checkpoint):
    fingerprints.check_checkpoint(shipped.checkpoint(checkpoint))


def check_rows(config: Any) -> None:
  """Refuses names in LTR and COMPARED that no row of the run has.

  Recipes name whole kinds of rows, and a run may lack some of them.
  """
  plan = rows_lib.Plan(config=config, stages=())
  retrievers = plan.retrievers
  private = [row for row in retrievers if row.epsilon is not None]
  for field, macro, rows in (
    ("ltr", "LTR", retrievers),
    ("compared", "COMPARED", (*private, *plan.ranked)),
  ):
    names = getattr(config.rows, field)
    odd = [
      name
      for name in names
      if name.removeprefix(f"{rows_lib.RANKED}_") not in rows_lib.KINDS
      and not any(rows_lib.begins_with(row, [name]) for row in rows)
    ]
    if field == "ltr" and not plan.ranked:
      odd = [*names]
    if odd:
      raise ValueError(
        f"plan.Rows.{field} ({macro}) must name rows of this run, got"
        f" {', '.join(odd)}: it has {', '.join(map(str, rows)) or 'none'}"
      )


def check_batches(config: Any, stage_names: Sequence[str]) -> None:
  """Refuses batches of more queries than the data has lines.

  A run compares them with the data, once that is read.
  """
  plan = rows_lib.Plan(config=config, stages=tuple(stage_names))
  trainings = []
  if plan.generators and "finetune_dp" in stage_names:
    trainings.append(config.finetune_dp)
  if "direct_dp" in stage_names:
    trainings += plan.direct.values()
  source = sources.open(config.prepare_data.source, "prepare_data.source")
  trains = bool(plan.trained) and "train_retriever" in stage_names
  most = source.most_queries() if trainings or trains else None
  for settings in trainings if most is not None else ():
    settings.check_batch(most, "lines of queries")
  if trains:
    documents = config.generate.num_documents
    if config.prepare_data.passage_stride:
      documents = None  # queries are written for passages
    elif documents is None and set(plan.written) & set(plan.trained):
      documents = source.most_documents()
    train_retriever.check_batch(plan, most, documents)


def check_size(config: Any, stage_names: Sequence[str]) -> None:
  """Refuses more documents than the data can have, before it is read."""
  number, source = config.generate.num_documents, config.prepare_data.source
  if number is None or "generate" not in stage_names:
    return
  sources.open(source, "prepare_data.source").check_size(number)
