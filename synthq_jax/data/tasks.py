"""Registers SeqIO tasks over the collections of `sources`.

A task reads any source of `sources.open`, with the same reader. Its features have
T5X's names "inputs" and "targets", tokenized, truncated and ending with EOS. A row
also has other columns (`COLUMNS`), so that `task_records` finds the whole
collection in a task or in its cache.

An import registers nothing. T5X users register their own tasks in a module that a
gin file imports (`import my_tasks`) or that MIXTURE_OR_TASK_MODULE names.
`get_source` imports such a module for synthq.

References:
  Roberts et al., "Scaling Up Models and Data with t5x and seqio", 2022.
"""

import functools
import importlib
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synthq_jax import extras
from synthq_jax.data import beir_sets, sources, splits
from synthq_jax.data import collection as collection_lib
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.data.task_records import PASSAGE, QUERY

if TYPE_CHECKING:
  import seqio

__all__ = [
  "COLUMNS",
  "GENERATION_LENGTHS",
  "PREFIX",
  "RETRIEVAL_LENGTHS",
  "get_source",
  "register",
  "register_beir",
]

PREFIX = "generate_query: "
"""Prefix of each document for the papers' generator."""
GENERATION_LENGTHS = {"inputs": 384, "targets": 128}
"""The papers' TASK_FEATURE_LENGTHS: tokens of a document and of a query."""
RETRIEVAL_LENGTHS = {"inputs": 128, "targets": 384}
"""Tokens of a query and of a document."""

COLUMNS = ("query_id", "query", "client", "passage_id", "title", "passage")
"""Columns of texts of a row.

Other columns are "score", the grade; "number", the row's position in its split;
"is_example", 1 if T5X trains on the row."""

_SHARDS = 64
"""Number of parts that `seqio_cache_tasks` may prepare on different machines."""
_EXTRA_IDS = 100  # sentinels of T5's vocabulary


