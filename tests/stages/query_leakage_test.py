"""The search for private queries: planted copies are found, others are not."""

import dataclasses
import json
import math

import made_up
import numpy as np
import pytest
import small_data
import tiny_runs
from scipy import stats

from synthq_jax.data import jsonl
from synthq_jax.privacy import statement
from synthq_jax.report import blocks, leakage, page
from synthq_jax.runtime import (
  results,
  workspace,
)
from synthq_jax.stages import query_leakage

_WORDS = [
  first + second
  for first in "ba ke li mo nu pa ri so tu ve wa zi".split()
  for second in "rak lem din pos gul tav ner fix".split()
]


def _query(rng) -> str:
  return " ".join(rng.choice(_WORDS, 6, replace=False))


def _claim(epsilon: float):
  if math.isinf(epsilon):
    return statement.non_private("No noise.")
  return made_up.claim(f"finetune_dp/{epsilon}")


class _Workdir:
  """A working directory with private queries of three splits."""

  def __init__(self, root, splits, test_split="test"):
    self.space = workspace.Workspace(root, secret_seed=1)
    folder = self.space.private("prepare_data")
    folder.mkdir(parents=True)
    self.texts = {
      f"{split}{i}": text
      for split, texts in splits.items()
      for i, text in enumerate(texts)
    }
    _write(folder / "queries.jsonl", self.texts)
    for split, texts in splits.items():
      ids = np.array([f"{split}{i}" for i in range(len(texts))])
      np.savez(folder / f"{split}.npz", ids=ids)
    self.prepared = made_up.prepared(
      num_queries={split: len(texts) for split, texts in splits.items()},
      test_split=test_split,
    )

  def synthetic(self, name, texts, epsilon=8.0, per_document=2):
    private = "private/" if math.isinf(epsilon) else ""
    directory = f"{private}generate/{name}"
    folder = self.space.root / directory
    folder.mkdir(parents=True)
    documents = [f"d{i // per_document}" for i in range(len(texts))]
    _write(folder / "queries.jsonl", dict(enumerate(texts)), documents)
    claim = statement.none() if name == "public_only" else _claim(epsilon)
    return results.SyntheticQueries(
      directory=directory,
      row=made_up.row(name),
      statement=claim,
      prefix="",
      sampler="",
      num_documents=len(set(documents)),
      queries_per_document=per_document,
      num_queries=len(texts),
      removed={},
      gauge=0.0,
      copy_rate=0.0,
      mean_words=0.0,
      examples=(),
      seconds=0.0,
    )

  def run(self, *synthetic, **settings):
    return tiny_runs.make(
      query_leakage.STAGE,
      query_leakage.Config(**settings),
      self.space,
      inputs=query_leakage.Inputs(prepared=self.prepared, synthetic=synthetic),
    )


def _write(path, texts, documents=None):
  lines = [
    {"_id": str(name), "text": text, "document": document}
    for (name, text), document in zip(
      texts.items(), documents or [""] * len(texts), strict=True
    )
  ]
  small_data.write_lines(path, map(json.dumps, lines))


def _log(rng, train=400, dev=60, test=90):
  return {
    "train": [_query(rng) for _ in range(train)],
    "dev": [_query(rng) for _ in range(dev)],
    "test": [_query(rng) for _ in range(test)],
  }


def _changed(rng, text: str) -> str:
  """The same words in another order: a near-duplicate, but no copy."""
  return " ".join(rng.permutation(text.split())).capitalize() + "?"


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
  """A generator that copies 15% of its train queries, and others that do not."""
  rng = np.random.default_rng(0)
  log = _log(rng)
  log["train"][300:340] = log["train"][:20] * 2  # asked three times each
  copies = [_changed(rng, text) for text in log["train"][20:80]]
  fresh = [_query(rng) for _ in range(300)]
  leak = [_changed(rng, text) for text in log["test"][:30]]
  workdir = _Workdir(tmp_path_factory.mktemp("planted"), log)
  found = workdir.run(
    workdir.synthetic("public_only", fresh),
    workdir.synthetic("eps8", [*fresh[:240], *copies]),
    workdir.synthetic("eps3", [*fresh[:270], *leak]),
    workdir.synthetic("inf", [*fresh, *log["train"]], epsilon=math.inf),
  )
  return workdir, found


