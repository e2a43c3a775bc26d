"""`synthq leakage check`: sources in, pairs, counts and clean ids out."""

import io
import json
import multiprocessing
import stat

import pytest
import shared_data

from synthq_jax.cli import main
from synthq_jax.data import ir_datasets_sets, query_pairs
from synthq_jax.leakage import near_duplicates as detectors
from synthq_jax.tools import leakage_check, leakage_targets

LABELLED = shared_data.PLACE / "query_leakage"
TOPICS = [
  ("robust04", "301", "International wooden bridges", "Who builds bridges?"),
  ("robust04", "302", "Measles outbreaks", "Is measles under control?"),
  ("core17", "302", "Measles outbreaks", "Is measles under control?"),
]
LOG = ["jax grad", "measles  OUTBREAK", "is measles under control", "measles"]


@pytest.fixture
def paths(tmp_path):
  names = ("collection", "topic", "title", "description")
  lines = [json.dumps(dict(zip(names, row, strict=True))) for row in TOPICS]
  (tmp_path / "topics.jsonl").write_text("\n".join(lines))
  rows = [f"q{number}\t{text}\n" for number, text in enumerate(LOG)]
  (tmp_path / "log.tsv").write_text("".join(rows))
  return tmp_path


def command(paths, *more):
  return [
    *("leakage", "check", f"--train={paths / 'log.tsv'}"),
    *(f"--test={paths / 'topics.jsonl'}", "--quiet"),
    *(f"--output={paths / 'out'}", *more),
  ]


def result(paths) -> dict:
  return json.loads((paths / "out" / "check.json").read_text())


def test_queries_that_an_export_left_encoded_are_told(paths, capsys):
  """They match nothing: 0 queries of such a log would leak without a word."""
  lines = "id,query\n1,measles%20outbreaks\n2,boat to the island\n"
  (paths / "log.csv").write_text(lines)
  more = (f"--train={paths / 'log.csv'}", "--detector=exact")
  assert main.main(command(paths, *more)) == 0
  assert result(paths)["num_leaked"] == 0
  assert "note: " in (told := capsys.readouterr().err)
  assert "1 query texts hold %20, &amp;" in told


def test_all_that_holds_single_queries_is_for_its_owner(paths, capsys):
  assert main.main(command(paths, "--detector=token_set")) == 0
  files = sorted((paths / "out").iterdir())
  assert [path.name for path in files] == [
    ".leakage_check",
    "check.json", "clean_ids.txt", "pairs.jsonl", "report.html",
  ]  # fmt: skip
  assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
  lines = map(json.loads, (paths / "out/pairs.jsonl").read_text().splitlines())
  found = [(x["query_id"], x["collection"], x["target_id"]) for x in lines]
  assert found == [
    ("q1", "robust04", "302 title"),
    ("q1", "core17", "302 title"),
    ("q2", "robust04", "302 description"),
    ("q2", "core17", "302 description"),
  ]
  assert (paths / "out/clean_ids.txt").read_text() == "q0\nq3\n"
  assert "measles  OUTBREAK" in (paths / "out/report.html").read_text()
  said = capsys.readouterr().out
  rows = [line.split() for line in said.splitlines()]
  assert ["token", "set", "0.714", "robust04", "2", "2", "1", "2"] in rows
  assert ["token", "set", "0.714", "core17", "2", "2", "1", "1"] in rows
  assert "PRIVATE" in said and "peak memory" in said
  for text in (said, (paths / "out/check.json").read_text()):
    assert not any(w in text.lower() for w in ("measles", "control", "grad"))


@pytest.mark.parametrize(("allowed", "code"), [(1, 3), (2, 0)])
def test_more_leaks_than_allowed_end_with_3(paths, capsys, allowed, code):
  assert main.main(command(paths, f"--fail_above={allowed}")) == code
  found = result(paths)
  assert found["num_leaked"] == 2 and found["num_queries"] == 4
  assert found["is_passed"] == (code == 0)
  assert ("--fail_above=1" in capsys.readouterr().err) == (code == 3)


def test_variants_of_topics_are_looked_for(paths):
  (paths / "variants.tsv").write_text("301\tgradients in JAX\n301\tjax grads\n")
  given = command(
    paths, "--detector=token_set", f"--variants={paths / 'variants.tsv'}"
  )
  assert main.main(given) == 0
  assert (paths / "out/clean_ids.txt").read_text() == "q3\n"
  (paths / "variants.tsv").write_text("999\tjax grads\n")
  assert main.main(given) == 2


