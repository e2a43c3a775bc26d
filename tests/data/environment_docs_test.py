import collections
import hashlib
import json
import pathlib
import sys

import numpy as np
import pytest

from synthq_jax.data import docstrings, environment_docs, splits

RECORDED = pathlib.Path(__file__).with_name("demo_set.json")
"""Versions of packages, and what they give; the table of demo.md is of these."""

CONTROL = "Joins many arrays along an axis."


def prose(seed, count=30):
  """Words that no other seed repeats in the same order."""
  rng = np.random.default_rng(seed)
  letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
  return ["".join(rng.choice(letters, 6)) for _ in range(count)]


def text(seed, count=30):
  return " ".join(prose(seed, count))


def build(*packages):
  return environment_docs.build(packages or ("fake_docs",))


def query_texts(collection):
  return [query.text for query in collection.queries]


def test_first_paragraphs_like_signatures_are_dropped(install):
  firsts = [
    "stack(arrays, axis) joins many arrays",
    "Maps every name -> its own number",
    "Calls the method std::sort of things",
    "Sets the axis=all of many things",
    "Formats the {name} of one thing",
    r"Writes the letter \\n after every line",  # one, in a docstring
    "(internal) joins many arrays of one kind",
    "1 + 2 + 3 + 4 + 5 and so on",
    CONTROL,
  ]
  install("fake_docs", [(first, text(i)) for i, first in enumerate(firsts)])
  assert query_texts(build()) == [CONTROL]
  assert [document.text for document in build().documents] == [text(8)]


@pytest.mark.parametrize(
  ("first", "rest"),
  [
    ("Two words.", text(0)),
    (text(2, 31), text(0)),
    ("Splits one array into many.", text(0, 11)),
  ],
)
def test_too_short_and_too_long_texts_are_dropped(
  install, first, rest, monkeypatch
):
  install("fake_docs", [(first, rest), (CONTROL, text(1))])
  assert query_texts(build()) == [CONTROL]
  monkeypatch.setattr(environment_docs, "_QUERY_WORDS", (2, 31))
  monkeypatch.setattr(environment_docs, "_MIN_DOCUMENT_WORDS", 11)
  assert query_texts(build()) == [first, CONTROL]


def test_the_bounds_on_lengths_are_inclusive(install):
  firsts = ["Three words here.", text(2, 30)]
  install("fake_docs", [(f, text(i, 12)) for i, f in enumerate(firsts)])
  assert query_texts(build()) == firsts


def test_queries_that_stand_verbatim_in_their_document_are_dropped(install):
  said = "It joins MANY arrays, along an axis; and " + text(0)
  interrupted = "It joins many long arrays along an axis and " + text(1)
  inside_words = "rejoins many arrays along an axis and " + text(2)
  first = "joins many arrays along an axis"
  for number, rest in enumerate((said, interrupted, inside_words)):
    install(f"fake_{number}", [(first, rest)])
  assert build("fake_0").documents == ()
  assert query_texts(build("fake_1")) == [first]
  assert query_texts(build("fake_2")) == [first]


def test_documents_mostly_said_by_an_earlier_one_are_dropped(
  install, monkeypatch
):
  # 30 words are 26 shingles of 5; the first 20 words hold 16 of them, the
  # first 14 hold 10.
  original = prose(0)
  copies = [
    ("Tells the original story first.", original),
    ("Tells most of it again.", original[:20] + prose(1, 10)),
    ("Tells a third of it again.", original[:14] + prose(2, 16)),
  ]
  install("fake_docs", [(first, " ".join(rest)) for first, rest in copies])
  firsts = [first for first, _ in copies]
  assert query_texts(build()) == [firsts[0], firsts[2]]
  assert len(build().documents) == 2
  for overlap, kept in ((0.65, firsts), (0.35, firsts[:1])):
    monkeypatch.setattr(environment_docs, "_MAX_OVERLAP", overlap)
    assert query_texts(build()) == kept


def test_what_is_held_out_does_not_depend_on_dropped_duplicates(install):
  firsts = ["Tells the original story first.", "Tells the story once more."]
  install("fake_docs", [(first, text(0)) for first in firsts])
  assert len(build().queries) == 1
  assert environment_docs.private_queries(("fake_docs",)) == firsts