def register(
  name: str,
  source: str,
  vocabulary: Any,
  *,
  form: str = "query_generation",
  one_per_query: bool = True,
  prefix: str = PREFIX,
) -> str:
  """Registers a task over a collection and returns its name.

  It has the splits of the source's judgements, and two more, "query" and
  "passage", with all queries and all documents; their rows have no judgement. A
  row with a grade of 0, or of a document that the collection lacks, is in the
  cache and is no example.

  A gin file of T5X or of synthq can call it instead of giving a name:

      MIXTURE_OR_TASK_NAME = @tasks.register()
      tasks.register.name = 'msmarco'
      tasks.register.source = 'msmarco:FOLDER'
      tasks.register.vocabulary = %VOCABULARY

  Args:
    name: the name of the task. A registered task of that name is replaced, but not
      in existing mixtures.
    source: a source, as SOURCE of a run, e.g. "msmarco:DIR" or "beir:DIR".
    vocabulary: T5's vocabulary: the path of a SentencePiece model, an object from
      `vocabulary.load`, or SeqIO's.
    form: "query_generation", whose inputs are documents and whose targets are
      queries (`GENERATION_LENGTHS`); or "dual_encoder", whose inputs are queries
      (`RETRIEVAL_LENGTHS`).
    one_per_query: whether a query is one example, with the document that
      `prepare_data` chooses. If not, each pair is one example, and a query with
      several documents is protected less (`privacy.sampling`).
    prefix: text before each document that is an input.

  Raises:
    ValueError: if the source or form is unknown, or the vocabulary cannot be
      padded.
  """
  with extras.required("seqio"):
    import seqio

  if form not in ("query_generation", "dual_encoder"):
    raise ValueError(
      "expected form='query_generation' or 'dual_encoder' of a task, got"
      f" {form!r}"
    )
  if isinstance(vocabulary, (str, os.PathLike)):
    vocabulary = vocabulary_lib.load(vocabulary, extra_ids=_EXTRA_IDS)
  _check_vocabulary(vocabulary)
  vocabulary = vocabulary_lib.as_seqio(vocabulary)
  is_generation = form == "query_generation"
  if name in seqio.TaskRegistry.names():
    seqio.TaskRegistry.remove(name)
  sources.check(source)
  seqio.TaskRegistry.add(
    name,
    source=_make_data_source(
      sources.open(source), is_generation, one_per_query
    ),
    preprocessors=[
      seqio.preprocessors.tokenize,
      _make_prefixer(vocabulary.encode(prefix) if is_generation else []),
      seqio.CacheDatasetPlaceholder(),
      # Rows on which T5X does not train; the cache keeps them.
      lambda rows: rows.filter(lambda row: row["is_example"] > 0),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=dict.fromkeys(
      ("inputs", "targets"),
      seqio.Feature(vocabulary, add_eos=True, dtype=np.int32),
    ),
    metric_fns=[],
  )
  return name


def register_beir(folder: str, vocabulary: Any) -> list[str]:
  """Registers a dual encoder task for each BEIR set below a folder, and mixtures.

  A task has the name of `beir_sets.BeirSet.task`, e.g. beir_fiqa. The mixtures
  beir_cqadupstack and beir_zero_shot (the papers' eleven sets) are registered if
  all of their sets are. They serve evaluation; all tasks have the same rate.

  Args:
    folder: a folder of sets with the names of BEIR's downloads, e.g. trec-covid and
      cqadupstack/gis.
    vocabulary: as in `register`.

  Returns:
    The names of tasks and mixtures.
  """
  with extras.required("seqio"):
    import seqio

  names = []
  for each in beir_sets.SETS:
    below = each.name.replace("_", "-").replace(".", "/")
    if (root := pathlib.Path(folder, below)).is_dir():
      register(
        each.task, f"beir:{root}", vocabulary, form="dual_encoder",
        one_per_query=False,
      )  # fmt: skip
      names.append(each.task)
  groups = {**beir_sets.GROUPS, "zero_shot": beir_sets.ZERO_SHOT}
  for group, members in groups.items():
    parts = [x for name in members for x in beir_sets.GROUPS.get(name, (name,))]
    tasks = [beir_sets.get(part).task for part in parts]
    if set(tasks) <= set(names):
      mixture = f"beir_{group}"
      if mixture in seqio.MixtureRegistry.names():
        seqio.MixtureRegistry.remove(mixture)
      seqio.MixtureRegistry.add(mixture, tasks, default_rate=1.0)
      names.append(mixture)
  return names


def get_source(
  *, mixture_or_task_name: str, module: str | None = None, kind: str = "seqio"
) -> str:
  """Imports the module that registers a task and returns the task as a SOURCE.

  Args:
    mixture_or_task_name: T5X's MIXTURE_OR_TASK_NAME: a task or mixture, or the
      folder of a cached task; "@" and a second name may follow (`sources`).
    module: T5X's MIXTURE_OR_TASK_MODULE, which registers the task; None: it is
      registered already, such as by an import of the gin file.
    kind: "seqio", or "seqio_pairs" for tasks without ids.
  """
  if module:
    importlib.import_module(module)
  return f"{kind}:{mixture_or_task_name}"


def _make_data_source(
  source: sources.Source, is_generation: bool, one_per_query: bool
) -> "seqio.DataSource":
  """Makes a source of rows; the collection is read at the first use."""
  with extras.required("seqio"):
    import seqio
    import tensorflow as tf

  @functools.cache
  def read() -> collection_lib.Collection:
    data = source.read()
    if {QUERY, PASSAGE} & data.qrels.keys():
      raise ValueError(
        f"expected judgements of other splits than {QUERY} and {PASSAGE}, which"
        f" name all queries and all documents, got {sorted(data.qrels)};"
        " rename a file"
      )
    return data

  texts = [*COLUMNS, "inputs", "targets"]
  spec = {name: tf.TensorSpec((), tf.string) for name in texts}
  spec["score"] = tf.TensorSpec((), tf.float32)
  spec["number"] = tf.TensorSpec((), tf.int64)
  spec["is_example"] = tf.TensorSpec((), tf.int32)

  class CollectionSource(seqio.DataSource):
    """Yields the rows of a split; each shard reads all files and yields its
    share."""

    supports_arbitrary_sharding = True

    def __init__(self):
      super().__init__(splits=())

    @property
    def splits(self) -> Sequence[str]:
      return (QUERY, PASSAGE, *read().qrels)

    def list_shards(self, split: str) -> Sequence[str]:
      return [f"{split}-{part}" for part in range(_SHARDS)]

    def get_dataset(
      self, split="train", shuffle=True, seed=None, shard_info=None, **unused
    ):
      del unused
      part, parts = 0, 1
      if shard_info is not None:
        part, parts = shard_info.index, shard_info.num_shards
      data = read()  # not in `rows`: TensorFlow hides a generator's errors
      by_text = sources.KINDS[source.kind].named_by_text

      def rows() -> Iterator[dict[str, Any]]:
        # Each reading has the same order, since it starts from the same seed.
        order = np.random.default_rng(seed) if shuffle else None
        all_rows = _make_rows(
          data, split, order, is_generation, one_per_query, by_text
        )
        return itertools.islice(all_rows, part, None, parts)

      return tf.data.Dataset.from_generator(rows, output_signature=spec)

  return CollectionSource()


def _make_rows(
  data: collection_lib.Collection,
  split: str,
  order: np.random.Generator | None,
  is_generation: bool,
  one_per_query: bool,
  by_text: bool,
) -> Iterator[dict[str, Any]]:
  """Yields the rows of a split; `order` shuffles the pairs, if it is given."""

  def make_row(number, query=None, document=None, grade=-1.0, is_=1):
    question = query.text if query else ""
    text = document.contents if document else ""
    return {
      "query_id": query.id if query else "",
      "query": question,
      "client": query.client if query else "",
      "passage_id": document.id if document else "",
      "title": document.title if document else "",
      "passage": document.text if document else "",
      "inputs": text if is_generation else question,
      "targets": question if is_generation else text,
      "score": np.float32(grade),
      "number": number,
      "is_example": int(is_),
    }

  if split == QUERY:
    for number, query in enumerate(data.queries):
      yield make_row(number, query)
    return
  if split == PASSAGE:
    for number, document in enumerate(data.documents):
      yield make_row(number, document=document)
    return
  judged = data.judgements(split)
  examples = set(data.pairs(split))
  if one_per_query:
    relevant: dict[str, list[str]] = {}
    for query, document in examples:
      relevant.setdefault(query, []).append(document)
    examples = {
      (query, splits.choose_document(documents, query, by_text=by_text))
      for query, documents in relevant.items()
    }
  queries = data.query_by_id()
  needed = {document for grades in judged.values() for document in grades}
  documents = {d.id: d for d in data.documents if d.id in needed}
  graded = [
    (query, document, grade)
    for query, grades in judged.items()
    for document, grade in grades.items()
  ]
  numbers = range(len(graded))
  for number in numbers if order is None else order.permutation(len(graded)):
    query, document, grade = graded[number]
    is_example = (query, document) in examples
    text = documents.get(document) or collection_lib.Document(document, "")
    yield make_row(number, queries[query], text, grade, is_example)


def _make_prefixer(head: Sequence[int]):
  """Makes a preprocessor that adds the tokens of a prefix before the inputs.

  The prefix is tokenized on its own, as in `vocabulary.tokenize`, so that tasks
  and pipeline produce the same tokens.
  """

  def add_tokens(dataset):
    with extras.required("seqio"):
      import tensorflow as tf

    def add(row):
      joined = tf.concat([tf.constant(head, tf.int32), row["inputs"]], axis=0)
      return {**row, "inputs": joined}

    return dataset.map(add, tf.data.AUTOTUNE) if head else dataset

  return add_tokens


def _check_vocabulary(vocabulary: Any) -> None:
  """Refuses a vocabulary whose padding is not 0, or that cannot be padded with
  0."""
  if vocabulary.pad_id != vocabulary_lib.PAD_ID:
    raise ValueError(
      "expected a vocabulary whose padding is id 0, got"
      f" pad_id={vocabulary.pad_id}: give T5's SentencePiece model"
    )
  vocabulary_lib.check_ids(vocabulary, type(vocabulary).__name__)
