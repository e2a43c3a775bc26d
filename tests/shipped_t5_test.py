"""The script of docs/lab that makes the shipped checkpoint again."""

import collections
import dataclasses
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from synthq_jax.data import environment_docs, vocabulary
from synthq_jax.models import t5_checkpoints
from synthq_jax.training import loop

FOLDER = pathlib.Path(__file__).parents[1] / "docs/lab/shipped_t5"
SCRIPT = FOLDER / "make_checkpoint.py"
SECRET = "when does the red harbour ferry leave"
NOUNS = "river bridge tower garden market valley forest castle".split()


@pytest.fixture(scope="module")
def script():
  spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "make_checkpoint", module)
    spec.loader.exec_module(module)
    patch.setattr(
      environment_docs, "private_queries", lambda: ["a query of it"]
    )
    yield module


def make_config(script, root):
  """Public text with a planted query, and a file that holds the query."""
  (root / "text").mkdir()
  for number, noun in enumerate(NOUNS):
    body = " ".join(
      f"The {noun} of part {i} was built by many people of the old {other}."
      for i, other in enumerate(NOUNS)
    )
    (root / "text" / f"{noun}.md").write_text(
      f"# The {noun} {number}\n\n{body}\n\n"
      f"## How old is the {noun}?\n\nIt is {number} years old. {body}\n\n"
      f"## {SECRET}?\n\nAnd {SECRET} at noon? The {noun} is very near.\n"
    )
  (root / "set.txt").write_text(f"1\t{SECRET}\n2\tno such words anywhere\n")
  source = {
    "name": f"folder:{root / 'text'}",
    "version": "1",
    "licence": "CC0-1.0",
    "files": [["*.md", "markdown"]],
  }
  (root / "sources.json").write_text(json.dumps([source]))
  shape = dataclasses.replace(
    script.SHAPE, vocab_size=64, emb_dim=16, num_heads=2, head_dim=8,
    mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1,
  )  # fmt: skip
  phase = script.Phase(
    steps=2, input_length=40, target_length=24, rates=(1.0, 0.5),
    tasks=("question", "heading", "fill", "copy"), batch_sizes=(2, 2, 2, 2),
  )  # fmt: skip
  return script.Config(
    phases=(phase,),
    model=shape,
    most=(("", 8),),
    half_precision=True,
    extra_ids=8,
    manifest=str(root / "sources.json"),
    held_out=(str(root / "set.txt"),),
    settings=loop.Settings(log_every=1),
  )


def test_the_script_explains_itself():
  done = subprocess.run(
    [sys.executable, str(SCRIPT), "--help"],
    check=True,
    capture_output=True,
    text=True,
    env={"PYTHONPATH": str(FOLDER.parents[2])},
  )
  assert "--held_out" in done.stdout and "--workdir" in done.stdout


def test_the_shipped_settings_make_the_shipped_shape(script):
  config = script.Config(**script.SCHEDULES["shipped"])
  assert sum(phase.steps for phase in config.phases) == 15_100
  shape = dataclasses.replace(config.model, dropout_rate=0.0, dtype="float32")
  shipped = FOLDER.parents[2] / "synthq_jax/assets/demo_t5"
  assert t5_checkpoints.load_config(shipped) == shape


def test_the_record_is_of_the_manifests_sources_without_held_out_queries(
  script,
):
  record = json.loads((FOLDER / "result.json").read_text())["result"]
  assert record["num_repeated"] == 0 and record["num_held_out"]["demo"] >= 5_000
  assert re.fullmatch("[0-9a-f]{64}", record["text_digest"])
  named = {
    f"{source.name} {source.version} ({source.licence})"
    for source in script.read_manifest(script.MANIFEST)
  }
  lines = record["sources"]
  assert {line.partition("): ")[0] + ")" for line in lines} == named