def _one(found, name, detector="token_set"):
  [one] = [
    one
    for one in found.memberships
    if (one.name, one.detector) == (name, detector)
  ]
  return one


def test_copied_train_queries_are_found_with_their_share(planted):
  _, found = planted
  one = _one(found, "eps8")
  # 20 queries that were asked three times are not counted: 400 - 60.
  assert (one.train.number, one.train.total) == (60, 340)
  assert (one.control.number, one.control.total) == (0, 150)
  assert one.difference.low < 60 / 340 < one.difference.high
  assert one.difference.low > 0.1
  fisher = stats.fisher_exact([[60, 280], [0, 150]]).pvalue
  assert one.p_value == pytest.approx(fisher, rel=1e-9) and fisher < 1e-6


def test_a_generator_that_copies_nothing_is_not_accused(planted):
  _, found = planted
  one = _one(found, "public_only")
  assert (one.train.number, one.control.number) == (0, 0)
  assert one.p_value == 1.0
  assert one.difference.low < 0 < one.difference.high


def test_detectors_see_what_they_say(planted):
  _, found = planted
  assert _one(found, "eps8", "exact").train.number == 0  # words were moved
  assert _one(found, "inf", "exact").train.number == 340
  assert set(found.detectors) == {"exact", "token_set", "containment"}
  assert "at least 0.8" in found.detectors["token_set"]


def test_a_written_query_that_holds_a_real_one_reproduces_it(tmp_path):
  rng = np.random.default_rng(9)
  log = _log(rng)
  workdir = _Workdir(tmp_path, log)
  longer = [f"please tell me about {text} for my work" for text in log["train"]]
  shorter = [" ".join(text.split()[:3]) for text in log["train"]]
  found = workdir.run(
    workdir.synthetic("eps8", longer), workdir.synthetic("eps3", shorter)
  )
  assert _one(found, "eps8", "containment").train.number == 400
  assert _one(found, "eps8", "token_set").train.number == 0
  assert _one(found, "eps3", "containment").train.number == 0


def test_distinct_ngrams_say_which_query_holds_the_other(tmp_path):
  """Repeated words "held" the first query; marks kept the second one out."""
  real = ["computes the sine of the angle in degrees", "measles outbreaks???"]
  workdir = _Workdir(tmp_path, {"train": real, "test": ["a wooden bridge"]})
  repeats = ["of the sine of the sine of the sine of the sine of"]
  found = workdir.run(
    workdir.synthetic("eps8", repeats),
    workdir.synthetic("eps3", ["measles outbreaks"]),
  )
  assert _one(found, "eps8", "containment").train.number == 0
  assert _one(found, "eps3", "containment").train.number == 1


def test_repeated_queries_are_not_counted_but_told(planted):
  _, found = planted
  one = _one(found, "inf")
  assert (one.train.number, one.train.total) == (340, 340)
  assert (one.train_all.number, one.train_all.total) == (400, 400)


def test_copied_test_queries_show_as_a_difference_below_zero(planted):
  _, found = planted
  one = _one(found, "eps3")
  assert (one.control.number, one.control.total) == (30, 150)
  assert one.difference.high < 0


def test_the_private_section_shows_one_table_and_no_query(planted):
  workdir, found = planted
  words = _text(_build_section(found))
  assert "60 of 340 (15.00%)" in words
  assert "train queries come out more often than by coincidence" in words
  assert "queries that were not trained on come out more often" in words
  assert "eps8, exact" not in words  # where nothing was found
  assert words.count("| Generator |") == 1
  assert not [text for text in workdir.texts.values() if text in words]