def test_pairs_that_people_judged_leak_in_any_case(paths, capsys):
  (paths / "known.tsv").write_text("301\tq3\n301\tq3\n301\tq9\n7\tq2\n")
  given = command(paths, "--detector=exact", f"--known={paths / 'known.tsv'}")
  assert main.main([*given, "--fail_above=1"]) == 3
  assert (paths / "out/clean_ids.txt").read_text() == "q0\nq1\n"
  lines = (paths / "out/pairs.jsonl").read_text().splitlines()
  (line,) = [x for x in map(json.loads, lines) if x["detector"] == "known"]
  assert (line["query_id"], line["target_id"]) == ("q3", "301 title")
  assert line["relation"] == "different topic" and line["score"] == 1.0
  rows = [x for x in result(paths)["counts"] if x["detector"] == "known"]
  assert [x["pairs"] for x in rows] == [1, 0]
  (paths / "known.tsv").write_text("7\tq2\n")
  assert main.main(given) == 2
  assert "got ids of none" in capsys.readouterr().err


def test_listed_ids_that_the_log_has_not_are_said(paths, capsys):
  """They were passed over: a check of the wrong log ended with 0."""
  known = paths / "known.tsv"
  given = command(
    paths, f"--known={known}", "--fail_above=0", "--detector=exact"
  )
  known.write_text("301\tq1\n301\tq9\n")
  assert main.main(given) == 3
  assert "note: 1 ids of --known are not in the log" in capsys.readouterr().out
  known.write_text("301\tQ1\n301\tQ9\n")
  assert main.main(given) == 2
  assert f"{known}: expected pairs with queries of" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["out", "chk:1"])
def test_a_file_that_is_read_is_not_written(paths, capsys, folder):
  """It was removed before anybody had read it, or if a colon stood in its path."""
  own = paths / folder / "pairs.jsonl"
  own.parent.mkdir()
  own.write_text("of people\n")
  (own.parent / ".leakage_check").write_text("")
  given = command(paths, "--detector=exact", f"--known={own}")
  given = [x.replace(str(paths / "out"), str(paths / folder)) for x in given]
  assert main.main(given) == 2
  assert "give --output another" in capsys.readouterr().err
  assert own.read_text() == "of people\n"


def written(paths) -> list[str]:
  """What is in the folder, but for the mark that it is a check's."""
  return sorted(x.name for x in (paths / "out").glob("[!.]*"))


def test_a_check_that_fails_leaves_no_earlier_one(paths, capsys):
  assert main.main(command(paths, "--detector=exact")) == 0
  assert len(written(paths)) == 4
  # Behind the lines that are looked at before anything is written.
  lines = [b"q%d\tjax arrays\n" % number for number in range(64)]
  (paths / "log.tsv").write_bytes(b"".join(lines) + b"q64\tjax \xff\n")
  assert main.main(command(paths, "--detector=exact")) == 2
  assert not written(paths)


@pytest.mark.parametrize(
  "flags", ["--train=typo.tsv", "--known=typo.tsv", "--test=typo.tsv"]
)
def test_a_typo_costs_no_earlier_check(paths, capsys, flags):
  assert main.main(command(paths, "--detector=exact")) == 0
  assert main.main(command(paths, "--detector=exact", flags)) == 2
  assert len(written(paths)) == 4


@pytest.mark.parametrize("name", ["report.html", "pairs.jsonl"])
def test_files_that_no_check_wrote_stay(paths, capsys, name):
  own = paths / "out" / name
  own.parent.mkdir()
  own.write_text("of people\n")
  assert main.main(command(paths, "--detector=exact")) == 2
  assert "give --output another" in capsys.readouterr().err
  assert own.read_text() == "of people\n" and written(paths) == [name]


@pytest.mark.parametrize("content", ["", None])
def test_labels_that_calibrate_nothing_are_named(paths, capsys, content):
  labels = paths / "labels.jsonl"
  labels.write_text(content or "")
  with pytest.raises(
    ValueError, match=f"{labels}: expected labelled pairs, got"
  ):
    leakage_check.calibrate(detectors.TokenSet(), str(labels), precision=0.9)


def test_a_query_that_meets_title_and_description_is_one_pair():
  known = [
    leakage_targets.Target(
      text=detectors.Text(id=f"302 {field}", text="measles"),
      topic="302",
      collection="x",
    )
    for field in ("title", "description")
  ]
  (found,) = leakage_check.count(
    {"x": {("q", "302")}}, known, detectors.Exact()
  )
  assert (found.pairs, found.queries, found.topics, found.of) == (1, 1, 1, 1)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 3, 1)])
