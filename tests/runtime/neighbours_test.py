"""One private query is another one, or is missing: what may then differ?

A tiny run of each of two neighbouring logs, every stage of it, in which each
private training ends where it began. So what the mechanism releases is equal for
both logs, and whatever still differs outside of `private/` leaks: a byte, a
name, a size, an order, a count.
"""

import collections
import dataclasses
import fnmatch
import functools
import json
import pathlib
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import random_t5
import small_data
import tiny_runs

from synthq_jax.data import jsonl, splits
from synthq_jax.privacy import gaussian
from synthq_jax.runtime import (
  prepared_files,
  private_training,
  results,
  workspace,
)
from synthq_jax.stages import (
  compare_queries,
  direct_dp,
  evaluate,
  filter_queries,
  finetune_dp,
  generate,
  learn_adapter,
  learn_map,
  learn_to_rank,
  plan,
  prepare_data,
  release_scores,
  static_encoder,
  train_retriever,
)
from synthq_jax.storage import artifacts
from synthq_jax.training import dp_step
from tests.runtime import kills

_COUNT = 64
_SPLITS = ("train", "dev", "test")

Log = Sequence[tuple[str, int]]
"""What was asked, and the number of the document that answers it."""


def _jsonl(place: pathlib.Path, log: Log, sides: Sequence[str]) -> str:
  del sides  # the reader's own
  lines = [{"query": q, "document": small_data.document(d)} for q, d in log]
  small_data.write_lines(place / "log.jsonl", map(json.dumps, lines))
  return f"jsonl:{place / 'log.jsonl'}"


def _beir(place: pathlib.Path, log: Log, sides: Sequence[str]) -> str:
  judged = {
    split: [(_name(q), f"d{d}", 1) for q, d in log if sides[d] == split]
    for split in _SPLITS
  }
  documents = {f"d{i}": small_data.document(i) for i in range(_COUNT)}
  return small_data.write_beir(
    place, documents, {_name(q): q for q, _ in log}, judged
  )


def _msmarco(place: pathlib.Path, log: Log, sides: Sequence[str]) -> str:
  passages = (f"{i}\t{small_data.document(i)}" for i in range(_COUNT))
  small_data.write_lines(place / "collection.tsv", passages)
  for split in _SPLITS:
    own = [(q, d) for q, d in log if sides[d] == split]
    asked = (f"{_name(q)}\t{q}" for q, _ in own)
    small_data.write_lines(place / f"queries.{split}.tsv", asked)
    judged = (f"{_name(q)} 0 {d} 1" for q, d in own)
    small_data.write_lines(place / f"qrels.{split}.tsv", judged)
  return f"msmarco:{place}"


def _clicks(place: pathlib.Path, log: Log, sides: Sequence[str]) -> str:
  del sides  # the reader's own, by the ids of documents: those of `_jsonl`
  texts = [small_data.document(i) for i in range(_COUNT)]
  ids = [jsonl._make_id("d", "", text) for text in texts]
  lines = [{"id": i, "text": t} for i, t in zip(ids, texts, strict=True)]
  small_data.write_lines(place / "corpus.jsonl", map(json.dumps, lines))
  rows = (f"{query},{ids[document]},1" for query, document in log)
  small_data.write_lines(place / "log.csv", ["query,document,clicks", *rows])
  return f"log:{place / 'log.csv'}@{place / 'corpus.jsonl'}"


_SOURCES = {
  "jsonl": _jsonl,
  "log": _clicks,
  "beir": _beir,
  "msmarco": _msmarco,
}


def _name(query: str) -> str:
  return f"q-{query.replace(' ', '-')}"


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
  """The split of each document's queries, as the reader of logs draws it."""
  root = tmp_path_factory.mktemp("sides")
  _jsonl(root, [(f"ask {i}", i) for i in range(_COUNT)], ())
  read = jsonl.read_jsonl(root / "log.jsonl")
  split_of = {
    next(iter(grades)): split
    for split, judged in read.qrels.items()
    for grades in judged.values()
  }
  number = {small_data.document(i): i for i in range(_COUNT)}
  found = {number[d.text]: split_of[d.id] for d in read.documents}
  assert set(found.values()) == set(_SPLITS)
  return [found[i] for i in range(_COUNT)]


