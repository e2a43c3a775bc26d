"""Collections that somebody wrote to do harm: each has a defined answer."""

import dataclasses
import json
import pathlib

import pytest
import random_t5
import small_data
import tiny_runs

from synthq_jax.stages import plan, static_encoder
from synthq_jax.storage import artifacts

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"
TEXTS = (
  f"{MARKUP} a page on otters",
  "[a link](javascript:alert(3)) ![x](x) **bold** | pipe | `code` # head",
  "<extra_id_0> </s> <pad> <unk> <extra_id_99> end </s></s>",
  "".join(map(chr, range(1, 32))) + "\x7f\u0085\u2028\u2029 control characters",
  "\u202eright to left\u202c \u0000 and zero",
  "{{ 7 * 7 }} {% for x in y %} ${x} %(x)s {0.__class__}",
  "' OR 1=1 -- \" ; DROP TABLE queries",
  "e\u0301" * 200 + " \U0001f9a6" * 50,
)
IDS = (
  "../x",
  "../../private/secret",
  "/etc/passwd",
  "a/b/c",
  "..",
  "-rf",
  "%s",
)


@pytest.fixture(name="hostile", scope="module")
def _hostile(tmp_path_factory):
  """A run of every stage on such documents and queries, in a folder of its own."""
  folder = tmp_path_factory.mktemp("hostile")
  documents = {f"d{i}": small_data.document(i) for i in range(60)}
  queries = {f"q{i}": small_data.query(i) for i in range(60)}
  for number, text in enumerate(TEXTS):
    documents[f"d{number}"] = f"{text} {number}"
    queries[f"q{number}"] = f"{text} {number}"
  for number, name in enumerate(IDS, len(TEXTS)):
    documents[name] = documents.pop(f"d{number}")
    queries[f"{name}?"] = queries.pop(f"q{number}")
  rows = [(q, d, 1) for q, d in zip(queries, documents, strict=True)]
  train = [row for number, row in enumerate(rows) if number % 3]
  source = small_data.write_beir(
    folder / "data", documents, queries, {"train": train, "test": rows[::3]}
  )
  config = tiny_runs.config(source, checkpoint=random_t5.save(folder / "t5"))
  config = dataclasses.replace(
    config,
    static_encoder=static_encoder.Config(
      dim=4, steps=2, warmup_steps=1, batch_size=8
    ),
    rows=dataclasses.replace(config.rows, public_only=False, direct_dp=()),
  )
  before = {path for path in folder.parent.iterdir()}
  report = plan.run(config, folder / "run")
  assert {path for path in folder.parent.iterdir()} == before
  return folder, report, documents


def test_nothing_is_written_outside_of_the_working_directory(hostile):
  folder, _, _ = hostile
  assert sorted(p.name for p in folder.iterdir()) == ["data", "run", "t5"]
  root = folder / "run"
  for path in root.rglob("*"):
    assert path.resolve().is_relative_to(root), path
    assert path.name not in ("x", "passwd", "secret", "c"), path


def test_texts_and_ids_come_through_as_they_were(hostile):
  folder, _, documents = hostile
  path = folder / "run/prepare_data/corpus.jsonl"
  lines = list(map(json.loads, path.read_text().splitlines()))
  assert {line["_id"] for line in lines} == set(documents)
  held = {line["_id"]: line["text"] for line in lines}
  for name, text in documents.items():
    assert held[name].split() == text.split()
  for path in folder.rglob("run.trec"):
    assert all(len(line.split()) == 6 for line in path.read_text().splitlines())


def test_pages_escape_what_documents_and_queries_hold(hostile):
  folder, report, _ = hostile
  for name in (report.html, report.private_html):
    text = (folder / "run" / name).read_text()
    assert "<script>alert" not in text and "<img src=x" not in text
  markdown = (folder / "run" / report.markdown).read_text()
  assert "](javascript:" not in markdown and "<script>" not in markdown


def test_special_tokens_in_a_text_are_text(hostile):
  from synthq_jax.data import shipped, vocabulary

  known = vocabulary.load(shipped.VOCABULARY, extra_ids=100)
  ids = known.encode("<extra_id_0> </s> <pad>")
  assert vocabulary.EOS_ID not in ids and vocabulary.PAD_ID not in ids
  assert max(ids) < known.vocab_size - 100


def prepare(source: str, root: pathlib.Path, checkpoint: str):
  config = tiny_runs.config(source, checkpoint=checkpoint)
  plan.run(config, root, stages=["prepare_data"])
  return artifacts.read_json(root / "private/prepare_data/result.json")[
    "result"
  ]