def test_an_id_with_several_texts_is_clean_if_all_are(order, monkeypatch):
  """Also where its texts are apart, in chunks of their own."""
  topics = [detectors.Text(id="0", text="measles")]
  known = [leakage_targets.Target(text=topics[0], topic="302", collection="")]
  log = [("a", "jax"), ("b", "jax"), ("a", "measles"), ("b", "grad")]
  texts = [detectors.Text(id=name, text=text) for name, text in log]
  for chunk in (1, 2, 3, 9):
    pairs, spool, clean = io.BytesIO(), io.BytesIO(), io.BytesIO()
    found = leakage_check._MatchCollector(
      known, [detectors.Exact()], None, pairs, spool
    )
    monkeypatch.setattr(detectors, "_CHUNK", chunk)
    for read, matches in detectors.search(texts, topics, [detectors.Exact()]):
      found.add(read, matches)
    found.finish(clean)
    assert clean.getvalue() == b"b\n" and found.num_queries == 4
    assert len(found.leaked) == 1
    assert len(pairs.getvalue().splitlines()) == 1


def test_every_leaked_query_of_a_user_counts(paths):
  """Fifty of one id: not one query that is allowed."""
  rows = [f"user\tmeasles outbreaks in {1900 + i}\n" for i in range(50)]
  (paths / "log.tsv").write_text("".join([*rows, rows[0], "v\tjax grad\n"]))
  topics = [f"{i}\tmeasles outbreaks in {1900 + i}\n" for i in range(50)]
  (paths / "test.tsv").write_text("".join(topics))
  flags = ["--test", str(paths / "test.tsv"), "--detector=exact"]
  assert main.main([*command(paths), *flags, "--fail_above=49"]) == 3
  found = result(paths)
  assert (found["num_queries"], found["num_leaked"]) == (51, 50)
  assert (paths / "out" / "clean_ids.txt").read_text() == "v\n"


def test_the_splits_of_a_collection_are_compared(paths):
  folder = paths / "beir"
  (folder / "qrels").mkdir(parents=True)
  (folder / "corpus.jsonl").write_text('{"_id": "d", "text": "a text"}\n')
  queries = {"a": "measles outbreaks", "b": "outbreak of measles", "c": "jax"}
  lines = [json.dumps({"_id": i, "text": t}) for i, t in queries.items()]
  (folder / "queries.jsonl").write_text("\n".join(lines))
  for split, ids in (("train", "bc"), ("test", "a")):
    rows = ["query-id\tcorpus-id\tscore", *(f"{i}\td\t1" for i in ids)]
    (folder / f"qrels/{split}.tsv").write_text("\n".join(rows))
  given = command(paths, "--train_split=train", "--test_split=test")
  given[2], given[3] = f"--train=beir:{folder}", f"--test=beir:{folder}"
  assert main.main(given) == 0
  assert (paths / "out/clean_ids.txt").read_text() == "c\n"
  assert result(paths)["train"] == "beir" and result(paths)["num_leaked"] == 1


@pytest.mark.parametrize("form", ["log:{log}@{corpus}", "jsonl:{log}"])
def test_a_small_log_is_compared_and_not_divided(form, paths):
  """Two lines were refused: "expected pairs in every split"."""
  log, corpus = paths / "small.jsonl", paths / "corpus.jsonl"
  rows = [("measles outbreaks", "d"), ("jax", "gone"), ("jax", "d")]
  lines = (
    json.dumps({"query": q, "document": d, "clicks": 0}) for q, d in rows
  )
  log.write_text("\n".join(lines))
  corpus.write_text('{"_id": "d", "text": "a text"}\n')
  given = command(paths)
  given[2] = f"--train={form.format(log=log, corpus=corpus)}"
  assert main.main(given) == 0
  found = result(paths)
  assert (found["num_queries"], found["num_leaked"]) == (2, 1)


def test_ir_datasets_needs_no_documents(paths, monkeypatch):
  topic = type("Topic", (), {"title": "Measles outbreaks", "query_id": "302"})
  topic.description = "Where do  they come from?"
  dataset = type("Dataset", (), {})()
  dataset.has_queries = lambda: True
  dataset.queries_iter = lambda: iter([topic])
  monkeypatch.setattr(ir_datasets_sets, "_load", lambda name: dataset)
  given = command(paths)
  given[3] = "--test=ir_datasets:trec-robust04"
  assert main.main(given) == 0
  assert result(paths)["num_leaked"] == 1
  assert list(ir_datasets_sets.queries("x")) == [
    ("302", "Measles outbreaks"),
    ("302", "Where do they come from?"),
  ]


def test_processes_change_nothing(monkeypatch):
  monkeypatch.setattr(detectors, "_CHUNK", 5)
  texts = [detectors.Text(id=str(i), text=t) for i, t in enumerate(LOG * 3)]
  topics = [detectors.Text(id="302", text="Measles outbreaks")]
  chosen = [detectors.TokenSet(threshold=0.5), detectors.Trigrams()]
  one, two = (
    [*detectors.search(texts, topics, chosen, processes=number)]
    for number in (1, 2)
  )
  assert one == two and sum(len(found) for _, found in one) > 6


