"""Further test sets: found, prepared, scored by every row, shown side by side."""

import dataclasses
import json
import shutil

import finished_runs
import numpy as np
import pytest

from synthq_jax.retrieval import bm25, measures, trec
from synthq_jax.runtime import results
from synthq_jax.stages import (
  _checks,
  compare_queries,
  plan,
  prepare_data,
  prepare_test_set,
  train_retriever,
)
from synthq_jax.storage import artifacts

NAMES = finished_runs.TEST_SETS
QUERIES = {"cqadupstack.tex": 10, "tiny": 1}
write = finished_runs.write_test_set


@pytest.fixture(name="root", scope="module")
def _root(tmp_path_factory):
  """A folder of sets, as BEIR's downloads are unzipped."""
  root = tmp_path_factory.mktemp("sets")
  finished_runs.write_test_sets(root)
  return root


def test_all_sets_below_a_folder_are_found(root):
  found = prepare_test_set.expand([f"beir:{root}"])
  assert tuple(one.name for one in found) == NAMES
  splits = {one.name: one.split for one in found}
  assert splits["msmarco"] == "dev" and splits["scifact"] == "test"
  dropping = [one.name for one in found if one.drop_identical]
  assert dropping == ["tiny"]  # BEIR does not know it
  (one,) = prepare_test_set.expand([f"beir:{root / 'scifact'}"])
  assert one.name == "scifact"


def test_sets_that_hold_their_queries_drop_them(tmp_path):
  for name in ("arguana", "quora", "unheard-of"):
    write(tmp_path / name, first=0)
  found = prepare_test_set.expand([f"beir:{tmp_path}"])
  assert [one.drop_identical for one in found] == [True, True, True]


def test_sets_of_other_kinds_are_called_as_their_folder_or_id(tmp_path):
  (tmp_path / "mine").mkdir()
  texts = ["ir_datasets:nyt/trec-core-2017"]
  texts += [f"{kind}:{tmp_path / 'mine'}" for kind in ("hf", "msmarco")]
  for text, name in zip(
    texts, ["nyt.trec-core-2017", "mine", "mine"], strict=True
  ):
    (one,) = prepare_test_set.expand([text])
    assert (one.name, one.source.kind) == (name, text.partition(":")[0])


@pytest.mark.parametrize(
  ("name", "drops"),
  [
    ("beir/fiqa/test", False),
    ("beir/webis-touche2020/v2", False),
    ("beir/quora/test", True),
    ("nyt/trec-core-2017", True),
    ("beir/unknown", True),
  ],
)
def test_sets_of_beir_keep_their_conventions_in_ir_datasets(name, drops):
  """FiQA's numeric ids, equal by chance, were dropped there alone."""
  (one,) = prepare_test_set.expand([f"ir_datasets:{name}"])
  assert (one.name, one.split) == (name.replace("/", "."), "test")
  assert one.drop_identical is drops


def test_linked_folders_are_found_and_known_by_what_is_in_them(tmp_path):
  write(tmp_path / "elsewhere" / "scifact", first=0)
  (tmp_path / "sets").mkdir()
  link = tmp_path / "sets" / "scifact"
  link.symlink_to(tmp_path / "elsewhere" / "scifact")
  (one,) = prepare_test_set.expand([f"beir:{tmp_path / 'sets'}"])
  before = one.source.digest()
  with open(link / "qrels" / "test.tsv", "a") as stream:
    stream.write("q0\td1\t1\n")
  assert one.source.digest() != before


@pytest.mark.parametrize(
  ("texts", "message"),
  [
    (["beir:{average}"], "must have different names, got 'Average' twice"),
    (["jsonl:x"], r"test_sets must be beir:DIR, msmarco:DIR, .* or ir_d"),
    (["x"], "RunConfig.test_sets must be beir:DIR, msmarco:DIR"),
    (
      ["beir:{root}/nowhere"],
      "expected a folder, got none: ",
    ),
    (["beir:{empty}"], "expected corpus.jsonl in .* or in folders below"),
    (["beir:{root}/scifact", "beir:{root}/scifact"], "'scifact' twice"),
    (["beir:{other}"], "other than test and public, got 'test'"),
  ],
)
def test_what_is_no_test_set_is_refused(root, tmp_path, texts, message):
  places = {name: tmp_path / name for name in ("test", "Average", "empty")}
  write(places["test"], first=0)
  write(places["Average"], first=0)
  places["empty"].mkdir()
  known = {"other": places["test"], "average": places["Average"], "root": root}
  texts = [t.format(**known, empty=places["empty"]) for t in texts]
  with pytest.raises(ValueError, match=message):
    prepare_test_set.expand(texts)


