"""SeqIO tasks of this project, registered when asked and never at import.

Their features have the names that T5X reads: "inputs" and "targets", tokenised,
cut and ended with EOS. The ids ride along as "query_id" and "passage_id".

References:
  Roberts et al., "Scaling Up Models and Data with t5x and seqio", 2022.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from synthq_jax import extras
from synthq_jax.data import beir_sets, task_sources
from synthq_jax.data import vocabulary as vocabulary_lib

if TYPE_CHECKING:
  import seqio

__all__ = [
  "GENERATION_LENGTHS",
  "PREFIX",
  "RETRIEVAL_LENGTHS",
  "register_beir",
  "register_dual_encoder",
  "register_msmarco",
  "register_query_generation",
]

PREFIX = "generate_query: "
"""What the papers' generator reads before a document."""
GENERATION_LENGTHS = {"inputs": 384, "targets": 128}
"""The papers' TASK_FEATURE_LENGTHS: a document, a query."""
RETRIEVAL_LENGTHS = {"inputs": 128, "targets": 384}
"""A query, a document; "negative_targets" as "targets"."""

Vocabulary = Any  # from `vocabulary.load`, or of SeqIO
Preprocessor = Callable[..., Any]


def register_query_generation(
  name: str,
  source: task_sources.Source,
  vocabulary: "Vocabulary",
  *,
  prefix: str = PREFIX,
) -> "seqio.Task":
  """Registers a task that turns a document into a query.

  One example for each pair whose grade is above 0: a query with two relevant
  documents is two examples. Where the unit of privacy is the query, these two
  are one record (see `sampling`).

  Args:
    name: of the task; a task of that name is replaced, but not in mixtures made
      of it before.
    source: of the pairs.
    vocabulary: T5's, from `vocabulary.load`.
    prefix: stands before each document.

  Returns:
    The task; give it to T5X by name (MIXTURE_OR_TASK_NAME) with
    `GENERATION_LENGTHS` and seqio.EncDecFeatureConverter.
  """
  return _register(
    name,
    source,
    vocabulary,
    [_pairs(inputs="document", targets="query")],
    prefix=prefix,
  )


def register_dual_encoder(
  name: str,
  source: task_sources.Source,
  vocabulary: "Vocabulary",
  *,
  negatives: bool = False,
) -> "seqio.Task":
  """Registers a task of queries and their documents.

  Splits of judgements give pairs whose grade is above 0. The splits "query" and
  "passage" give all queries and all documents, for encoding a collection; the
  other side of their rows is empty (EOS alone).

  Examples are pairs, and with negatives a pair comes several times. Where the
  unit of privacy is the query, the examples of one query are one record, and a
  Poisson sample is one of queries.

  Args:
    name: of the task; a task of that name is replaced, but not in mixtures made
      of it before.
    source: of pairs, queries and documents.
    vocabulary: T5's, from `vocabulary.load`.
    negatives: whether each example has a hard negative of the source's table; a
      query with several comes once for each, one without is left out.

  Returns:
    The task, for `feature_converters.dual_encoder` with `RETRIEVAL_LENGTHS`.

  Raises:
    ValueError: if negatives are asked of a source that has none.
  """
  return _register(
    name,
    source,
    vocabulary,
    [_pairs(inputs="query", targets="document", negatives=negatives)],
    negatives=negatives,
  )


def register_msmarco(
  vocabulary: "Vocabulary", source: task_sources.Source | None = None
) -> list[str]:
  """Registers msmarco_query_generation and msmarco_dual_encoder.

  Args:
    vocabulary: T5's, from `vocabulary.load`.
    source: of MS MARCO; None: what TFDS prepared, whose pairs lack some (see
      `beir_sets`).

  Returns:
    The names of the tasks.
  """
  source = source or task_sources.Tfds(name="msmarco")
  generation = register_query_generation(
    "msmarco_query_generation", source, vocabulary
  )
  encoder = register_dual_encoder("msmarco_dual_encoder", source, vocabulary)
  return [generation.name, encoder.name]


def register_beir(
  vocabulary: "Vocabulary", *, data_dir: str | None = None
) -> list[str]:
  """Registers a dual encoder task for each BEIR set of TFDS, and mixtures.

  The mixtures beir_cqadupstack (its twelve parts) and beir_zero_shot (all of the
  papers' eleven sets) name sets for evaluation; their examples have one rate.
  Nothing is read, so sets that are not prepared do no harm until they are used.
  For a set in a folder: `register_dual_encoder` with `task_sources.Folder`.

  Args:
    vocabulary: T5's, from `vocabulary.load`.
    data_dir: where TFDS keeps its data; None: its default.

  Returns:
    The names of tasks and mixtures.
  """
  with extras.required("seqio"):
    import seqio

  names = []
  for each in beir_sets.SETS:
    source = task_sources.Tfds(name=each.name, data_dir=data_dir)
    register_dual_encoder(each.task, source, vocabulary)
    names.append(each.task)
  for group, members in beir_sets.GROUPS.items():
    _mixture(seqio, f"beir_{group}", members)
    names.append(f"beir_{group}")
  members = [
    member
    for name in beir_sets.ZERO_SHOT
    for member in beir_sets.GROUPS.get(name, (name,))
  ]
  _mixture(seqio, "beir_zero_shot", members)
  return [*names, "beir_zero_shot"]


