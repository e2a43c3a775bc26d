"""The study of planted leakage: on a tiny collection, from end to end."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.cli import main
from synthq_jax.data import beir, collection, shipped
from synthq_jax.leakage import rerankers, splits
from synthq_jax.leakage import words as words_lib
from synthq_jax.leakage.rerankers import training as training_lib
from synthq_jax.retrieval import trec
from synthq_jax.storage import artifacts
from synthq_jax.studies import frame, planted_leakage
from synthq_jax.studies.planted_leakage import data as study_data
from synthq_jax.studies.planted_leakage import tables
from synthq_jax.studies.planted_leakage import training as study_training

_BUCKETS = 997


def bucket(text: str) -> int:
  return sum(ord(c) * 31**i for i, c in enumerate(text)) % _BUCKETS


@dataclasses.dataclass(frozen=True, eq=False)
class Memorizer:
  """Knows nothing of language: one number for each document it has seen."""

  name = "memorizer"
  padded = ()

  def init(self, key):
    return {"table": 0.01 * jax.random.normal(key, (_BUCKETS,))}

  def featurize(self, queries, documents):
    del queries
    return {"document": np.array([bucket(text) for text in documents])}

  def score(self, params, batch, *, key=None):
    del key
    return params["table"][batch["document"]]

  def loss(self, params, batch, rngs=None):
    del rngs
    found = self.score(params, batch)
    return jnp.mean(jax.nn.softplus(found[1::2] - found[0::2]))


def words_of(document: int) -> list[str]:
  """Four made-up words that end in q, which no other text here does."""
  letters = np.array(list("bcdfghjklmnprtvwxz"))
  drawn = np.random.default_rng(document).choice(letters, (4, 7))
  return ["".join(word) + "q" for word in drawn]


def tiny(num_train: int = 40, num_test: int = 10) -> collection.Collection:
  """Every document has words of its own and one that all have in common.

  Those of the test queries come last, so that BM25's candidates are a query's
  own document and the first of the others.
  """
  documents, queries = [], []
  qrels: dict[str, dict[str, dict[str, int]]] = {"train": {}, "test": {}}
  for i in range(num_train + num_test):
    a, b, c, d = words_of(i)
    documents.append(collection.Document(f"d{i}", f"common {a} {b} {c} {d}"))
    split = "train" if i < num_train else "test"
    texts = [f"the common {a} and {b}"]
    if split == "test":  # a sibling: another order and other function words
      texts += [f"is {b} common in {a}", f"about {d}"]
    for j, text in enumerate(texts):
      queries.append(collection.Query(f"q{i}.{j}", text))
      qrels[split][f"q{i}.{j}"] = {f"d{i}": 1}
  qrels = {split: found for split, found in qrels.items() if found}
  return collection.Collection(tuple(documents), tuple(queries), qrels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  place = tmp_path_factory.mktemp("data") / "tiny"
  beir.write_beir(place, tiny())
  return place


BUILD, DIGEST = study_training.build, study_training.compute_digest


def stand_in(patch) -> None:
  """No checkpoint is read: the rerankers are stand-ins."""
  made: dict[str, Memorizer] = {}

  def build(model, documents):
    del documents
    return made.setdefault(model.name, Memorizer())

  patch.setattr(study_training, "build", build)
  patch.setattr(study_training, "compute_digest", lambda model: "")


@pytest.fixture(autouse=True)
def light(monkeypatch):
  stand_in(monkeypatch)


@pytest.fixture(scope="module")
def studied(folder, tmp_path_factory):
  root = tmp_path_factory.mktemp("study")
  with pytest.MonkeyPatch.context() as patch:
    stand_in(patch)
    text = run(config(folder), root)
  return root, text


def run(config, root):
  return frame.run(planted_leakage.STUDY, config, root)


def config(folder, **changes) -> planted_leakage.Config:
  recipe = rerankers.Recipe(steps=40, batch_size=16, learning_rate=0.3)
  made = planted_leakage.Config(
    models=(
      planted_leakage.Model(kind="KNRM", name="first", seeds=2, recipe=recipe),
      planted_leakage.Model(
        kind="KNRM",
        name="second",
        recipe=dataclasses.replace(recipe, learning_rate=1e-6),
      ),
    ),
    source=f"beir:{folder}",
    num_test_queries=8,
    sizes=(80, 120),
    num_leaked=64,
    depth=20,
    folds=4,
    public_data=True,
  )
  return dataclasses.replace(made, **changes)


def without_times(path) -> dict:
  """A result without what differs from run to run."""
  found = json.loads(path.read_text())["result"]
  trainings = found.get("trainings", [found])
  for each in trainings:
    for name in ("train_seconds", "rerank_seconds"):
      each.pop(name)
  return found


def test_memory_is_found_where_documents_leak_and_nowhere_else(studied):
  root, text = studied
  study = artifacts.load(root, tables.Study)
  assert len(study.trainings) == 2 * 3 * 3
  for one in study.memory:
    if one.model == "first":  # it learns each document by heart
      assert one.rank_with < one.rank_without - 2
      assert one.offset.difference.mean > 3
      assert one.offset.is_significant and one.offset.corrected < 0.05
      assert one.score_with > one.score_without
    else:  # its learning rate is next to none
      assert abs(one.rank_with - one.rank_without) < 0.5
      assert not one.rank.is_significant and not one.offset.is_significant
  [ndcg, mfr, precision] = [t for t in study.measures if not t.size]
  assert (ndcg.measure, mfr.measure, precision.measure) == (
    "nDCG@10", "MFR", "P@1",
  )  # fmt: skip
  assert ndcg.baseline == 1.0 and mfr.baseline == 1.0
  assert mfr.chance == pytest.approx(10.5, abs=1)  # of 20 candidates
  cells = {(c.model, c.leakage): c for c in ndcg.cells}
  assert cells["first", "test leakage"].comparison.is_significant
  assert not cells["second", "test leakage"].comparison.is_significant
  assert cells["first", "no leakage"].comparison is None
  page = (root / "study.md").read_text()
  for written in (text, page):
    for table in (ndcg, mfr):
      for cell in table.cells:
        assert f"{cell.mean:.{1 if table is mfr else 3}f}" in written
  assert "first, test leakage" in page and "Random order" in page
  assert f"{cells['first', 'test leakage'].mean:.3f} \\*" in page
  flowing = " ".join(page.split())  # those that do not rank without leakage
  assert flowing.count("what they gain is memory alone") >= 3
  assert (root / "study.svg").read_text().startswith("<svg")
  assert not list(root.rglob("state_*"))


def test_texts_and_machine_paths_stand_in_no_file(studied, folder):
  root, _ = studied
  for path in root.rglob("*"):
    if path.is_file():
      content = path.read_text()
      assert not [i for i in range(50) if words_of(i)[0] in content], path
      assert str(folder.parent) not in content, path


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_and_comes_out_the_same(
  folder, tmp_path, monkeypatch
):
  settings = config(folder, sizes=(80,))
  whole = run(settings, tmp_path / "whole")
  trained = []
  train, rerank = rerankers.train, rerankers.rerank

  def counted(*arguments, **options):
    trained.append(options["directory"].parent.name)
    return train(*arguments, **options)

  def killed(*arguments, **options):
    if len(trained) == 4:
      raise KeyboardInterrupt
    return rerank(*arguments, **options)

  monkeypatch.setattr(rerankers, "train", counted)
  monkeypatch.setattr(rerankers, "rerank", killed)
  with pytest.raises(KeyboardInterrupt):
    run(settings, tmp_path / "cut")
  assert not (tmp_path / "cut/result.json").exists()
  monkeypatch.setattr(rerankers, "rerank", rerank)
  steps = []
  of_step = training_lib.loop.train

  def watched(step_fn, *arguments, **options):
    def step(*inputs):
      steps.append(1)
      return step_fn(*inputs)

    return of_step(step, *arguments, **options)

  monkeypatch.setattr(training_lib.loop, "train", watched)
  again = run(settings, tmp_path / "cut")
  assert len(trained) == 4 + 6  # nine trainings; the fourth was not scored
  assert len(steps) == 5 * 40  # and its last state was found
  assert (
    again.replace("cut", "whole").splitlines()[:-1] == (whole.splitlines()[:-1])
  )
  for path in (tmp_path / "whole").rglob("result.json"):
    other = tmp_path / "cut" / path.relative_to(tmp_path / "whole")
    assert without_times(other) == without_times(path)
  for path in (tmp_path / "whole").rglob(study_training.RUN):
    other = tmp_path / "cut" / path.relative_to(tmp_path / "whole")
    assert other.read_bytes() == path.read_bytes()
  run(settings, tmp_path / "cut")
  assert len(trained) == 10


def test_another_model_or_size_keeps_what_is_finished(
  folder, tmp_path, monkeypatch
):
  settings = config(folder, public_data=False, sizes=(80,))
  text = run(settings, tmp_path)
  # Queries may be private: nothing lies outside.
  assert {p.name for p in tmp_path.iterdir()} == {".lock", "private"}
  assert "private/study.md" in text
  trained = []
  train = rerankers.train

  def counted(*arguments, **options):
    trained.append(options["directory"].parent.name)
    return train(*arguments, **options)

  monkeypatch.setattr(rerankers, "train", counted)
  fewer = dataclasses.replace(settings, models=settings.models[:1], folds=3)
  run(fewer, tmp_path)
  assert not trained
  changed = dataclasses.replace(
    settings.models[1], recipe=rerankers.Recipe(steps=2)
  )
  other = dataclasses.replace(settings, models=(settings.models[0], changed))
  run(other, tmp_path)
  assert trained == [
    f"{kind}_leakage_80_seed0" for kind in ("no", "near", "test")
  ]


def test_test_queries_have_siblings_and_documents_of_their_own(folder):
  data = study_data.build(config(folder))
  assert len(data.queries) == 8
  assert data.facts.num_near == 8 == data.facts.num_near_targets
  documents = [set(grades) for grades in data.qrels.values()]
  assert len(set.union(*documents)) == 8
  near = data.leaked["near leakage"][0]
  for each in near:
    assert each.query_id != each.target
    assert each.query_id.split(".")[0] == each.target.split(".")[0]
    asked = data.queries[each.target]
    assert words_lib.relation(each.query, asked) == "identical"
    assert each.relevant_id in data.qrels[each.target]
    assert each.non_relevant_id in data.candidates[each.target]
  test = data.leaked["test leakage"][0]
  assert [e.relevant_id for e in near] == [e.relevant_id for e in test]
  assert {e.query_id for e in test} == set(data.queries)
  relevant = set.union(*documents)
  for instances in data.fillers:
    for each in instances:
      assert not {each.relevant_id, each.non_relevant_id} & relevant
      assert each.query_id.split(".")[0] not in {
        query.split(".")[0] for query in data.queries
      }


def test_a_near_duplicate_is_no_filler(tmp_path):
  data = tiny()
  one, other, *_ = words_of(45)
  copy = collection.Query("copy", f"COMMON {other}, {one}?")
  grades = {"copy": {"d20": 1}}
  beir.write_beir(
    tmp_path / "data",
    dataclasses.replace(
      data,
      queries=(*data.queries, copy),
      qrels=data.qrels | {"train": data.qrels["train"] | grades},
    ),
  )
  settings = config(tmp_path / "data", num_test_queries=10)
  found = study_data.build(settings)
  assert found.facts.num_pool == 41 and found.facts.num_left_out == 1
  assert "copy" not in {e.query_id for e in found.fillers[0]}


def test_near_duplicates_can_be_made_by_rule(folder):
  data = study_data.build(config(folder, near="reformulations"))
  assert len(data.queries) == 8
  texts = {each.query for each in data.leaked["near leakage"][0]}
  assert texts.isdisjoint(data.queries.values())
  assert len({e.query_id for e in data.leaked["near leakage"][0]}) > 8


def trained_elsewhere(folder, train):
  """Settings that train on another collection, with its leaks of each query."""
  pairs = train.with_name("pairs.tsv")
  leaks = [
    f"q{i}.{j}\t{near}"
    for i in range(40, 50)
    for j in range(3)
    for near in (f"q{i}.0", f"y{i}")
  ]
  pairs.write_text("\n".join(leaks))
  return config(
    folder,
    near="verified",
    verified=str(pairs),
    train_source=f"beir:{train}",
    sizes=(80,),
  )


def test_another_collection_can_be_trained_on(folder, tmp_path):
  shared = tiny(num_test=0, num_train=50)
  beir.write_beir(tmp_path / "train", shared)
  settings = trained_elsewhere(folder, tmp_path / "train")
  data = study_data.build(settings)
  assert data.facts.train_source == "train"
  for each in data.leaked["near leakage"][0]:
    assert each.relevant_id.startswith("train:d")
  for each in data.leaked["test leakage"][0]:
    assert each.relevant_id in data.qrels[each.target]
  leaked = {e.query for e in data.leaked["near leakage"][0]}
  assert leaked.isdisjoint(e.query for e in data.fillers[0])
  text = run(settings, tmp_path / "run")
  study = artifacts.load(tmp_path / "run", tables.Study)
  # Documents of the other collection are no candidates, and are inserted.
  near = [one for one in study.memory if one.leakage == "near leakage"]
  assert {one.leakage for one in study.memory} == set(splits.NAMES[1:])
  assert near[0].rank_with < near[0].rank_without
  assert "trained on train" in text


def test_a_copy_of_a_relevant_document_is_neither_filler_nor_a_negative(
  tmp_path,
):
  """Collections hold a text under several ids; the copies were filler."""
  data, size = tiny(), 10
  copies = [
    collection.Document(f"copy{i}", data.documents[40 + i].text)
    for i in range(size)
  ]
  asked = [collection.Query(f"x{i}", f"common zebra{i}") for i in range(size)]
  grades = {query.id: {f"copy{query.id[1:]}": 1} for query in asked}
  beir.write_beir(
    tmp_path / "data",
    dataclasses.replace(
      data,
      documents=(*data.documents, *copies),
      queries=(*data.queries, *asked),
      qrels=data.qrels | {"train": data.qrels["train"] | grades},
    ),
  )
  built = study_data.build(config(tmp_path / "data", num_test_queries=size))
  relevant = {
    built.documents[e.relevant_id] for e in built.leaked["test leakage"][0]
  }
  assert len(relevant) == size
  for triples in (built.fillers[0], *(x[0] for x in built.leaked.values())):
    assert not {built.documents[e.non_relevant_id] for e in triples} & relevant
  assert (
    not {built.documents[e.relevant_id] for e in built.fillers[0]} & relevant
  )


def test_leaks_that_people_verified_are_taken_by_their_ids(folder, tmp_path):
  beir.write_beir(tmp_path / "train", tiny(num_test=0, num_train=50))
  pairs = [f"q{i}.0\tq{i}.0" for i in range(40, 46)] + ["q40.0\tq46.0"]
  (tmp_path / "pairs.tsv").write_text("\n".join(pairs))
  settings = config(
    folder,
    near="verified",
    verified=str(tmp_path / "pairs.tsv"),
    train_source=f"beir:{tmp_path / 'train'}",
    num_test_queries=None,
    num_leaked=12,
    sizes=(40,),
  )
  data = study_data.build(settings)
  assert len(data.queries) == 30  # all are leaked as they are
  assert sorted(data.leaking) == [f"q{i}.0" for i in range(40, 46)]
  found = {(e.target, e.query_id) for e in data.leaked["near leakage"][0]}
  pairs = {(f"q{i}.0", f"q{i}.0") for i in range(40, 46)}
  assert len(found) == 6 and found < pairs | {("q40.0", "q46.0")}
  # Scoring those alone repeats no training: the digest of the data is the same.
  alone = study_data.build(dataclasses.replace(settings, leaked_only=True))
  assert alone.digest == data.digest
  assert (data.facts.num_scored, alone.facts.num_scored) == (30, 6)
  scored, _ = tables._select_leaking(data, [])
  for values in (scored.queries, scored.qrels, scored.candidates):
    assert values.keys() == data.leaking


def test_filler_is_half_of_each_source_of_queries(folder, tmp_path):
  train = tiny(num_test=0, num_train=50)
  beir.write_beir(tmp_path / "train", train)
  more = collection.Collection(
    documents=train.documents,
    queries=tuple(
      collection.Query(f"m{i}", f"common {' '.join(words_of(i)[2:])}")
      for i in range(30)
    ),
    qrels={"train": {f"m{i}": {f"d{i}": 1} for i in range(30)}},
  )
  beir.write_beir(tmp_path / "more", more)
  settings = dataclasses.replace(
    trained_elsewhere(folder, tmp_path / "train"),
    more_queries=f"beir:{tmp_path / 'more'}",
  )
  (filler, *_) = study_data.build(settings).fillers
  of_more = [each.query_id.startswith("m") for each in filler]
  assert sum(of_more) == len(of_more) // 2 > 10
  assert all(each.relevant_id.startswith("train:") for each in filler)
  elsewhere = dataclasses.replace(
    more,
    documents=(collection.Document("far", "away"),),
    qrels={"train": {"m0": {"far": 1}}},
  )
  beir.write_beir(tmp_path / "elsewhere", elsewhere)
  with pytest.raises(ValueError, match="more_queries must name a source"):
    study_data.build(
      dataclasses.replace(
        settings, more_queries=f"beir:{tmp_path / 'elsewhere'}"
      )
    )


def test_judged_negatives_come_before_those_of_bm25(tmp_path):
  data = tiny()
  grades = {"q45.0": {"d45": 1, "d7": 0}}
  beir.write_beir(
    tmp_path / "data",
    dataclasses.replace(
      data, qrels=data.qrels | {"test": data.qrels["test"] | grades}
    ),
  )
  settings = config(
    tmp_path / "data",
    num_test_queries=None,
    near="reformulations",
    num_leaked=120,
    sizes=(120,),
    negatives="judged",
  )
  leaked = study_data.build(settings).leaked["test leakage"][0]
  found = {e.non_relevant_id for e in leaked if e.target == "q45.0"}
  assert found == {"d7"}


def test_the_three_kinds_differ_in_the_leaked_part_alone(folder):
  data = study_data.build(config(folder))
  none, near, test = (data.triples(name, 80, 0) for name in splits.NAMES)
  assert none[:8] == near[:8] == test[:8]
  assert len(none) == len(near) == len(test) == 40
  assert not any(each.target for each in (*none, *near[:8], *test[:8]))
  assert all(each.target for each in (*near[8:], *test[8:]))
  for one, other in zip(near[8:], test[8:], strict=True):
    assert one.query != other.query and other.target == other.query_id
    same = dataclasses.replace(
      one, query_id=other.query_id, query=other.query
    )  # the same documents
    assert same == other


def test_runs_are_the_candidates_in_a_new_order(studied, folder):
  root, _ = studied
  data = study_data.build(config(folder))
  place = study_training.get_folder(root, "first", "test leakage", 80, 1)
  run = trec.read_run(place / study_training.RUN)
  assert {q: set(s) for q, s in run.items()} == {
    q: set(s) for q, s in data.candidates.items()
  }
  result = artifacts.load(place, study_training.Training)
  triples = data.triples("test leakage", 80, 1)
  assert result.manifest == splits.make_manifest(
    "test leakage", triples, data.documents, seed=1
  )


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"num_test_queries": 11}, "expected 11 test queries .* got 10 of 30"),
    ({"num_leaked": 398, "sizes": (400,)}, "got 152 from 8 leaked queries"),
    ({"sizes": (8000,)}, "for 4,000 triples without leakage"),
    ({"test_split": "held_out"}, "expected a split of"),
    ({"source": "ir_datasets:no-such-thing"}, "ir_datasets"),  # or no package
  ],
)
def test_what_cannot_be_built_is_one_line(folder, tmp_path, changes, words):
  with pytest.raises((ValueError, ImportError), match=words) as caught:
    run(config(folder, **changes), tmp_path)
  assert "\n" not in str(caught.value)
  assert "common" not in str(caught.value)


@pytest.mark.parametrize(
  "change, words",
  [
    ({"near": "guesses"}, "near='guesses'"),
    ({"near": "verified", "verified": "x"}, "train_source=None"),
    ({"near": "verified", "train_source": "beir:x"}, "must be a file of pairs"),
    ({"more_queries": "beir:x"}, "must go with a train_source"),
    ({"verified": "x"}, "near='siblings' and verified='x'"),
    ({"num_leaked": 63}, "must be even"),
    ({"sizes": (8,)}, r"at least num_leaked, got sizes=\(8,\)"),
  ],
)
def test_settings_without_sense_are_refused(change, words):
  with pytest.raises(ValueError, match=words):
    config("x", **change)


def test_models_without_sense_are_refused():
  for change, words in (
    ({"kind": "BM25"}, "kind='BM25'"),
    ({"kind": "KNRM", "name": "a/b"}, "'a/b'"),
    ({"kind": "monoT5", "checkpoint": "t5"}, "vocabulary=None"),
    ({"kind": "monoBERT", "checkpoint": "b", "vocabulary": "v"}, "only then"),
  ):
    with pytest.raises(ValueError, match=words):
      planted_leakage.Model(**change)
  assert planted_leakage.Model(kind="PACRR").name == "PACRR"


@pytest.mark.slow
def test_the_command_runs_the_tiny_study_with_real_rerankers(
  folder, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(study_training, "build", BUILD)
  argv = [
    "study",
    "--gin_file=gin_configs/studies/planted_leakage_tiny.gin",
    f"--gin.SOURCE=beir:{folder}",
    f"--workdir={tmp_path}",
    "--quiet",
  ]
  main.main(argv)
  study = artifacts.load(tmp_path / "private", tables.Study)
  assert {one.model for one in study.trainings} == {"KNRM", "PACRR"}
  assert all(np.isfinite(one.loss) for one in study.trainings)
  assert [one.steps for one in study.trainings] == [2] * 18
  said = capsys.readouterr().out
  assert "nDCG@10" in said and "study finished" in said


@pytest.mark.parametrize("kind", study_training.KINDS)
def test_every_kind_builds_a_reranker_of_the_packages_vocabulary(kind):
  model = planted_leakage.Model(kind=kind, query_length=6, document_length=20)
  reranker = BUILD(model, {"a": "red apples", "b": "green pears"})
  assert reranker.name == kind
  rows = reranker.featurize(["red apples"], ["apples are red"])
  # Compiled where all starts at random; what is given would be a constant.
  init = jax.jit(reranker.init) if kind == "monoBERT" else reranker.init
  params = init(jax.random.key(0))
  scores = jax.jit(reranker.score)(params, rows)
  assert scores.shape == (1,) and np.isfinite(scores).all()
  note = study_training.describe(model)
  assert note.startswith(f"{kind} ")
  assert ("not pre-trained" in note) == (kind == "monoBERT")


def test_a_training_follows_the_checkpoint_it_starts_from(
  tmp_path, monkeypatch
):
  shipped_ones = [planted_leakage.Model(kind=x) for x in study_training.KINDS]
  [first] = {DIGEST(model) for model in shipped_ones}  # the package's T5
  monkeypatch.setattr(shipped, "VOCABULARY", shipped.DIRECTORY / "config.json")
  assert DIGEST(shipped_ones[0]) != first
  (tmp_path / "config.json").write_text("{}")
  model = planted_leakage.Model(kind="monoBERT", checkpoint=str(tmp_path))
  first = DIGEST(model)
  (tmp_path / "vocab.txt").write_text("[CLS]")
  assert DIGEST(model) != first
  assert "public BERT" in study_training.describe(model)