@dataclasses.dataclass(frozen=True)
class _Logs:
  """A log and its neighbours; all have the same documents."""

  log: Log
  one_less: Log
  another: dict[str, Log]  # by where the other query stands, and what it is


def _logs(sides: Sequence[str]) -> _Logs:
  """Asks for each document twice, in an order of chance."""
  log = [
    (f"{time} {small_data.TOPICS[i % 8]} {i}", i)
    for i in range(_COUNT)
    for time in ("early", "late")
  ]
  random.Random(0).shuffle(log)
  train = [pair for pair in log if sides[pair[1]] == "train"]
  gone, (_, document) = train[3], train[-1]
  rest = [pair for pair in log if pair != gone]
  new = ("is there a quince nearby", document)
  tested = next(query for query, d in log if sides[d] == "test")
  same_words = (" ".join(reversed(tested.split())), document)
  half = len(rest) // 2
  return _Logs(
    log=log,
    one_less=rest,
    another={
      "first": [new, *rest],
      "in the middle": [*rest[:half], new, *rest[half:]],
      "last": [*rest, new],
      "in the words of a test query": [same_words, *rest],
    },
  )


def _config(source: str) -> prepare_data.Config:
  return prepare_data.Config(
    source=source,
    document_length=16,
    query_length=32,
    public_test_documents=20,
    vocab_size=60,
  )


def _prepared(root: pathlib.Path, kind: str, log: Log, sides) -> pathlib.Path:
  """Prepares a log, with a vocabulary made from its documents."""
  config = _config(_SOURCES[kind](root / "data", log, sides))
  config = dataclasses.replace(config, vocabulary="train")
  space = workspace.Workspace(root / "run", secret_seed=7)
  tiny_runs.make(
    prepare_data.STAGE, config, space, digest="fingerprint-of-prepare-data"
  )
  return root / "run"


def _ran(
  root: pathlib.Path,
  source: str,
  stages: Sequence[str] | None = None,
  **changes: Any,
) -> pathlib.Path:
  """Runs every stage on a source, or some of them and what they need."""
  further = [(f"seek report {i}", i) for i in range(0, _COUNT, 4)]
  _beir(root / "further", further, ["test"] * _COUNT)
  config = plan.RunConfig(
    checkpoint=random_t5.save(root / "t5"),
    prepare_data=_config(source),
    finetune_dp=finetune_dp.Config(steps=2, batch_size=16),
    generate=generate.Config(  # BM25 finds one of fifty queries of chance
      num_documents=24, queries_per_document=16, max_length=12, batch_size=384
    ),
    filter_queries=filter_queries.Config(top_k=_COUNT - 1),
    static_encoder=static_encoder.Config(
      dim=4, steps=2, warmup_steps=1, batch_size=16
    ),
    train_retriever=train_retriever.Config(
      steps=1, batch_size=4, warmup_steps=0
    ),
    direct_dp=direct_dp.Config(steps=2, batch_size=8),
    evaluate=evaluate.Config(bootstrap_samples=20),
    compare_queries=compare_queries.Config(bootstrap_samples=20),
    rows=plan.Rows(ltr=("public_only", "adapter"), adapted=(8.0,)),
    learn_to_rank=learn_to_rank.Config(steps=2),
    learn_adapter=learn_adapter.Config(steps=2, pool=8),
    test_sets=(f"beir:{root / 'further'}",),
    secret_seed=7,
    public_data=True,
  )
  config = dataclasses.replace(config, **changes)
  plan.run(config, root / "run", stages=stages)
  return root / "run"


_MECHANISM = ("sampler", "noise_multiplier", "optimizer")
"""Of a private training: what is not a key, a place or a bar."""

Files = dict[str, bytes]


def _shareable(root: pathlib.Path) -> Files:
  """Returns the files of `_files` that may be shared."""
  return {
    path: content
    for path, content in _files(root).items()
    if not results.is_private_path(path)
  }