def test_a_main_table_of_no_set_is_refused_before_any_work(
  finished_run, tmp_path
):
  config = dataclasses.replace(
    finished_run.config, compare_queries=compare_queries.Config(test_set="dev")
  )
  with pytest.raises(
    ValueError, match=r"test, public, cqadupstack\.gis.* 'dev'"
  ):
    plan.run(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", ["named", "below", "link", "copy", "hf"])
def test_the_private_log_is_no_test_set(root, tmp_path, way):
  """A folder stands for all sets below it: queries and scores lay in the open."""
  shutil.copytree(root, tmp_path / "sets")
  log, place = tmp_path / "sets" / "scifact", tmp_path / "sets"
  kind = "hf" if way == "hf" else "beir"  # hf: reads folders of BEIR, too
  if way != "below":
    place = tmp_path / way if way in ("link", "copy") else log
  if way == "link":
    place.symlink_to(log)
  if way == "copy":
    shutil.copytree(log, place)
  source = f"beir:{log}"
  [*sets] = prepare_test_set.expand([f"{kind}:{place}"])
  refused = [one.name for one in sets if _is_refused(one, source)]
  assert refused == [way if way in ("link", "copy") else "scifact"]
  config = plan.RunConfig(
    prepare_data=prepare_data.Config(source=source),
    test_sets=(f"{kind}:{place}",),
  )
  with pytest.raises(ValueError, match="must not hold the private log"):
    _checks.check_test_sets(config)
  _checks.check_test_sets(dataclasses.replace(config, public_data=True))


def _is_refused(one, source):
  try:
    prepare_test_set.refuse_private([one], source)
  except ValueError:
    return True
  return False


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_scored_on_every_set(finished_run, name):
  run = finished_run.root
  for row in ("bm25", "public_only", "original"):
    is_private = row == "original"
    place = run / "private" if is_private else run
    found = artifacts.load(place / "evaluate" / name / row, results.Evaluation)
    assert found.test_set == name and found.num_queries == QUERIES.get(name, 15)
    assert found.private == is_private
    other = run if is_private else run / "private"
    assert not (other / "evaluate" / name / row / "result.json").exists()


def test_scores_are_those_of_the_set(finished_run):
  run = finished_run.root
  folder = finished_run.test_sets / "cqadupstack" / "gis"
  documents = [json.loads(line) for line in open(folder / "corpus.jsonl")]
  queries = [json.loads(line) for line in open(folder / "queries.jsonl")]
  index = bm25.BM25().build(
    [d["_id"] for d in documents], [d["text"] for d in documents]
  )
  ranking = index.search_run(
    [q["_id"] for q in queries], [q["text"] for q in queries], 100
  )
  qrels = {f"q{i}": {f"d{i}": 1} for i in range(301, 330, 2)}
  wanted = measures.evaluate(qrels, ranking, ("nDCG@10",)).mean["nDCG@10"]
  found = artifacts.load(
    run / "evaluate/cqadupstack.gis/bm25", results.Evaluation
  )
  assert found.measures["nDCG@10"].mean == pytest.approx(wanted, abs=1e-12)
  written = trec.read_run(run / "evaluate/cqadupstack.gis/bm25/run.trec")
  assert set(written) <= set(qrels) and len(written) == 15


def test_a_set_leaves_its_judged_queries_alone(finished_run):
  run = finished_run.root
  made = artifacts.load(run / "prepare_test_set/scifact", results.TestSet)
  assert made.num_documents == 30 and made.num_queries == 15
  arrays = np.load(run / made.directory / "queries.npz")
  assert arrays["ids"].tolist() == [f"q{i}" for i in range(101, 130, 2)]


def test_a_set_whose_ids_say_nothing_keeps_equal_ids(tmp_path):
  assert prepare_test_set._answers_itself({"7": {"7": 1, "8": 0}})
  assert not prepare_test_set._answers_itself({"7": {"7": 0, "8": 1}})


def test_the_pages_show_the_sets_side_by_side(finished_run):
  run = finished_run.root
  page = (run / "report/report.md").read_text()
  section = page.partition("## Scores on further test sets")[2]
  section = section.partition("\n## ")[0]
  header = next(line for line in section.splitlines() if line.startswith("|"))
  titles = [cell.strip() for cell in header.strip("|").split("|")]
  sets = ["cqadupstack", "msmarco", "scifact", "tiny"]
  assert titles == ["Row", *sets, "Average"]
  assert "public only" in section and "original" not in section
  assert "| cqadupstack.gis | test | 15 | kept |" in section
  assert "| msmarco | dev | 15 | kept |" in section
  private = (run / "private/report/report.private.html").read_text()
  table = private.rpartition("Scores on further test sets")[2]
  assert "original" in table.partition("<h2")[0]


@pytest.mark.parametrize("way", ["named", "below", "copy"])
def test_a_dry_run_refuses_the_private_log_in_the_words_of_the_run(
  root, tmp_path, way
):
  shutil.copytree(root, tmp_path / "sets")
  log, place = tmp_path / "sets" / "scifact", tmp_path / "sets"
  if way != "below":
    place = {"named": log}.get(way, tmp_path / way)
  if way == "copy":
    shutil.copytree(log, place)
  config = plan.RunConfig(
    prepare_data=prepare_data.Config(source=f"beir:{log}"),
    train_retriever=train_retriever.Config(batch_size=8),
    rows=plan.Rows(synthetic=(), direct_dp=()),
    test_sets=(f"beir:{place}",),
  )
  with pytest.raises(ValueError, match="must not hold the private log") as run:
    _checks.check_test_sets(config)
  with pytest.raises(ValueError, match="must not hold") as dry_run:
    plan.outlook(config, tmp_path / "run", plan.STAGES)
  assert str(dry_run.value) == str(run.value)
  plan.outlook(
    dataclasses.replace(config, public_data=True), tmp_path / "run", plan.STAGES
  )


def test_a_dry_run_refuses_the_url_of_the_private_log():
  url = "beir:gs://bucket/log"
  with pytest.raises(ValueError, match="must not hold the private log"):
    prepare_test_set.check_named([f"{url}/"], url)
  with pytest.raises(ValueError, match="must not hold the private log"):
    prepare_test_set.check_named(["hf:gs://bucket/log"], url)
  prepare_test_set.check_named([f"{url}/"])
  prepare_test_set.check_named([f"{url}s"], url)