def _build_section(found):
  return leakage.PRIVATE.build(made_up.private_values(leakage=found))


def _text(content) -> str:
  shown = blocks.Page(title="", introduction=tuple(content))
  return page.markdown(shown)


def test_queries_for_the_documents_of_train_queries_are_not_tested(tmp_path):
  """They meet train queries without any memory: Fisher's test would accuse."""
  rng = np.random.default_rng(3)
  workdir = _Workdir(tmp_path, _log(rng))
  of_train = [_changed(rng, text) for text in workdir.texts.values()][:60]
  written = workdir.synthetic("eps8", of_train)
  accused = _one(workdir.run(written), "eps8")
  assert accused.p_value < 1e-3 and accused.difference.low > 0
  workdir.prepared = dataclasses.replace(workdir.prepared, num_asked=400)
  found = workdir.run(written)
  one = _one(found, "eps8")
  assert one.p_value is one.difference is None
  assert (one.train, one.control) == (accused.train, accused.control)
  words = _text(_build_section(found))
  assert "for the documents of train queries alone" in words
  assert "come out more often than by coincidence" not in words
  assert "for the documents of train queries alone" in leakage.text(found)


def test_a_generator_that_learned_the_common_queries_is_rarely_accused(
  tmp_path,
):
  """Popular queries stand in every split; a generator writes those, too."""
  rng = np.random.default_rng(5)
  alarms, naive, repeats = 0, 0, 60
  for number in range(repeats):
    kinds = [_query(rng) for _ in range(600)]
    popular = 1 / np.arange(1, 601)
    popular /= popular.sum()
    splits = {
      split: [kinds[i] for i in rng.choice(600, count, p=popular)]
      for split, count in (("train", 240), ("dev", 30), ("test", 30))
    }
    written = [kinds[i] for i in rng.choice(600, 80, p=popular)]
    workdir = _Workdir(tmp_path / str(number), splits)
    found = workdir.run(
      workdir.synthetic("eps8", written), detectors=("exact",)
    )
    one = _one(found, "eps8", "exact")
    alarms += one.p_value <= 0.05
    assert one.train.total < one.train_all.total
    # The trap: of the control alone, take out what is like a train query.
    train = {*splits["train"]}
    control = [q for q in splits["dev"] + splits["test"] if q not in train]
    came = {*written}
    naive += np.mean([q in came for q in splits["train"]]) > np.mean(
      [q in came for q in control]
    )
  assert alarms / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)
  assert naive / repeats > 0.9


def test_more_queries_than_wanted_are_drawn_alike(tmp_path):
  rng = np.random.default_rng(6)
  workdir = _Workdir(tmp_path, _log(rng))
  every = query_leakage.read_real(workdir.space, workdir.prepared)
  assert every.sample(550, seed=0) is every
  names = {text: name for name, text in workdir.texts.items()}
  shares = []
  for seed in range(100):
    real = every.sample(70, seed)
    of = [names[text] for text in real.texts]
    assert len(of) == 70
    assert real.trained.tolist() == [name.startswith("train") for name in of]
    shares.append(real.trained.mean())
  # One rate for both sides: 400 of 550.
  error = math.sqrt(400 * 150 / 550**2 / 70 / 100)
  assert abs(np.mean(shares) - 400 / 550) < 4 * error


def _of_users(workdir, users):
  """Says who asked each query; all of a user's are of one split."""
  for split, of_split in users.items():
    path = workdir.space.private("prepare_data") / f"{split}.npz"
    arrays = dict(np.load(path))
    np.savez(path, users=np.array(of_split), **arrays)