def test_a_worker_that_is_killed_is_one_line(monkeypatch):
  monkeypatch.setattr(detectors, "_CHUNK", 1)
  texts = [detectors.Text(id=str(i), text=f"a{i}") for i in range(2000)]
  found = detectors.search(texts, texts[:1], [detectors.Exact()], processes=2)
  next(found)
  for child in multiprocessing.active_children():
    child.kill()
  with pytest.raises(
    ValueError, match="killed, likely .*: set --processes low"
  ):
    list(found)


needs_labels = pytest.mark.skipif(
  not LABELLED.is_dir(), reason="needs the labelled pairs of SPIRE 2022"
)


@needs_labels
@pytest.mark.parametrize("name", [*leakage_check.CALIBRATED][1:4])
def test_thresholds_are_those_of_the_labelled_pairs(name):
  """The shipped encoder's would take long."""
  path = LABELLED / "spire22_annotations.jsonl"
  one = leakage_check.detector(name)
  found = leakage_check.calibrate(one, path, precision=0.9)
  assert 0 <= found.threshold - one.threshold < 1e-3


@needs_labels
def test_the_known_leaks_of_spire_2022_are_found(paths):
  path = LABELLED / "spire22_annotations.jsonl"
  pairs = query_pairs.labelled_pairs(path)
  texts = {pair.query_id: pair.query for pair in pairs}
  lines = [f"{name}\t{text}\n" for name, text in texts.items()]
  (paths / "log.tsv").write_text("".join(lines))
  given = command(paths, f"--variants={path}", "--fail_above=0")
  given[3] = f"--test={LABELLED / 'trec_topics.jsonl'}"
  assert main.main(given) == 3
  lines = (paths / "out/pairs.jsonl").read_text().splitlines()
  found = {
    (line["query_id"], line["target_id"].partition(" ")[0])
    for line in map(json.loads, lines)
  }
  asked = {(x.query_id, x.topic): not x.different_topic for x in pairs}
  right = sum(asked.get(pair, False) for pair in found)
  assert sum(asked.values()) == 721
  labelled = found & asked.keys()
  assert right / len(labelled) > 0.88
  assert right / 721 > 0.9
  assert main.main([*given, f"--known={path}"]) == 3
  lines = (paths / "out/pairs.jsonl").read_text().splitlines()
  listed = {
    (line["query_id"], line["target_id"].partition(" ")[0])
    for line in map(json.loads, lines)
    if line["detector"] == "known"
  }
  assert listed == {pair for pair, is_leak in asked.items() if is_leak}


def test_several_detectors_write_one_file(paths, capsys):
  names = ("exact", "containment", "trigrams")
  flags = [f"--detector={name}" for name in names]
  assert main.main(command(paths, *flags)) == 0
  text = (paths / "out" / "pairs.jsonl").read_text()
  found = {json.loads(line)["detector"] for line in text.splitlines()}
  assert found == set(names)
  assert "trigrams" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--detector=simhash"], "got --detector=simhash"),
    (["--detector=exact", "--threshold=.5"], "takes no threshold"),
    (["--detector=token_set", "--threshold=2"], "threshold=2.0"),
    (["--train_split=train"], "leave the split out"),
    (["--labels=x", "--threshold=.5"], "got both"),
    (["--fail_above=-1"], "fail_above=-1"),
  ],
)
def test_flags_that_make_no_sense_are_refused(paths, capsys, flags, said):
  assert main.main(command(paths, *flags)) == 2
  assert said in capsys.readouterr().err
  assert not (paths / "out" / "pairs.jsonl").exists()


def test_an_error_in_the_log_says_where_and_leaves_no_file(paths, capsys):
  with open(paths / "log.tsv", "a") as stream:
    stream.write("a secret without a tab\n")
  assert main.main(command(paths, "--detector=exact")) == 2
  said = capsys.readouterr().err
  assert "log.tsv:5: " in said and "secret" not in said
  assert not written(paths)


def test_an_empty_log_is_no_clean_one(paths, capsys):
  (paths / "log.tsv").write_text("")
  assert main.main(command(paths, "--fail_above=0")) == 2
  assert "expected queries in the log, got none" in capsys.readouterr().err
  assert not (paths / "out" / "clean_ids.txt").exists()


def test_targets_that_are_not_there_are_refused(paths, capsys):
  (paths / "topics.jsonl").write_text("")
  assert main.main(command(paths, "--detector=exact")) == 2
  assert "expected a target" in capsys.readouterr().err


def test_ids_that_are_read_otherwise_than_written_are_told(paths, capsys):
  rows = [f"{number}.0\t{text}\n" for number, text in enumerate(LOG)]
  (paths / "log.tsv").write_text("".join(rows))
  assert main.main(command(paths, "--detector=exact")) == 0
  said = capsys.readouterr().err
  assert "4 query ids written as decimals (17.0) are read" in said
  assert (paths / "out/clean_ids.txt").read_text() == "0\n1\n3\n"
