"""`synthq leakage near_duplicates`: files in, pairs and counts out."""

import json
import stat

import pytest

from synthq_jax.cli import main
from synthq_jax.leakage import near_duplicates as detectors
from synthq_jax.pipeline import near_duplicates

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
    *("leakage", "near_duplicates", f"--queries={paths / 'log.tsv'}"),
    *(f"--targets={paths / 'topics.jsonl'}", "--quiet"),
    *(f"--output={paths / 'out' / 'pairs.jsonl'}", *more),
  ]


def test_pairs_go_to_a_file_of_ones_own_and_counts_to_the_screen(paths, capsys):
  assert main.main(command(paths, "--detector=token_set")) == 0
  output = paths / "out" / "pairs.jsonl"
  assert stat.S_IMODE(output.stat().st_mode) == 0o600
  lines = [json.loads(line) for line in output.read_text().splitlines()]
  found = [(x["query_id"], x["collection"], x["target_id"]) for x in lines]
  assert found == [
    ("q1", "robust04", "302 title"),
    ("q1", "core17", "302 title"),
    ("q2", "robust04", "302 description"),
    ("q2", "core17", "302 description"),
  ]
  assert lines[0]["query"] == LOG[1]
  assert lines[0]["relation"] == "identical" and lines[0]["score"] == 1
  said = capsys.readouterr().out
  rows = [line.split() for line in said.splitlines()]
  assert ["token", "set", "robust04", "2", "2", "1", "2"] in rows
  assert ["token", "set", "core17", "2", "2", "1", "1"] in rows
  assert "PRIVATE" in said and "peak memory" in said
  assert not any(
    word in said.lower() for word in ("measles", "control", "grad")
  )


def test_a_query_that_meets_title_and_description_is_one_pair():
  texts = [detectors.Text(id=f"302 {n}", text="measles") for n in ("a", "b")]
  known = [
    near_duplicates.Target(text=text, topic="302", collection="x")
    for text in texts
  ]
  log = [detectors.Text(id="q", text="Measles")]
  matches = list(detectors.find(log, texts, detectors.Exact()))
  pairs = zip(known, matches, strict=True)
  (counts,) = near_duplicates.count(pairs, known, "exact")
  assert (counts.pairs, counts.queries, counts.topics, counts.of) == (
    1,
    1,
    1,
    1,
  )


def test_several_detectors_write_one_file(paths, capsys):
  names = ("exact", "containment", "trigrams", "embedding")
  flags = [f"--detector={name}" for name in names]
  assert main.main(command(paths, *flags)) == 0
  text = (paths / "out" / "pairs.jsonl").read_text()
  found = {json.loads(line)["detector"] for line in text.splitlines()}
  assert found == set(names)
  assert "embedding" in capsys.readouterr().out


def test_two_logs_can_be_compared(paths, capsys):
  given = command(paths, "--detector=exact", "--threshold=1")
  given[3] = f"--targets={paths / 'log.tsv'}"
  assert main.main(given) == 0
  assert ["exact", "-", "4", "4", "4", "4"] in [
    line.split() for line in capsys.readouterr().out.splitlines()
  ]


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--detector=simhash"], "got --detector=simhash"),
    (["--detector=exact", "--threshold=.5"], "takes no threshold"),
    (["--detector=token_set", "--threshold=2"], "threshold=2.0"),
    (["--detector=trigrams", "--checkpoint=x"], "go with --detector=embedding"),
    (["--detector=embedding", "--checkpoint=x"], "together, got one"),
    (["--detector=exact", "--bert=x"], "go with --detector=embedding"),
    (["--detector=embedding", "--bert=no_such_folder"], "no_such_folder"),
    (
      ["--detector=embedding", "--bert=x", "--checkpoint=x", "--vocabulary=x"],
      "got both",
    ),
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
  assert not (paths / "out" / "pairs.jsonl").exists()


def test_targets_that_are_not_there_are_refused(paths, capsys):
  (paths / "topics.jsonl").write_text("")
  assert main.main(command(paths, "--detector=exact")) == 2
  assert "expected a target" in capsys.readouterr().err
