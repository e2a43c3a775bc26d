"""Turns raw data into documents (public), queries (private), splits and arrays.

The unit of privacy is the query. A query with several relevant documents is
still one record: one of the documents, drawn with the seed, is kept for
training. Or the unit is the user, with a maximum number of queries that are
kept, all in one split (`splits.by_user`). Vocabulary and public test set are
made from documents alone. The list of documents that were asked about is
private unless `Config.written_for` says otherwise.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

import synthq_jax
from synthq_jax import field_kinds
from synthq_jax.data import (
  beir,
  collection,
  jsonl,
  passages,
  quoting,
  sentences,
  sources,
  splits,
)
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import (
  config_types,
  fingerprints,
  model_files,
  prepared_files,
  results,
  runner,
  stage,
  workspace,
)
from synthq_jax.stages import _prepared
from synthq_jax.storage import array_files, artifacts, stores

__all__ = [
  "STAGE",
  "Config",
  "check_source",
  "check_vocabulary",
  "get_unit",
  "run",
]

TRAIN, TEST = "train", "test"
UNITS = ("query", "user")
_MOST_SENTENCES = 20_000
"""Documents that are read for the public test set: memory is bounded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the data and its splits."""

  source: str = "environment_docs"
  """Source of the data, in the form of one of `data.sources.KINDS`, e.g.
  "environment_docs", "beir:DIR", "jsonl:FILE" or "log:FILE@CORPUS"."""
  query_field: str = "query"
  """Column of a log, or key of a JSONL line, that holds the query."""
  document_field: str = "document"
  """Column or key that holds the document, or its id if there is a corpus."""
  vocabulary: str = ""
  """SentencePiece model; empty: the checkpoint's; "train": trained on
  documents."""
  vocab_size: int = 4064
  """Pieces of a trained vocabulary, without extra ids."""
  extra_ids: int = 32
  """Sentinels of the vocabulary."""
  document_length: int = 64
  """Tokens of a document, or of a passage, EOS included."""
  retriever_length: int = field_kinds.later(0)
  """Tokens of a document that retrievers read, EOS included, if more than
  `document_length`, which generators read; 0 for passages. Data that is
  prepared again is trained on again, and each private training counts anew."""
  passage_stride: int = 0
  """Tokens of the text from the beginning of one passage to that of the next.
  Longer documents are cut into such passages, which all begin with the title.
  0: nothing beyond `document_length` is read."""
  query_length: int = 24
  """Tokens of a query, EOS included."""
  test_split: str = "test"
  """Split that is scored, "dev" for MS MARCO; several are joined by "+"."""
  public_test_documents: int = 1000
  """Maximum documents of the public test set."""
  written_for: str = "all"
  """Documents that queries are written for: "all", drawn without looking at a
  query, or "train", those that the train queries ask about, as in the papers.
  "train" publishes the list of these, and every statement says so. It is not
  for the demo, whose splits depend on the words of all queries."""
  seed: int = 0
  """Seed of the splits, and of the choice among several relevant documents."""
  unit: str = field_kinds.later("query")
  """Unit of privacy: "query", or "user" with all queries of one user id."""
  queries_per_user: int = field_kinds.later(1)
  """K: maximum queries of a user that are kept, if the unit is the user."""
  user_field: str = field_kinds.later(unit_lib.WHO)
  """Column of a log, or key of a JSONL line, that holds the user id."""
  quotes: str = field_kinds.later("auto")
  """Quotation marks of tab-separated tables: "csv", which quote cells as
  csv.writer does, "text", or "auto", which inspects the table
  (`data.quoting`)."""
  strict: bool = field_kinds.speed_only(False)
  """Whether judgements of unknown queries or documents, and judgements of one
  split alone, stop the run. Otherwise the first are left out and counted, and
  queries are divided by their words."""
  shared_in: str = field_kinds.speed_only("")
  """Private folder of prepared data that the runs of a sweep share. The first
  run to prepare it leaves a copy there, which holds real queries. Empty:
  none."""

  @property
  def read_length(self) -> int:
    """Tokens of a document that are kept: those that retrievers read."""
    return max(self.document_length, self.retriever_length)

  def __post_init__(self):
    if "://" in self.shared_in:
      raise ValueError(
        "prepare_data.Config.shared_in must be a folder, got"
        f" {self.shared_in}: mount the bucket, or leave it out"
      )
    config_types.at_least(self, 2, "document_length", "query_length")
    config_types.at_least(
      self, 0, "extra_ids", "public_test_documents", "seed", "passage_stride",
      "retriever_length",
    )  # fmt: skip
    config_types.at_least(self, 1, "vocab_size", "queries_per_user")
    if self.retriever_length and self.passage_stride:
      raise ValueError(
        "prepare_data.Config.retriever_length must be 0 for passages, which"
        f" generators and retrievers read alike, got {self.retriever_length} and"
        f" passage_stride={self.passage_stride}: set RETRIEVER_LENGTH=0"
      )
    config_types.one_of(self, "unit", UNITS)
    config_types.one_of(self, "quotes", quoting.MODES)
    if self.unit == "query" and self.queries_per_user > 1:
      raise ValueError(
        "prepare_data.Config.queries_per_user is for unit='user', got"
        f" {self.queries_per_user} for unit='query': set UNIT='user'"
      )
    if TRAIN in self.test_split.split("+"):
      raise ValueError(
        f"prepare_data.Config.test_split must leave out {TRAIN!r}, on"
        f" which every model is trained, got {self.test_split!r}: set TEST_SPLIT"
        " to a held-out split"
      )
    kind = self.source.partition(":")[0]
    if self.user_field != unit_lib.WHO and kind not in sources.OF_LINES:
      raise ValueError(
        f"{self.source}: expected jsonl or log with prepare_data.Config.user_field"
        f" = {self.user_field!r}, got {kind}: queries.jsonl says who asked under"
        ' "client" or "metadata": {"user_id": ...}'
      )
    config_types.one_of(self, "written_for", ("all", TRAIN))
    if (self.source, self.written_for) == ("environment_docs", TRAIN):
      raise ValueError(
        "prepare_data.Config.written_for must be 'all' for the demo set, got"
        " 'train': its splits depend on the words of all queries, and the list of"
        " documents would tell of them; set WRITTEN_FOR='all'"
      )


def make_job(run: runner.Run, _: None) -> stage.Job[None]:
  """Returns the one collection of the run, with a named vocabulary."""
  settings = run.config.prepare_data
  if not settings.vocabulary:
    stored = model_files.vocabulary_beside(run.start)
    settings = dataclasses.replace(settings, vocabulary=str(stored))
  vocabulary = stores.local(settings.vocabulary)
  settings = dataclasses.replace(settings, vocabulary=vocabulary)
  named, vocabulary, source = _contents(settings)
  named = dataclasses.replace(
    named, vocabulary=run.config.prepare_data.vocabulary
  )
  depends = (named, vocabulary, run.secret_digest, source)
  return stage.Job(depends=depends, settings=settings, inputs=None)


def run(task: stage.Task[Config, None]) -> results.PreparedData:
  """Reads, splits and tokenizes the data.

  Args:
    task: task with the working directory's secret, which keys the digest.

  Returns:
    The folders of the data, and its counts.

  Raises:
    ValueError: if the data cannot be read or a split has no pairs.
  """
  if not task.settings.shared_in:
    return _prepare(task)
  # The key needs no secret: readers of the copies can read their queries anyway.
  contents = (synthq_jax.__version__, *_contents(task.settings))
  key = artifacts.fingerprint("shared", *contents)
  copy = pathlib.Path(task.settings.shared_in) / key
  if shared := _prepared.take(task, copy):
    return shared
  result = _prepare(task)
  _prepared.publish(task, result, copy)
  return result


def _contents(settings: Config) -> tuple[Config, str, str]:
  """Returns settings and digests of the input files, whatever their folder.

  Files are identified by their content: data that was moved is the same data.
  """
  kind = settings.source.partition(":")[0]
  return (
    dataclasses.replace(settings, source=kind, vocabulary=""),
    fingerprints.of_file(settings.vocabulary),
    _source(settings).digest(),
  )


def _prepare(task: stage.Task[Config, None]) -> results.PreparedData:
  """Prepares the data of `run` from its source."""
  config, space = task.settings, task.space
  source = _source(config)
  check_vocabulary(config.vocabulary, config.extra_ids)
  data = source.read()
  if config.unit == "user":
    data = splits.by_user(
      data, most=config.queries_per_user, secret=str(space.seed("users"))
    )
  elif not config.strict:
    published = config.written_for == TRAIN
    secret = str(space.seed("splits")) if published else ""
    data = splits.where_none(data, seed=config.seed, secret=secret)
  _check_names(data, config)
  data = collection.join_splits(data, config.test_split)
  _check_splits(data, config)
  # Missing documents train nothing, and lower the scores of the test split.
  data = data.without_lacking(data.qrels.keys() - {config.test_split})
  public = workspace.make_empty(space.public("prepare_data"))
  private = workspace.make_empty(space.private("prepare_data"))
  model = _vocabulary(config, data, public)
  vocabulary = vocabulary_lib.load(model, extra_ids=config.extra_ids)
  state = hashlib.sha256(str(space.seed("digest")).encode())
  written = prepared_files.write_documents(
    data.documents,
    public,
    vocabulary,
    length=config.read_length,
    stride=config.passage_stride,
    choose=_sample(config, len(data.documents)),
    digest=state.update,
  )
  counts = _write_queries(
    config, data, vocabulary, private, prepared_files.read_documents(public)
  )
  asked = _write_asked(config, data, public)
  public_test = _write_public_test(config, written.chosen, vocabulary, public)
  beir.write_judged_queries(private, data)
  return results.PreparedData(
    directory=space.relative(public),
    private_directory=space.relative(private),
    source=config.source,
    digest=_digest(state, data),
    versions=source.packages(),
    unit=get_unit(config),
    num_documents=len(data.documents),
    num_queries=counts,
    num_pairs={
      split: sum(d not in data.lacking for g in judged.values() for d in g)
      for split, judged in data.qrels.items()
    },
    cut_documents=written.cut,
    test_split=config.test_split,
    division=data.division,
    num_users=_num_users(config, data),
    num_public_test=public_test,
    vocabulary=space.relative(model),
    vocab_size=vocabulary.vocab_size,
    extra_ids=config.extra_ids,
    token_ids=vocabulary.token_ids,
    document_length=config.document_length,
    retriever_length=config.retriever_length,
    query_length=config.query_length,
    passage_stride=config.passage_stride,
    num_passages=written.num_passages,
    num_asked=asked,
  )


def _source(config: Config) -> sources.Source:
  """Opens the source that the settings name, without reading it."""
  return sources.open(
    config.source,
    **_named(config),
    seed=config.seed,
    fields=_fields(config),
    strict=config.strict,
    divide=config.unit != "user",
  )


def _fields(config: Config) -> jsonl.Fields:
  """Returns the names of the columns of a log."""
  return jsonl.Fields(
    query=config.query_field,
    document=config.document_field,
    client=config.user_field,
    quotes=config.quotes,
    needs_user=config.unit == "user",
  )


def check_source(config: Config) -> None:
  """Refuses a source with missing files or columns; reads headers alone."""
  sources.check(config.source, **_named(config), fields=_fields(config))


def _named(config: Config) -> dict[str, Any]:
  """Returns the name of the source in messages, and the kinds that are
  allowed."""
  of_users = config.unit == "user"
  return {
    "setting": "prepare_data.source" + (" of UNIT='user'" if of_users else ""),
    "kinds": sources.OF_USERS if of_users else None,
  }


def get_unit(config: Config) -> unit_lib.Unit:
  """Returns the unit of privacy of a run."""
  if config.unit == "query":
    return unit_lib.QUERY
  return unit_lib.user(config.queries_per_user, config.user_field)


def _num_users(config: Config, data: collection.Collection) -> dict[str, int]:
  """Counts the users of each split, if these are the unit."""
  if config.unit == "query":
    return {}
  user_of = {query.id: query.client for query in data.queries}
  return {
    split: len({user_of[query] for query in judged})
    for split, judged in data.qrels.items()
  }


def _check_names(data: collection.Collection, config: Config) -> None:
  """Refuses splits that do not exist, and names the setting."""
  if TRAIN not in data.qrels:
    names = ", ".join(sorted(data.qrels)[:5]) or "no split"
    raise ValueError(
      f"{config.source}: expected relevant pairs in split {TRAIN!r}, which"
      f" everything is trained on, got {names}: add its judgements (in a folder of"
      " tables a file's name is its split, and files below train/ are one)"
    )
  for split in config.test_split.split("+"):
    try:
      data.judgements(split)
    except ValueError as error:
      raise ValueError(
        f"{config.source}, TEST_SPLIT={config.test_split}: {error}"
      ) from error


def _check_splits(data: collection.Collection, config: Config) -> None:
  """Refuses splits without pairs, and queries that are in both splits."""
  queries = {}
  for split in (TRAIN, config.test_split):
    queries[split] = {query for query, _ in data.pairs(split)}
    if not queries[split]:
      other = "" if split == TRAIN else ", or name another TEST_SPLIT"
      raise ValueError(
        f"{config.source}: expected relevant pairs in split {split!r}, got"
        f" none: add their judgements{other}"
      )
  both = queries[TRAIN] & queries[config.test_split]
  if both:
    raise ValueError(
      f"{config.source}: some queries are judged in {TRAIN} and in"
      f" {config.test_split}: take them out of one, or name another TEST_SPLIT"
    )


def _vocabulary(
  config: Config, data: collection.Collection, public: pathlib.Path
) -> pathlib.Path:
  model = public / "vocabulary.model"
  if config.vocabulary == "train":
    vocabulary_lib.train(
      (d.contents for d in data.documents),
      model,
      vocab_size=config.vocab_size,
    )
    return model
  path = pathlib.Path(config.vocabulary)
  artifacts.write_atomically(model, path.read_bytes())
  return model


def check_vocabulary(
  named: str | pathlib.Path, extra_ids: int
) -> vocabulary_lib.SentencePiece | None:
  """Refuses a file that is no vocabulary, before the data is read.

  Args:
    named: `Config.vocabulary`, or the path of the checkpoint's.
    extra_ids: number of extra ids in the settings.

  Returns:
    The vocabulary; None if it will be trained.

  Raises:
    ValueError: if it is no SentencePiece model, or one that cannot be used.
  """
  if named == "train":
    return None
  path = pathlib.Path(named)
  fingerprints.check_file(path)
  return vocabulary_lib.load(path, extra_ids=extra_ids)


def _write_queries(
  config, data, vocabulary, private, documents: passages.Passages
) -> dict[str, int]:
  """Writes SPLIT.npz: ids and tokens of queries, a document of each, a passage.

  The file also holds "users", a number for each query's user, if users are the
  unit; and "gathered" (`collection.Collection`), if the rule of the splits
  gathered queries. A test query whose relevant documents are all missing has no
  document to be paired with. It is in a file of its own, since scores count it,
  as 0.
  """
  asked = data.query_by_id()
  by_text = sources.kind_of(config.source).named_by_text
  position = {name: i for i, name in enumerate(data.document_ids())}
  counts = {}
  for split, judged in data.qrels.items():
    ids, chosen, unpaired = [], [], []
    for query, grades in judged.items():
      relevant = [
        d for d, grade in grades.items() if grade > 0 and d not in data.lacking
      ]
      if relevant:
        ids.append(query)
        document = splits.choose_document(
          relevant, query, seed=config.seed, by_text=by_text
        )
        chosen.append(position[document])
      elif split == config.test_split and max(grades.values()) > 0:
        unpaired.append(query)
    tokens, others = (
      vocabulary_lib.tokenize(
        vocabulary, [asked[q].text for q in some], length=config.query_length
      )
      for some in (ids, unpaired)
    )
    owners = np.array(chosen, np.int32)
    fields = {
      "ids": array_files.as_texts(ids),
      "tokens": tokens,
      "documents": owners,
      "passages": passages.best(documents, owners, tokens),
    }
    if data.gathered:
      fields["gathered"] = np.array([q in data.gathered for q in ids], bool)
    rest = {"ids": array_files.as_texts(unpaired), "tokens": others}
    if config.unit == "user":
      _, numbers = np.unique(
        [asked[q].client for q in (*ids, *unpaired)], return_inverse=True
      )
      numbers = numbers.astype(np.int32)
      fields["users"], rest["users"] = np.split(numbers, [len(ids)])
    path = private / f"{split}.npz"
    array_files.save_npz(path, fields)
    if unpaired:
      array_files.save_npz(prepared_files.get_unanswered_path(path), rest)
    counts[split] = len(ids) + len(unpaired)
  return counts


def _write_asked(
  config: Config, data: collection.Collection, public: pathlib.Path
) -> int:
  """Publishes the documents that train queries ask about, if they are public.

  The list holds all relevant documents of every train query, not the one that
  is kept for training. The choice of that one depends on a query's id, and so,
  in a log, on its text.

  Formal guarantee:
    None for the list. The texts of the queries keep their claim beside it. Unit:
    the text of one train query. Relation: it is emptied, while ids and clicks of
    the source, the users, all other queries and the number of records stay;
    another text in its place is two such changes. The list has one distribution
    for all texts:
    - a log that is divided by documents (`splits.split_by_own_document`) lists
      those documents of the first side that were clicked, and reads no text;
      splits that a source declares are taken as fixed;
    - `splits.where_none` and `splits.by_user` draw sides, and the latter the
      queries that are kept, by hashes of ids of queries or users, keyed with the
      run's secret: for ids that differ they are independent draws, also if the
      id of a query is a digest of its text.
    Given equal draws c the lists are equal, and all other releases from train
    queries keep their (epsilon, delta); so does the mixture over draws, as
    sum_c P(c) P(A | c, t) <= e^epsilon sum_c P(c) P(A | c, t') + delta.
  """
  if config.written_for != TRAIN:
    return 0
  named = {
    document
    for grades in data.qrels[TRAIN].values()
    for document, grade in grades.items()
    if grade > 0
  }
  asked = np.flatnonzero([name in named for name in data.document_ids()])
  array_files.save(public / results.ASKED_NAME, asked.astype(np.int32))
  return len(asked)


def _sample(config: Config, num_documents: int) -> np.ndarray:
  """Draws the documents that the public test set may use."""
  rng = np.random.default_rng([config.seed, 1])
  return rng.permutation(num_documents)[:_MOST_SENTENCES]


def _write_public_test(config, documents, vocabulary, public) -> int:
  """Writes a BEIR folder of pseudo-queries: sentences taken out of documents.

  They measure retrievers without private queries.
  """
  pseudo_queries: list[tuple[str, str, str]] = []
  texts = [sentences.split(document.text) for document in documents]
  idf = sentences.compute_idf(texts)
  for document, parts in zip(documents, texts, strict=True):
    best = sentences.choose(parts, idf)
    if best is not None and len(pseudo_queries) < config.public_test_documents:
      rest = " ".join(parts[:best] + parts[best + 1 :])
      pseudo_queries.append((document.id, parts[best], rest))
  if not pseudo_queries:
    return 0
  beir.write_beir(
    public / "public_test",
    collection.Collection(
      documents=tuple(
        collection.Document(id=name, text=rest)
        for name, _, rest in pseudo_queries
      ),
      queries=tuple(
        collection.Query(id=f"p{name}", text=query)
        for name, query, _ in pseudo_queries
      ),
      qrels={TEST: {f"p{name}": {name: 1} for name, _, _ in pseudo_queries}},
    ),
  )
  array_files.save_npz(
    public / "public_test.npz",
    {
      "tokens": vocabulary_lib.tokenize(
        vocabulary,
        [rest for *_, rest in pseudo_queries],
        length=config.read_length,
      ),
      "query_tokens": vocabulary_lib.tokenize(
        vocabulary,
        [query for _, query, _ in pseudo_queries],
        length=config.query_length,
      ),
    },
  )
  return len(pseudo_queries)


def _digest(state, data: collection.Collection) -> str:
  """Adds queries and judgements to the keyed digest of the documents."""
  for query in data.queries:
    state.update(f"{query.id}\0{query.text}\0".encode())
  state.update(json.dumps(data.qrels, sort_keys=True).encode())
  return state.hexdigest()[:16]


STAGE = stage.Stage(
  name="prepare_data",
  result=results.PreparedData,
  config=Config,
  plan=stage.plan_one_result,
  job=make_job,
  run=run,
  needs=(),
  needs_secret=True,
  get_directory=lambda result: result.private_directory,
)