def _mixture(seqio, name: str, members: Sequence[str]) -> None:
  tasks = [beir_sets.get(member).task for member in members]
  if name in seqio.MixtureRegistry.names():
    seqio.MixtureRegistry.remove(name)
  seqio.MixtureRegistry.add(name, tasks, default_rate=1.0)


def _register(
  name, source, vocabulary, preprocessors, *, prefix="", negatives=False
) -> "seqio.Task":
  """Registers a task of tokenised, cut and ended features."""
  with extras.required("seqio"):
    import seqio
    import tensorflow as tf

  _check_vocabulary(vocabulary)
  vocabulary = vocabulary_lib.as_seqio(vocabulary)
  feature = seqio.Feature(vocabulary, add_eos=True, dtype=tf.int32)
  features = {"inputs": feature, "targets": feature}
  if negatives:
    features["negative_targets"] = feature
  if name in seqio.TaskRegistry.names():
    seqio.TaskRegistry.remove(name)
  return seqio.TaskRegistry.add(
    name,
    source=source.data_source(negatives=negatives),
    preprocessors=[
      *preprocessors,
      seqio.preprocessors.tokenize,
      _with_prefix(vocabulary, prefix),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=features,
    metric_fns=[],
  )


def _pairs(*, inputs: str, targets: str, negatives: bool = False):
  """Returns a preprocessor from rows of a source to texts of a task."""

  def pairs(dataset):
    """Keeps relevant pairs, and rows that hold one side alone."""
    with extras.required("seqio"):
      import tensorflow as tf

    def keep(row):
      one_sided = (row["query_id"] == "") | (row["passage_id"] == "")
      relevant = row["score"] > 0
      if negatives:
        relevant &= row["negative"] != ""
      return one_sided | relevant

    def rename(row):
      texts = {
        "query": row["query"],
        "document": _contents(row["passage_metadata"], row["passage"]),
      }
      made = {
        "inputs": texts[inputs],
        "targets": texts[targets],
        "query_id": row["query_id"],
        "passage_id": row["passage_id"],
      }
      if negatives:
        made["negative_targets"] = row["negative"]
      return made

    return dataset.filter(keep).map(rename, num_parallel_calls=tf.data.AUTOTUNE)

  return pairs


def _contents(metadata, text):
  """Returns title and text as one string, as `Document.contents` does."""
  with extras.required("seqio"):
    import tensorflow as tf

  def titled(metadata, text):
    title = json.loads(metadata.decode() or "{}").get("title") or ""
    return f"{title} {text.decode()}".strip().encode()

  def join():
    joined = tf.numpy_function(titled, [metadata, text], tf.string)
    return tf.ensure_shape(joined, ())

  has_title = tf.strings.regex_full_match(metadata, r'(?s).*"title".*')
  return tf.cond(has_title, join, lambda: tf.strings.strip(text))


def _with_prefix(vocabulary, prefix: str) -> Preprocessor:
  """Returns a preprocessor that puts the tokens of a prefix before inputs.

  The prefix is tokenised on its own, as in `vocabulary.tokenize`, so that tasks
  and pipeline give the same numbers.
  """
  head = vocabulary.encode(prefix) if prefix else []

  def with_prefix(dataset):
    with extras.required("seqio"):
      import tensorflow as tf

    if not head:
      return dataset

    def add(row):
      joined = tf.concat([tf.constant(head, tf.int32), row["inputs"]], axis=0)
      return {**row, "inputs": joined}

    return dataset.map(add, num_parallel_calls=tf.data.AUTOTUNE)

  return with_prefix


def _check_vocabulary(vocabulary: Any) -> None:
  """Refuses a vocabulary that pads otherwise, or cannot be padded with 0."""
  if vocabulary.pad_id != vocabulary_lib.PAD_ID:
    raise ValueError(
      "expected a vocabulary whose padding is id 0, got"
      f" pad_id={vocabulary.pad_id}: give T5's SentencePiece model"
    )
  vocabulary_lib.check_ids(vocabulary, type(vocabulary).__name__)