def test_a_sample_of_units_accuses_nobody(tmp_path):
  rng = np.random.default_rng(8)
  alarms, repeats = 0, 40
  for number in range(repeats):
    splits, users = {"train": [], "test": []}, {"train": [], "test": []}
    common = {}
    for user in range(400):
      split = "train" if rng.random() < 0.8 else "test"
      text = _query(rng)
      common[text] = user % 2  # some users ask everything twice
      splits[split] += [text, _query(rng)] if user % 2 else [text, f"{text}?"]
      users[split] += [user, user]
    written = [
      text for text, is_ in common.items() if is_ or rng.random() < 0.02
    ]
    workdir = _Workdir(tmp_path / str(number), splits)
    _of_users(workdir, users)
    made = workdir.synthetic("eps8", [q for q in written if rng.random() < 0.4])
    found = workdir.run(made, detectors=("token_set",), max_real=300)
    assert 290 < found.num_train + found.num_control < 310
    alarms += _one(found, "eps8").p_value <= 0.05
  assert alarms / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.slow
def test_a_log_whose_queries_have_several_documents_accuses_nobody(tmp_path):
  alarms, repeats = 0, 30
  for number in range(repeats):
    rng = np.random.default_rng([number, 10])
    rows, saw_none = [], []
    for i in range(1500):
      text, is_common = _query(rng), i % 2
      clicked = rng.integers(0, 600, 3 if is_common else 1)
      rows += [{"query": text, "document": f"text {d}"} for d in clicked]
      if rng.random() < (0.2 if is_common else 0.02):
        saw_none.append(text)
    path = tmp_path / f"log{number}.jsonl"
    small_data.write_lines(path, map(json.dumps, rows))
    data = jsonl.read_jsonl(path, seed=number)
    asked = data.query_by_id()
    splits = {
      split: [asked[name].text for name in judged]
      for split, judged in data.qrels.items()
    }
    workdir = _Workdir(tmp_path / str(number), splits)
    for split, judged in data.qrels.items():
      place = workdir.space.private("prepare_data") / f"{split}.npz"
      gathered = np.array([name in data.gathered for name in judged], bool)
      np.savez(place, gathered=gathered, **dict(np.load(place)))
    found = workdir.run(
      workdir.synthetic("eps8", saw_none), detectors=("exact",)
    )
    one = _one(found, "eps8", "exact")
    assert one.train.total < one.train_all.total
    alarms += one.p_value <= 0.05
  assert alarms / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


def test_written_queries_of_a_document_are_taken_together(tmp_path):
  workdir = _Workdir(tmp_path, _log(np.random.default_rng(6), 5, 2, 3))
  texts = [f"query {i} of {i // 5}" for i in range(50)]
  made = workdir.synthetic("eps8", texts, per_document=5)
  some = query_leakage.read_written(workdir.space, made, limit=12, seed=0)
  assert len(some) == 15
  documents = [text.rpartition(" ")[2] for text in some]
  assert len(set(documents)) == 3
  every = query_leakage.read_written(workdir.space, made, limit=50, seed=0)
  assert every == texts


def test_a_query_of_train_and_dev_was_trained_on(tmp_path):
  rng = np.random.default_rng(7)
  workdir = _Workdir(tmp_path, _log(rng, 5, 2, 3))
  np.savez(
    workdir.space.private("prepare_data") / "dev.npz",
    ids=np.array(["train1", "dev0"]),
  )
  real = query_leakage.read_real(workdir.space, workdir.prepared)
  assert len(real.texts) == 5 + 1 + 3
  assert real.trained.sum() == 5


def test_a_log_of_doubles_leaves_nothing_to_compare(tmp_path):
  workdir = _Workdir(tmp_path, {"train": ["red fox"] * 3, "test": ["red fox"]})
  found = workdir.run(workdir.synthetic("eps8", ["red fox", "blue sky"]))
  one = _one(found, "eps8")
  assert one.difference is None and one.p_value is None
  assert one.train_all.number == 3
  assert "| - | -" in _text(_build_section(found))
