"""Lists the sets of BEIR and reads those that TensorFlow Datasets has prepared.

Pitfall: if a document is judged for several queries, the judgements that TFDS'
builder writes (version 1.0.0) keep ONE of them and silently drop the others. That
means fewer pairs for training, but wrong scores. So `read` takes judgements from
the qrels files of the download.

References:
  Thakur et al., "BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of
  Information Retrieval Models", NeurIPS 2021, Table 1.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from synthq_jax import extras
from synthq_jax.data import beir
from synthq_jax.data import collection as collection_lib

if TYPE_CHECKING:
  import tensorflow_datasets as tfds

__all__ = [
  "GROUPS",
  "SETS",
  "ZERO_SHOT",
  "BeirSet",
  "get_builder",
  "get",
  "get_prepare_command",
  "read",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeirSet:
  """A set of BEIR.

  Attributes:
    name: the name of the configuration in TFDS, such as "fiqa" of "beir/fiqa".
    splits: TFDS's names of the splits with judgements.
    scored: the split that is scored by convention: "test", or MS MARCO's dev
      split.
    holds_queries: whether the collection holds the queries as documents with equal
      ids, so that a query finds itself (ArguAna, Quora).
  """

  name: str
  splits: tuple[str, ...] = ("test",)
  scored: str = "test"
  holds_queries: bool = False

  @property
  def task(self) -> str:
    """The name of the set's SeqIO task.

    >>> get("cqadupstack.gis").task
    'beir_cqadupstack_gis'
    """
    return "beir_" + self.name.replace(".", "_")


_ALL = ("train", "validation", "test")
_FORUMS = (
  "android",
  "english",
  "gaming",
  "gis",
  "mathematica",
  "physics",
  "programmers",
  "stats",
  "tex",
  "unix",
  "webmasters",
  "wordpress",
)

SETS: tuple[BeirSet, ...] = (
  BeirSet(name="msmarco", splits=_ALL, scored="validation"),
  BeirSet(name="trec_covid"),
  BeirSet(name="nfcorpus", splits=_ALL),
  BeirSet(name="nq"),
  BeirSet(name="hotpotqa", splits=_ALL),
  BeirSet(name="fiqa", splits=_ALL),
  BeirSet(name="arguana", holds_queries=True),
  BeirSet(name="webis_touche2020"),
  *(BeirSet(name=f"cqadupstack.{forum}") for forum in _FORUMS),
  BeirSet(name="quora", splits=("validation", "test"), holds_queries=True),
  BeirSet(name="dbpedia_entity", splits=("validation", "test")),
  BeirSet(name="scidocs"),
  BeirSet(name="fever", splits=_ALL),
  BeirSet(name="climate_fever"),
  BeirSet(name="scifact", splits=("train", "test")),
)
"""All configurations of TFDS' beir, version 1.0.0, in its order."""

GROUPS: Mapping[str, tuple[str, ...]] = {
  "cqadupstack": tuple(f"cqadupstack.{forum}" for forum in _FORUMS)
}
"""Groups of sets that count as one: the mean over their sets."""

ZERO_SHOT: tuple[str, ...] = (
  "arguana",
  "cqadupstack",
  "dbpedia_entity",
  "fiqa",
  "hotpotqa",
  "nfcorpus",
  "quora",
  "scidocs",
  "scifact",
  "trec_covid",
  "webis_touche2020",
)
"""The eleven columns of the papers' zero-shot tables, by set or group."""


def get(name: str) -> BeirSet:
  """Returns a set by its name in TFDS.

  Raises:
    ValueError: if TFDS has no set of that name.
  """
  for each in SETS:
    if each.name == name:
      return each
  names = ", ".join(each.name for each in SETS)
  raise ValueError(f"expected a BEIR set of {names}; got name={name!r}")


def get_prepare_command(
  name: str, data_dir: str | os.PathLike | None = None
) -> str:
  """Returns the commands that prepare a dataset.

  `tfds build` is no alternative: it imports packages that TFDS does not install.

  >>> print(get_prepare_command("beir/fiqa"))
  pip install 'synthq_jax[tfds]' && python -c "import tensorflow_datasets as tfds; tfds.builder('beir/fiqa').download_and_prepare()"
  """
  where = f", data_dir='{os.fspath(data_dir)}'" if data_dir else ""
  return (
    "pip install 'synthq_jax[tfds]' && python -c \"import tensorflow_datasets as"
    f" tfds; tfds.builder('{name}'{where}).download_and_prepare()\""
  )


def get_builder(name: str) -> "tfds.core.DatasetBuilder":
  """Returns the builder of a set prepared in TFDS's data folder.

  Args:
    name: the name of the set, such as "fiqa".

  Raises:
    ValueError: if the set is unknown or not prepared; the message gives the
      command that prepares it.
  """
  with extras.required("seqio"):
    import tensorflow_datasets as tfds

  get(name)
  builder = tfds.builder(f"beir/{name}")
  if not builder.is_prepared():
    raise ValueError(
      f"{builder.data_dir}: expected beir/{name} prepared by TFDS, got nothing; run"
      f" {get_prepare_command(f'beir/{name}')}, or read its BEIR folder"
      " instead"
    )
  return builder


def read(
  name: str,
  qrels: str | os.PathLike,
  *,
  dangling: collection_lib.Dangling | None = None,
) -> collection_lib.Collection:
  """Reads a prepared set; its documents stay on disk.

  Args:
    name: the name of the set, such as "fiqa".
    qrels: the folder with the judgements of the download (test.tsv and others),
      since TFDS drops some, see the module.
    dangling: counts judgements of unknown ids, see `collection.judge`; None:
      they are refused.

  Returns:
    The collection; the files of judgements name its splits.

  Raises:
    ValueError: as `get_builder`, or if an id occurs twice, a query is empty or a
      judgement names an unknown id.
  """
  builder = get_builder(name)
  where = f"beir/{name}"
  queries = collection_lib.by_id(where, "query", _read_queries(builder))
  documents, ids = collection_lib.read_documents(
    where, lambda: _read_documents(builder)
  )
  judged = beir.read_qrels(pathlib.Path(qrels), queries.keys(), ids, dangling)
  return collection_lib.collect(documents, queries.values(), judged)


def _read_queries(builder) -> Iterator[tuple[str, collection_lib.Query]]:
  for where, row in _read_rows(builder, "query"):
    yield (
      where,
      beir.make_query(where, {"_id": row["query_id"], "text": row["query"]}),
    )


def _read_documents(builder) -> Iterator[tuple[str, collection_lib.Document]]:
  for where, row in _read_rows(builder, "passage"):
    metadata = json.loads(row["passage_metadata"] or "{}")
    yield (
      where,
      beir.make_document(
        where,
        {
          "_id": row["passage_id"],
          "title": metadata.get("title", ""),
          "text": row["passage"],
        },
      ),
    )


def _read_rows(builder, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
  with extras.required("seqio"):
    import tensorflow_datasets as tfds

  for number, row in enumerate(tfds.as_numpy(builder.as_dataset(split))):
    fields = {
      name: value.decode() if isinstance(value, bytes) else value
      for name, value in row.items()
    }
    yield f"{builder.name}/{split}:{number}", fields