def _files(root: pathlib.Path) -> Files:
  """Returns the files of a run by path, but for two things.

  Times (`kills.content`), which two runs on one log do not agree on either. And
  fingerprints, which are keyed with the secret of the working directory: each
  becomes the name of its stage, also in names of files.
  """
  names = {}
  for path in root.rglob(artifacts.RESULT_NAME):
    place = path.parent.relative_to(root).as_posix()
    stage = place.removeprefix(f"{results.PRIVATE}/")
    names[artifacts.read_fingerprint(path.parent)] = f"<{stage}>"

  def named(text: bytes) -> bytes:
    for fingerprint, stage in names.items():
      text = text.replace(fingerprint.encode(), stage.encode())
    return text

  return {
    named(path.encode()).decode(): named(content)
    for path, content in kills.files(root).items()
  }


def _differing(ours: Files, theirs: Files) -> list[str]:
  # Names alone: pytest would take minutes to show how large files differ.
  names = sorted(ours.keys() | theirs.keys())
  return [name for name in names if ours.get(name) != theirs.get(name)]


def _train(root: pathlib.Path) -> set[tuple]:
  """Returns the records of the train split, as what they are made of."""
  ids = prepared_files.read_documents(root / "prepare_data").ids
  with np.load(root / results.PRIVATE / "prepare_data/train.npz") as stored:
    rows = zip(stored["tokens"], stored["documents"], strict=True)
    return {(tuple(tokens.tolist()), ids[place]) for tokens, place in rows}


# What is prepared, for every source and every place of the other query.


def _check_prepared(root: pathlib.Path, kind: str, sides) -> None:
  """Compares what is prepared from a log and from each of its neighbours."""
  logs = _logs(sides)
  run = _prepared(root / "log", kind, logs.log, sides)
  expected, records = _shareable(run), _train(run)
  assert {"vocabulary.model", "corpus.jsonl", "public_test.npz"} <= {
    pathlib.PurePath(name).name for name in expected
  }
  assert len(records) > 100
  for name, log in {"one less": logs.one_less, **logs.another}.items():
    run = _prepared(root / name.replace(" ", "_"), kind, log, sides)
    assert not _differing(expected, _shareable(run)), name
    # And no other record came or went: n may be published.
    gone, new = records - _train(run), _train(run) - records
    assert (len(gone), len(new)) == (1, name != "one less"), name


@pytest.mark.parametrize("kind", _SOURCES)
def test_another_private_query_changes_nothing_else_that_is_prepared(
  kind, tmp_path, sides
):
  _check_prepared(tmp_path, kind, sides)


def test_documents_in_the_order_of_the_log_are_caught(
  tmp_path, sides, monkeypatch
):
  def wrong(documents):
    return tuple({one.id: one for one in documents}.values())

  monkeypatch.setattr(jsonl, "_merge_documents", wrong)
  with pytest.raises(AssertionError, match="corpus.jsonl"):
    _check_prepared(tmp_path, "jsonl", sides)


def test_a_split_that_one_query_can_move_is_caught(
  tmp_path, sides, monkeypatch
):
  wrong = splits.split_by_document  # by group: three more leave the train split
  monkeypatch.setattr(splits, "split_by_own_document", wrong)
  with pytest.raises(AssertionError, match="in the words of a test query"):
    _check_prepared(tmp_path, "jsonl", sides)


def test_fingerprints_are_keyed_with_the_secret(tmp_path, sides):
  source = _jsonl(tmp_path / "data", _logs(sides).log, sides)
  config = plan.RunConfig(
    prepare_data=_config(source),
    static_encoder=static_encoder.Config(
      dim=4, steps=1, warmup_steps=0, batch_size=16
    ),
    public_data=True,
  )
  found = []
  for secret in (7, 7, 8):
    root = tmp_path / f"run{len(found)}"
    own = dataclasses.replace(config, secret_seed=secret)
    plan.run(own, root, stages=["static_encoder"])
    found.append(artifacts.read_fingerprint(root / "static_encoder"))
  assert found[0] == found[1] != found[2]


# A whole run.