def test_equal_queries_become_one_query_with_several_documents(install):
  firsts = ["Joins many arrays.", "joins MANY arrays", "Joins few arrays."]
  install("fake_docs", [(first, text(i)) for i, first in enumerate(firsts)])
  collection = build()
  assert query_texts(collection) == [firsts[0], firsts[2]]
  sides = [
    sorted(qrels[collection.queries[0].id])
    for qrels in collection.qrels.values()
    if collection.queries[0].id in qrels
  ]
  assert sides == [sorted(d.id for d in collection.documents[:2])]


def test_the_package_is_the_client_and_absent_ones_are_left_out(install):
  install("fake_one", [(CONTROL, text(0))])
  install("fake_two", [("Splits one array into many.", text(1))])
  collection = build("fake_one", "not_there_at_all", "fake_two")
  assert [d.client for d in collection.documents] == ["fake_one", "fake_two"]
  assert [q.client for q in collection.queries] == ["fake_one", "fake_two"]
  assert collection == build("fake_one", "fake_two")


def test_the_digest_names_versions_and_absence(install):
  install("fake_docs", [(CONTROL, text(0))], version="2.7")
  found = environment_docs.digest(("fake_docs", "not_there_at_all"))
  assert found == "fake_docs==2.7, not_there_at_all absent"


@pytest.fixture(name="entries", scope="module")
def _entries():
  return list(docstrings.read(docstrings.STANDARD_LIBRARY))


def test_the_standard_library_is_read_and_named_by_its_version(entries):
  firsts = {entry.name: entry.first for entry in entries}
  assert firsts["python.textwrap.dedent"] == (
    "Remove any common leading whitespace from every line in text."
  )
  assert {entry.package for entry in entries} == {"python"}
  tops = [name.split(".")[1] for name in firsts]
  assert tops.index("argparse") < tops.index("textwrap")
  version = sys.version.split()[0]
  assert environment_docs.digest(("python",)) == f"python=={version}"


@pytest.fixture(name="installed", scope="module")
def _installed():
  return environment_docs.build()


@pytest.mark.slow
def test_the_recorded_versions_give_the_recorded_set(installed):
  # The test extra holds mpmath back, so its set is not quite the demo's.
  records = json.loads(RECORDED.read_text())
  versions = environment_docs.digest().split(", ")
  recorded = [one for one in records.values() if one["versions"] == versions]
  if not recorded:
    differ = sorted({*versions} ^ {*records["test"]["versions"]})
    pytest.skip(f"recorded for other versions: {', '.join(differ)}")
  assert len(installed.documents) == recorded[0]["documents"]
  assert len(installed.queries) == recorded[0]["queries"]
  text = json.dumps(
    {
      split: sorted((query, sorted(found)) for query, found in qrels.items())
      for split, qrels in installed.qrels.items()
    },
    sort_keys=True,
  )
  assert hashlib.sha256(text.encode()).hexdigest() == recorded[0]["splits"]


def test_the_readme_names_the_recorded_set_of_its_own_command():
  recorded = json.loads(RECORDED.read_text())["run"]
  root = pathlib.Path(__file__).parents[2]
  for name in ("README.md", "docs/tutorials/demo.md"):
    said = (root / name).read_text()
    assert f"{recorded['documents']:,} documents" in said
    assert f"{recorded['queries']:,} queries" in said


@pytest.mark.slow
def test_the_installed_packages_give_a_clean_demo_set(installed):
  queries = installed.query_by_id()
  documents = {one.id: one for one in installed.documents}
  pairs = {split: installed.pairs(split) for split in installed.qrels}
  count = sum(map(len, pairs.values()))
  assert count >= 5_000 and count == len(documents)
  most = environment_docs.most_documents()
  assert count < most < 30 * count
  for split, share in {"train": 0.8, "dev": 0.1, "test": 0.1}.items():
    assert abs(len(pairs[split]) / count - share) < 0.025
  sides = collections.defaultdict(set)
  for split, found in pairs.items():
    for query_id, document_id in found:
      query, document = queries[query_id].text, documents[document_id].text
      said = f" {' '.join(docstrings.words(document))} "
      assert f" {' '.join(docstrings.words(query))} " not in said
      sides[splits.token_set(query)].add(split)
      sides[document_id].add(split)
  assert max(map(len, sides.values())) == 1