@pytest.mark.slow
def test_two_steps_make_a_checkpoint_that_has_not_read_a_held_out_query(
  script, tmp_path
):
  config = make_config(script, tmp_path)
  made = script.run(config, tmp_path / "run")
  assert made.num_repeated == 0 and made.num_records["question"] == len(NOUNS)
  assert made.dropped["titles"] == made.dropped["sentences"] == len(NOUNS)
  assert made.num_held_out == {"demo": 1, "set.txt": 2}

  params, shape = t5_checkpoints.load(tmp_path / "run")
  leaves = t5_checkpoints.flatten(params).values()
  assert made.num_parameters == sum(leaf.size for leaf in leaves)
  assert all(np.isfinite(leaf).all() for leaf in leaves)
  assert (shape.emb_dim, shape.dropout_rate) == (16, 0.0)
  log = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["step"] for line in log] == [1, 2]

  words = vocabulary.load(tmp_path / "run/vocabulary.model", extra_ids=8)
  cache = script.Cache.load(tmp_path / "run" / script.CACHE_NAME)
  texts = [
    words.decode(row[row > 0].tolist())
    for row in (*cache.passages, *cache.queries)
  ]
  assert any("bridge" in text for text in texts)
  assert not any("harbour ferry" in text for text in texts)


LONG = "joins a sequence of arrays along an existing axis of all"
SHORT = "sorts arrays quickly"
WORDS = [f"{a}{b}{c}" for a in "bdfg" for b in "aeiou" for c in "klmnp"]


def words(count, start=0):
  return " ".join(WORDS[start : start + count])


def make_records(script, texts, queries=(), title="Some heading"):
  entries = [script.Entry("heading", title, text) for text in texts]
  dropped = collections.Counter()
  held_out = script.HeldOut(queries)
  return list(script.make_records(entries, held_out, set(), dropped)), dropped


def test_planted_repeats_of_a_query_are_dropped_and_counted(script):
  texts = [
    f"Clean {words(19, 0)}. It {LONG}. Also {words(19, 20)}.",
    f"Clean {words(19, 40)}. What {SHORT} is this. More {words(19, 60)}.",
  ]
  queries = [LONG, SHORT]
  records, dropped = make_records(script, texts, queries)
  assert +dropped == {"sentences": 2}
  assert [record.passage for record in records] == [
    f"Clean {words(19, 0)}. Also {words(19, 20)}.",
    f"Clean {words(19, 40)}. More {words(19, 60)}.",
  ]
  assert script.count_repeats(queries, records) == 0
  _, dropped = make_records(script, texts[:1], queries, f"On {SHORT}")
  assert +dropped == {"sentences": 1, "titles": 1}
  assert script.count_repeats(queries, make_records(script, texts)[0]) == 2


def test_what_a_dropped_sentence_brings_together_is_dropped_too(script):
  half, other = " ".join(LONG.split()[:5]), " ".join(LONG.split()[5:])
  text = f"So {words(8)} {half}. And {SHORT} it. {other.capitalize()} it."
  records, dropped = make_records(script, [text], [LONG, SHORT])
  assert records == [] and dropped["records"] == 1


def test_a_question_that_a_rule_makes_is_checked_as_well(script):
  text, asked = (
    f"A bolt is a pin with a thread. It {words(30)}.",
    "what is a bolt",
  )
  records, _ = make_records(script, [text], title="Bolts")
  assert asked in {r.query for r in records if r.kind == "rule"}
  records, dropped = make_records(script, [text], [asked], "Bolts")
  assert asked not in {r.query for r in records} and dropped["records"] == 1


def test_flags_are_those_of_a_search_word_by_word(script):
  rng = np.random.default_rng(0)
  draw = lambda count: " ".join(rng.choice(["a", "b"], count))  # noqa: E731
  texts = [[draw(n)] for n in rng.integers(1, 40, 300)]
  queries = [draw(n) for n in rng.integers(1, 20, 30)]
  grams = [" ".join(g) for q in queries for g in script.get_grams(q)]
  wanted = [any(f" {g} " in f" {t} " for g in grams) for [t] in texts]
  assert [flag for [flag] in script.HeldOut(queries).flags(texts)] == wanted
  assert len(set(wanted)) == 2