class _Run(NamedTuple):
  """What a run left, and what its private trainings were given."""

  files: Files
  given: list[tuple[dict[str, np.ndarray], dict[str, Any]]]
  private: Files


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sides):
  """Runs every stage on a log, once, with private trainings that stand still."""

  @functools.cache
  def run(kind: str, name: str) -> _Run:
    logs = _logs(sides)
    log = getattr(logs, name, None) or logs.another[name]
    root = tmp_path_factory.mktemp("run")
    return _standing_still(root, _SOURCES[kind](root / "data", log, sides))

  return run


def _standing_still(root: pathlib.Path, source: str, **changes: Any) -> _Run:
  """Runs every stage, with private trainings that end where they begin."""
  given = []

  def train(training, mechanism, files, settings):
    del settings
    known = {name: getattr(mechanism, name) for name in _MECHANISM}
    known["rows_multiple"] = training.rows_multiple
    records = training.records
    if isinstance(records, dp_step.Drawn):
      records = records.make(np.arange(records.number))
    given.append((records, known))
    small_data.write_lines(files.metrics_path, ())
    return training.params

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(private_training.dp_step, "train", train)
    root = _ran(root, source, **changes)
  files = _files(root)
  private = {k: v for k, v in files.items() if results.is_private_path(k)}
  shared = {k: v for k, v in files.items() if k not in private}
  return _Run(shared, given, private)


def _rows(records) -> set[tuple]:
  """Returns records without what only says where they stand."""
  names = sorted(records.keys() - {"example_id"})
  columns = [np.asarray(records[n]).reshape(len(records[n]), -1) for n in names]
  return set(map(tuple, np.concatenate(columns, axis=1).tolist()))


def test_of_a_whole_run_another_query_changes_what_is_released_alone(runs):
  log = runs("jsonl", "log")
  other = runs("jsonl", "in the words of a test query")
  assert {name.partition("/")[0] for name in log.files} == {
    "prepare_data", "prepare_test_set", "finetune_dp", "generate",
    "filter_queries", "train_retriever", "encode_documents", "evaluate",
    "report", "static_encoder", "learn_to_rank", "learn_adapter",
  }  # fmt: skip
  assert not _differing(log.files, other.files)
  # A training learns of the query by its record, and by nothing else.
  assert len(log.given) == len(other.given) == 5
  for (ours, how), (theirs, same) in zip(log.given, other.given, strict=True):
    assert how == same
    gone, new = _rows(ours) - _rows(theirs), _rows(theirs) - _rows(ours)
    assert (len(gone), len(new)) == (1, 1)


def _patterns() -> list[str]:
  """Returns the files of the table "Where every record goes"."""
  page = pathlib.Path(__file__).parents[2] / "docs/architecture.md"
  _, _, section = page.read_text().partition("### Where every record goes\n")
  section, _, _ = section.partition("\n## ")
  rows = [x.split("|") for x in section.splitlines() if x.startswith("| ")]
  cells = [row[2] for row in rows[1:]]
  return [f"private/{x}" for cell in cells for x in re.findall("`(.+?)`", cell)]


def _unlisted(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
  """Returns the names that no pattern matches, folder by folder."""

  def matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(
      map(fnmatch.fnmatchcase, parts, wanted)
    )

  return [n for n in names if not any(matches(n, p) for p in patterns)]


def test_every_private_file_of_a_whole_run_is_in_the_table(finished_run):
  root, patterns = finished_run.root, _patterns()
  private = root / results.PRIVATE
  names = [
    path.relative_to(root).as_posix()
    for path in private.rglob("*")
    if path.is_file()
  ]
  assert len(names) > 200
  assert not _unlisted(names, patterns)
  unused = [p for p in patterns if len(_unlisted(names, [p])) == len(names)]
  assert not unused


def test_every_private_file_that_a_query_changes_is_in_the_table(runs):
  log = runs("jsonl", "log").private
  other = runs("jsonl", "in the words of a test query").private
  patterns, changed = _patterns(), _differing(log, other)
  assert len(patterns) > 10
  assert "private/prepare_data/train.npz" in changed
  assert not _unlisted(changed, patterns)
  without = [p for p in patterns if p != "private/evaluate/test/*/*"]
  assert "private/evaluate/test/bm25/run.trec" in _unlisted(changed, without)


_FOLLOWS_FROM_N = {
  "batch_size", "delta", "epsilon", "expected_batch_size", "max_batch_size", "noise_multiplier",
  "num_examples", "num_queries", "num_units",
}  # fmt: skip
"""Fields of results that follow from the number of train records, which is
public: it is num_examples in every statement."""
_STATED = re.compile(
  rb"^.*\*\*(Privacy|Mechanism|Several records|Epsilon|What that protects).*$",
  re.MULTILINE,
)
_STATED_HTML = re.compile(
  rb"^.*<strong>(Privacy|Mechanism|Several records|Epsilon|What that protects).*$",
  re.MULTILINE,
)
# An adapter draws every query in each step: its batch has n records.
_TRAINED = re.compile(rb"^\| retriever \| adapter eps8 .*$", re.MULTILINE)
_TRAINED_HTML = re.compile(
  rb"<td[^>]*>retriever</td>\s*<td[^>]*>adapter eps8</td>.*?</tr>", re.DOTALL
)
_NUMBER = re.compile(rb"\d+(\.\d+)?(e-\d+)?")


def _without_n(files: Files) -> Files:
  """Takes out of a run what follows from the number of train records."""

  def cleaned(name: str, content: bytes) -> bytes:
    if name.endswith(artifacts.RESULT_NAME):
      return json.dumps(_kept(json.loads(content))).encode()
    if name.startswith("report/"):
      for stated in (_STATED, _STATED_HTML, _TRAINED, _TRAINED_HTML):
        content = stated.sub(lambda m: _NUMBER.sub(b"N", m[0]), content)
    return content

  return {name: cleaned(name, content) for name, content in files.items()}


def _kept(value):
  if isinstance(value, list):
    return [_kept(one) for one in value]
  if not isinstance(value, dict):
    return value
  return {k: _kept(v) for k, v in value.items() if k not in _FOLLOWS_FROM_N}


def test_of_a_whole_run_a_query_less_changes_what_follows_from_n_too(runs):
  log, less = runs("jsonl", "log"), runs("jsonl", "one_less")
  for (_, one), (_, another) in zip(log.given, less.given, strict=True):
    assert another["sampler"].num_examples == one["sampler"].num_examples - 1
  changed = _differing(log.files, less.files)
  assert "finetune_dp/eps8/result.json" in changed
  ranked = ("learn_to_rank/", "ltr_")  # n of their claim
  public = [n for n in changed if not any(word in n for word in ranked)]
  assert not [n for n in public if "public_only" in n or "untrained" in n]
  assert not _differing(_without_n(log.files), _without_n(less.files))


# Maps of a public encoder's query vectors.

_MAPPED = {
  "learn_map": learn_map.Config(steps=2, warmup_steps=1, candidates=6, pool=8),
  "rows": plan.Rows(
    trained_part="query_map",
    direct_dp=(),
    fused=True,
    ltr=("synthetic",),
    adapted=(8.0,),
  ),
  "stages": [
    name
    for name in plan.STAGES
    if name not in ("audit", "compare_queries", "query_leakage", "report")
  ],
  # What no private query goes into is compared above.
  "test_sets": (),
}
"""Changes of a run in which maps learn from queries of every kind."""


@pytest.mark.slow
def test_of_a_run_of_maps_another_query_changes_what_is_released_alone(
  tmp_path, sides
):
  logs = _logs(sides)
  runs = []
  for name, log in (
    ("log", logs.log),
    ("other", logs.another["in the words of a test query"]),
  ):
    source = _jsonl(tmp_path / name / "data", log, sides)
    runs.append(_standing_still(tmp_path / name, source, **_MAPPED))
  ours, theirs = runs
  maps = {name for name in ours.files if name.endswith("/map.npy")}
  assert {pathlib.PurePath(name).parent.name for name in maps} == {
    "public_only", "synthetic_eps8", "adapter_eps8",
  }  # fmt: skip
  assert not _differing(ours.files, theirs.files)
  changed = _differing(ours.private, theirs.private)
  assert "private/learn_adapter/original/map.npy" in changed
  changed = [re.sub("<.*?>", "name", path) for path in changed]
  assert not _unlisted(changed, _patterns())
  # The generator, the adapter and the weights learn of the query by its record.
  assert len(ours.given) == 3
  for (one, how), (other, same) in zip(ours.given, theirs.given, strict=True):
    assert how == same
    gone, new = _rows(one) - _rows(other), _rows(other) - _rows(one)
    assert (len(gone), len(new)) == (1, 1)


# A user less.

_PER_USER = 2


def _asked(without: str = "") -> list[tuple[str, str, int]]:
  """Who asked what: 30 users with one to four queries each."""
  return [
    (f"person-{who}", f"ask {i} by {who} of {small_data.TOPICS[i]}", d)
    for who in range(30)
    for i, d in enumerate(range(who, _COUNT, _COUNT // (who % 4 + 1)))
    if f"person-{who}" != without
  ]


def _of_users(
  root: pathlib.Path, without: str, monkeypatch, **options: Any
) -> _Run:
  """Runs stages for users; scores are released without their noise."""
  source = small_data.write_user_log(root / "data", _asked(without), _COUNT)
  monkeypatch.setattr(
    gaussian, "normal_numbers", lambda key, size: np.zeros(size)
  )
  return _standing_still(
    root,
    source,
    prepare_data=dataclasses.replace(
      _config(source), unit="user", queries_per_user=_PER_USER
    ),
    # What no private query goes into is compared above.
    test_sets=(),
    rows=plan.Rows(
      untrained=False,
      original=False,
      ltr=("public_only",),
      adapted=(8.0,),
    ),
    finetune_dp=finetune_dp.Config(steps=2, batch_size=8, delta=1e-3),
    direct_dp=direct_dp.Config(steps=2, batch_size=8, delta=1e-3),
    release_scores=release_scores.Config(enabled=True, widest=10.0, delta=1e-3),
    **options,
  )


def test_of_a_whole_run_a_user_less_changes_what_follows_from_n_alone(
  tmp_path, monkeypatch
):
  """Of a train user; one of a test user changes released scores and no other."""
  whole = _of_users(tmp_path / "whole", "", monkeypatch)
  folder = tmp_path / "whole/run/private/prepare_data"
  asked_by = {
    line["_id"]: line["client"]
    for line in map(json.loads, (folder / "queries.jsonl").open())
  }
  gone = {}
  for split in ("train", "test"):
    with np.load(folder / f"{split}.npz") as stored:
      counts = collections.Counter(map(asked_by.get, stored["ids"].tolist()))
    gone[split] = max(counts, key=counts.get)
    assert counts[gone[split]] == _PER_USER
  assert any(name.startswith("release_scores/") for name in whole.files)

  less = _of_users(tmp_path / "less", gone["train"], monkeypatch)
  (ours, how), *others = whole.given
  (theirs, same), *fewer = less.given
  assert same["sampler"].num_examples == how["sampler"].num_examples - 1
  assert len(_rows(ours) - _rows(theirs)) == 1
  assert not _rows(theirs) - _rows(ours)
  assert len(others) == 3  # direct DP's pairs, what weights and a map read
  for (ours, _), (theirs, _) in zip(others, fewer, strict=True):
    assert len(_rows(ours) - _rows(theirs)) == _PER_USER
  changed = _differing(whole.files, less.files)
  assert "finetune_dp/eps8/result.json" in changed
  assert not _differing(_without_n(whole.files), _without_n(less.files))

  # The report shows the scores.
  stages = [name for name in plan.STAGES if name != "report"]
  less = _of_users(
    tmp_path / "tested", gone["test"], monkeypatch, stages=stages
  )
  for (ours, _), (theirs, _) in zip(whole.given, less.given, strict=True):
    assert _rows(ours) == _rows(theirs)
  changed = {n.partition("/")[0] for n in _differing(whole.files, less.files)}
  assert changed - {"report"} == {"release_scores"}
