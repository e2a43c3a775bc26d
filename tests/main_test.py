"""The command line: what it runs, what it prints, how it fails."""

import contextlib
import dataclasses
import errno
import functools
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import types

import jax
import made_up
import pytest

from synthq_jax.cli import flags, guide, main
from synthq_jax.data import environment_docs
from synthq_jax.runtime import results
from synthq_jax.stages import plan
from synthq_jax.studies import frame, images
from synthq_jax.training import distributed, progress

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEMO = "--gin_file=gin_configs/recipes/demo.gin"
REPORT = results.Report(
  html="report.html",
  markdown="report.md",
  private_html="private/report.private.html",
  table="row  nDCG@10\nbm25  0.400",
  verdict=f"Release: yes\nWARNING: {'a long warning ' * 12}",
)

AUDITS = []


@pytest.fixture(autouse=True, scope="module")
def _counted_once():
  """Has the files of the demo set, whose number most commands ask, read once."""
  with pytest.MonkeyPatch.context() as patch:
    count = functools.cache(environment_docs.most_documents)
    patch.setattr(environment_docs, "most_documents", count)
    yield


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
  """Leaves out the width of the terminal in which the tests run."""
  monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def ran(monkeypatch):
  """Stands in for the pipeline: records what it was asked to run."""
  calls = []

  def run(
    config,
    workdir,
    *,
    stages=None,
    on_accepted,
    on_finished,
  ):
    on_accepted()
    on_finished({"audit": AUDITS})
    calls.append((config, workdir, stages, progress._IS_SHOWN.get()))
    return REPORT if stages in (None, ("report",)) else None

  monkeypatch.setattr(plan, "run", run)
  return calls


def fails(capsys, *argv: str) -> str:
  """Runs a command that must fail politely; returns its one line."""
  assert main.main(argv) == 2
  captured = capsys.readouterr()
  lines = captured.err.splitlines()
  assert len(lines) == 1
  assert lines[0].startswith("synthq: ")
  return lines[0]


def test_run_hands_the_configuration_to_the_pipeline(ran, tmp_path, capsys):
  argv = ["run", DEMO, f"--workdir={tmp_path}", "--quiet"]
  assert main.main(argv) == 0
  [(config, workdir, stages, is_shown)] = ran
  assert isinstance(config, plan.RunConfig)
  assert (workdir, stages, is_shown) == (tmp_path, None, False)
  printed = capsys.readouterr().out
  before, table, _ = printed.partition(REPORT.table)
  assert table and "PRIVATE: scores on private queries" in before
  assert str(tmp_path / "report.html") in printed
  assert f"PRIVATE report:   {tmp_path / REPORT.private_html}" in printed
  assert "\nRelease: yes\n" in printed
  assert "each row: see the private report" in printed
  assert all(
    len(line) <= 100 for line in printed.splitlines() if "WARN" in line
  )
  cost = r"run finished: 0 min \d+ s, peak memory \d+\.\d GiB"
  assert re.search(cost, printed)


def test_every_stage_of_the_pipeline_has_a_command(ran, tmp_path, capsys):
  assert set(plan.STAGES) <= set(main.STAGES)
  few = (*plan.STAGES[::9], "audit", "report")  # of one code
  for stage in few:
    assert main.main([stage, PLANTED, DEMO, f"--workdir={tmp_path}"]) == 0
    assert (REPORT.table in capsys.readouterr().out) == (stage == "report")
  assert [stages for _, _, stages, _ in ran] == [(s,) for s in few]


PLANTED = "--gin.plan.Canaries.number=2"


def test_an_audit_prints_its_tables(ran, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(f"{__name__}.AUDITS", [made_up.audit()])
  assert main.main(["audit", DEMO, PLANTED, f"--workdir={tmp_path}"]) == 0
  printed = capsys.readouterr().out
  assert "20.5 [1.0, 100.0]" in printed  # the mean rank of 1 and 40
  assert "0.750 [0.200, 1.000]" in printed
  assert "does not refute the claim" in printed
  assert printed.strip().startswith("PRIVATE")


@pytest.mark.parametrize(
  ("changes", "code", "words"),
  [
    ({}, 0, ""),
    ({"lower_bound": 8.0}, 0, ""),
    ({"lower_bound": 8.1}, 3, "eps8: the audit refutes the claimed epsilon"),
    ({"control": 1e-4}, 3, "canaries were known before"),
    ({"lower_bound": None, "ceiling": 0.0}, 3, "so nothing was audited"),
    ({"lower_bound": 99.0, "claimed_epsilon": float("inf")}, 0, ""),
  ],
)
def test_the_gate_exits_with_3_where_a_claim_falls(
  ran, tmp_path, capsys, monkeypatch, changes, code, words
):
  monkeypatch.setattr(
    f"{__name__}.AUDITS", [made_up.audit(), made_up.audit(**changes)]
  )
  argv = [f"--workdir={tmp_path}", DEMO, PLANTED]
  for stage in ("audit", "run") if code else ("audit",):
    assert main.main([stage, *argv, "--fail_above_claim"]) == code
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert error.count("\n") == (code > 0)
    assert "8.1" not in error  # the number is private
  assert main.main(["audit", *argv]) == 0  # told, and not enforced


def test_a_gate_that_cannot_shut_says_so(ran, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(f"{__name__}.AUDITS", [made_up.audit(ceiling=3.5)])
  argv = ["audit", DEMO, PLANTED, f"--workdir={tmp_path}", "--fail_above_claim"]
  assert main.main(argv) == 0
  captured = capsys.readouterr()
  assert "too few canaries to refute such a claim" in captured.out
  assert "could not refute an epsilon above 3.50" in captured.err


def test_study_runs_the_study_that_the_files_configure(
  monkeypatch, tmp_path, capsys
):
  calls = []

  def recorded(study, config, where, *, on_accepted):
    on_accepted()
    calls.append((config, where, progress._IS_SHOWN.get()))
    return "row  accuracy"

  monkeypatch.setattr(frame, "run", recorded)
  file = "--gin_file=gin_configs/studies/logit_dp_images.gin"
  argv = ["study", file, f"--workdir={tmp_path}", "--gin.EPSILON=3", "--quiet"]
  assert main.main(argv) == 0
  [(config, where, is_shown)] = calls
  assert isinstance(config, images.Config)
  assert (where, config.epsilon, is_shown) == (tmp_path, 3.0, False)
  assert "row  accuracy\nstudy finished: " in capsys.readouterr().out
  assert "EPSILON = 3" in (tmp_path / "config.gin").read_text()
  line = fails(capsys, "study", DEMO, f"--workdir={tmp_path}")
  assert (
    "no study: type the command of their header, such as `synthq run`" in line
  )
  assert len(calls) == 1


def test_flags_win_over_files_and_later_files_over_earlier_ones(ran, tmp_path):
  later = tmp_path / "later.gin"
  later.write_text("BATCH_SIZE = 7\nTRAIN_STEPS = 8\n")
  argv = ["run", DEMO, f"--gin_file={later}", f"--workdir={tmp_path}"]
  flags = ["--gin.TRAIN_STEPS=9", "--gin.generate.Config.p=0.5"]
  flags.append("--gin.SOURCE=beir:/data/my set")  # text needs no quotes
  assert main.main(argv + flags) == 0
  config = ran[0][0]
  assert config.finetune_dp.batch_size == 7
  assert config.finetune_dp.steps == 9
  assert config.generate.p == 0.5
  assert config.prepare_data.source == "beir:/data/my set"


@pytest.mark.parametrize(
  "flag, epsilons",
  [
    ("--gin.EPSILON=3", (3.0,)),
    ("--gin.EPSILON=inf", (float("inf"),)),
    ("--gin.plan.Rows.synthetic=(8, 3.5, %INF)", (8.0, 3.5, float("inf"))),
    ("--gin.plan.Rows.synthetic=()", ()),
  ],
)
def test_epsilons_become_floats(ran, tmp_path, flag, epsilons):
  assert main.main(["run", DEMO, f"--workdir={tmp_path}", flag]) == 0
  synthetic = ran[0][0].rows.synthetic
  assert synthetic == epsilons
  assert all(type(value) is float for value in synthetic)


@pytest.mark.parametrize(
  "flag",
  [
    "personalisation.Settings.epochs=2",
    "contrastive.Softmax.temperature=0.2",
    "optim.Logit.norms='bound'",
    "monot5/rerankers.Recipe.epochs=2",
    "filters_of.Config.x=1",
  ],
)
def test_a_flag_reaches_every_package_of_the_library(flag):
  known = flag != "filters_of.Config.x=1"
  with contextlib.nullcontext() if known else pytest.raises(main.UsageError):
    main.configure(plan.RunConfig, ["recipes/demo.gin"], [flag])


def test_a_part_that_a_flag_configures_is_built_of_it():
  flags = ["loop.Settings.save_seconds=3.0", "report.Config.title=t"]
  config, _ = main.configure(plan.RunConfig, ["recipes/demo.gin"], flags)
  assert config.finetune_dp.settings.save_seconds == 3.0
  assert config.report.title == "t"


def test_files_are_found_from_anywhere(ran, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("gin_configs/recipes/demo.gin", "recipes/demo.gin"):
    assert main.main(["run", f"--gin_file={name}", "--workdir=w"]) == 0
  assert len(ran) == 2


def test_a_file_of_the_current_folder_hides_ours(ran, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / "gin_configs" / "data"
  folder.mkdir(parents=True)
  text = (ROOT / "gin_configs/data/beir.gin").read_text()
  (folder / "environment_docs.gin").write_text(
    text.replace("%gin.REQUIRED", "'beir:mine'")
  )
  argv = ["run", "--gin_file=recipes/demo.gin", "--workdir=w"]
  assert main.main(argv) == 0
  assert ran[0][0].prepare_data.source == "beir:mine"


def test_search_paths_come_first(ran, tmp_path):
  (tmp_path / "own.gin").write_text(
    "include 'gin_configs/recipes/demo.gin'\nSEED = 5\n"
  )
  argv = ["run", "--gin_file=own.gin", f"--workdir={tmp_path}"]
  assert main.main([*argv, f"--gin_search_paths=/none,{tmp_path}"]) == 0
  assert ran[0][0].prepare_data.seed == 5


@pytest.mark.parametrize(
  "epsilon",
  ["EPSILON=inf", "EPSILON=1e999", "plan.Rows.synthetic=(8.0, 1e999)"],
)
def test_the_written_configuration_gives_the_same_run(
  ran, tmp_path, capsys, epsilon
):
  """With 1e999 it had epsilon 8, or could not be read."""
  flags = [f"--gin.{epsilon}", "--gin.SEED=3", "--gin.SOURCE=jsonl:x"]
  assert main.main(["run", DEMO, f"--workdir={tmp_path}/a", *flags]) == 0
  again = f"--gin_file={tmp_path}/a/config.gin"
  assert main.main(["run", again, f"--workdir={tmp_path}/b"]) == 0
  assert ran[0][0] == ran[1][0]
  assert math.inf in ran[0][0].rows.synthetic
  texts = [(tmp_path / place / "config.gin").read_text() for place in "ab"]
  assert texts[0] == texts[1]
  assert capsys.readouterr().err == ""


def test_a_secret_is_hidden_under_every_name(ran, tmp_path):
  file = tmp_path / "own.gin"
  file.write_text(
    "from __gin__ import dynamic_registration\n"
    "from synthq_jax.stages import plan\n"
    "MY_NUMBER = 271828182845\n"
    "plan.RunConfig.secret_seed = %MY_NUMBER\n"
  )
  argv = ["run", DEMO, f"--gin_file={file}", f"--workdir={tmp_path}"]
  assert main.main(argv) == 0
  assert ran[0][0].secret_seed == 271828182845
  assert "271828182845" not in (tmp_path / "config.gin").read_text()


def test_the_written_configuration_keeps_the_secret(ran, tmp_path):
  flag = "--gin.plan.RunConfig.secret_seed=271828182845904523536028747135266249"
  assert main.main(["run", DEMO, f"--workdir={tmp_path}", flag]) == 0
  assert str(ran[0][0].secret_seed).startswith("271828")
  written = (tmp_path / "config.gin").read_text()
  assert "271828" not in written
  assert "secret_seed is not written here" in written


def own_recipe(tmp_path, *lines, encoding="utf-8") -> str:
  """Returns the flag of a gin file with these lines."""
  path = tmp_path / "own recipe.gin"
  path.write_text("\n".join(lines) + "\n", encoding=encoding)
  return f"--gin_file={path}"


INCLUDE = "include 'gin_configs/recipes/demo.gin'"


def test_a_macro_that_nothing_uses_is_noted(ran, tmp_path, capsys):
  file = own_recipe(tmp_path, INCLUDE, "MY_NOTE = 3")
  assert main.main(["run", file, f"--workdir={tmp_path}"]) == 0
  noted = capsys.readouterr().err
  assert noted == "synthq: note: MY_NOTE is set, but nothing uses it\n"


@pytest.mark.parametrize("name", ["EPSILN", "Epsilon", "epsilon", "EPSILONS"])
def test_a_macro_that_nothing_uses_and_looks_like_one_is_refused(
  ran, tmp_path, capsys, name
):
  """It was a note, and the training took the recipe's epsilon, 8 for 3."""
  file = own_recipe(tmp_path, INCLUDE, f"{name} = 3.0")
  line = fails(capsys, "run", file, f"--workdir={tmp_path}")
  assert line.endswith(
    f"own recipe.gin:2: {name} is set, but nothing uses it; did you mean EPSILON?"
  )
  assert not ran


@pytest.mark.parametrize(
  "setting", ["EPSILON = 3.0", "plan.Rows.synthetic = (3.0,)"]
)
def test_a_setting_above_the_file_that_sets_it_again_is_refused(
  ran, tmp_path, capsys, setting
):
  """The recipe's epsilon won without a word, as gin has it."""
  name = setting.partition(" ")[0]
  imports = (
    "from __gin__ import dynamic_registration",
    "from synthq_jax.stages import plan",
  )
  file = own_recipe(tmp_path, *imports, setting, INCLUDE)
  line = fails(capsys, "run", file, f"--workdir={tmp_path}")
  assert f"own recipe.gin:3: {name} is set again by " in line
  assert line.endswith(", which line 4 includes: move it below that line")
  assert "recipes/demo.gin:" in line and not ran
  file = own_recipe(tmp_path, *imports, INCLUDE, setting)
  assert main.main(["run", file, f"--workdir={tmp_path}"]) == 0
  assert ran[0][0].rows.synthetic == (3.0,)


def test_a_gin_file_of_windows_is_read(ran, tmp_path, capsys):
  """With a byte order mark: "Unexpected token"."""
  text = (INCLUDE + "\r", "EPSILON = 3.0\r")
  file = own_recipe(tmp_path, *text, encoding="utf-8-sig")
  assert main.main(["run", file, f"--workdir={tmp_path}"]) == 0
  assert ran[0][0].rows.synthetic == (3.0,)
  listed = output(capsys, "settings", file.partition("=")[2])
  assert re.search(r"--gin.EPSILON +3\.0 ", listed)


def test_a_tilde_behind_a_flag_is_the_home(ran, tmp_path, monkeypatch):
  """Shells leave it: a folder named ~ was made, which `rm -r ~` does not mean."""
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.chdir(tmp_path)
  (tmp_path / "own.gin").write_text(f"{INCLUDE}\n")
  argv = ["run", "--gin_file=~/own.gin", "--workdir=~/runs"]
  argv.append("--gin.plan.RunConfig.checkpoint=~/folder")
  assert main.main(argv) == 0
  assert ran[0][0].checkpoint == f"{tmp_path}/folder"
  source = flags.write_literal("log:~/a.csv@~/b.jsonl")
  assert source == repr(f"log:{tmp_path}/a.csv@{tmp_path}/b.jsonl")
  assert (tmp_path / "runs/config.gin").is_file()
  assert not (tmp_path / "~").exists()


def test_a_parameter_given_by_its_name_leaves_no_note(ran, tmp_path, capsys):
  flag = "--gin.plan.RunConfig.checkpoint=folder"
  assert main.main(["run", DEMO, f"--workdir={tmp_path}", flag]) == 0
  assert ran[0][0].checkpoint == "folder"
  assert capsys.readouterr().err == ""


RUN = "run --gin_file=demo_tiny.gin --workdir=w"
MSMARCO = "privacy --examples=532761 --batch_size=1024 --epochs=30"
WRONG_USES = {
  # What is asked for.
  "": "required: COMMAND",
  "walk": "invalid choice: 'walk'",
  "generat --workdir=w": "did you mean generate?",
  "leakage chek": "did you mean check?",
  "run --gin_file=demo_tiny.gin --workdir=": "--workdir: expected a value, got",
  "run": "required: --workdir",
  "run --workdir=w": "expected --gin_file=FILE, got none",
  f"{RUN} --steps=3": "unrecognized arguments: --steps=3",
  f"{RUN} --quite": "did you mean --quiet?",
  f"{RUN} --epsilon=3": "--epsilon=3; did you mean --gin.EPSILON=3?",
  f"{RUN} --batch-size 64": "did you mean --gin.BATCH_SIZE=64?",
  f"{RUN} EPSILON=3": "did you mean --gin.EPSILON=3?",
  f"{RUN} --gin.EPSILON 3": "expected --gin.EPSILON=3, got --gin.EPSILON 3",
  "search boats --workdir=w --epsilon=3": "--epsilon=3; see synthq --help",
  "privacy --epsilonn=3": "did you mean --epsilon?",
  f"{RUN} --num_processes=two": "invalid int value: 'two'",
  "study --workdir=w --dry_run": "--dry_run goes with stages of a run",
  "audit --gin_file=demo_tiny.gin --workdir=w": "expected canaries to audit",
  # What a gate cannot hold.
  f"{RUN} --fail_above_claim": "expected canaries to audit",
  f"study {DEMO} --workdir=w --fail_above_claim": "report or run, got study",
  f"generate {DEMO} {PLANTED} --workdir=w --fail_above_claim": "--fail_above_claim goes with audit or report or run, got generate",
  f"{RUN} {PLANTED} --fail_above_claim --gin.plan.Rows.synthetic=(%INF,)": "expected a finite epsilon to hold",
  f"audit {DEMO} {PLANTED} --workdir=w --fail_above_claim --gin.plan.Canaries.repetitions=(10,100)": "add 1",
  # Files.
  "run --gin_file=demo_tny.gin --workdir=w": "Did you mean demo_tiny.gin?",
  "run --gin_file=x.gin --workdir=w": "give --gin_search_paths=FOLDER",
  "run --gin_file=logit_dp_images.gin --workdir=w": "do not configure plan.RunConfig",
  f"{RUN} --gin_file=data/beir.gin": "give --gin.SOURCE=...",
  "settings demo_ful.gin": "Did you mean demo_full.gin?",
  "settings nope.gin": "nope.gin: expected a gin file, got none. Give its path",
  "settings bytes": "synthq: bytes: ",
  "recipes demo_ful.gin": "Did you mean demo_full.gin?",
  "settings optim/lora.gin": "expected a recipe or a study",
  # Names and values of settings.
  f"{RUN} --gin.EPSLON=3": "did you mean --gin.EPSILON=3?",
  f"{RUN} --gin.epsilon=3": "did you mean --gin.EPSILON=3?",
  f"{RUN} --gin.Batch_Size=3": "did you mean --gin.BATCH_SIZE=3?",
  f"{RUN} --gin.evaluate.Config.measures=\"('foo',)\"": "got 'foo'",
  f"{RUN} --gin.evaluate.Config.measures=\"('ERR@10',)\"": "no installed provider computes",
  f"{RUN} --gin.evaluate.Config.measures=\"('nDCG@10','R@1000')\"": (
    "at most depth=100 results, got R@1000"
  ),
  f"{RUN} --gin.evaluate.Config.depth=50 --gin.evaluate.Config.measures=\"('MFR',)\"": (
    "got MFR, which looks at 100: raise depth"
  ),
  f"{RUN} --gin.EPSILON=three": "plan.Rows.synthetic[0]: expected float",
  f"{RUN} --gin.EPSILON": "expected --gin.NAME=value",
  f"{RUN} --gin.DELTA=high": "expected float | None, got 'high'",
  f"{RUN} --gin.generate.Config.q=1": "doesn't have a parameter named 'q'",
  f"{RUN} --gin.generate.Config.sead=1": "did you mean seed?",
  f"{RUN} --gin.generate.Confg.p=1": "did you mean Config?",
  f"{RUN} --gin.genrate.Config.p=1": "did you mean generate?",
  f"{RUN} --gin.plan.Rows.synthetic=(8,": "--gin.plan.Rows.synthetic=(8,:",
  f"{RUN} --gin.EPSILON=(%EPSILN,)": "no gin file defines EPSILN; did you mean EPSILON?",
  f"{RUN} --gin.plan.Rows=3": "expected a parameter, got the class plan.Rows: give --gin.plan.Rows.NAME=value",
  f"{RUN} --gin.COMPARED='(\"direct\",)'": "direct_dp or synthetic_eps16, got 'dir",
  f"{RUN} --gin.SECRET_SEED=1 --gin.SOURCE=beir:x": "must be None for private",
  f"{RUN} --gin.FUSED=True --gin.plan.Rows.bm25=False": "needs the row that it",
  # Data.
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=beer:x": "must be",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=beir:file": "got file: a file; give the folder",
  # Tools.
  "privacy --gin.X=1 --examples=9 --batch_size=3": "takes no",
  "export --to=x --format=hf": "expected one of --checkpoint=FOLDER",
  "export --checkpoint=no --to=x --format=huggingface --step=3": "--step goes with --format=t5x, got",
  "export --queries=no --to=x --format=pdf": "--format must be one of",
  "search --workdir=w": "expected a query in quotes",
  "privacy --ledger=bytes": "bytes:1: expected an entry of a privacy ledger",
  "privacy --ledger=x --epsilon=3": "--delta alone, got --epsilon",
  "privacy": "expected --examples and --batch_size, or --ledger=FILE",
  f"{MSMARCO} --epsilon=8 --noise_multiplier=1": "one of epsilon and",
  MSMARCO: "expected one of epsilon and noise_multiplier, got",
  "privacy --examples=9 --batch_size=3 --steps=0 --epsilon=1 --unit=user"
  " --queries_per_user=1": "steps in",
  "privacy --examples=9 --batch_size=3 --epochs=1 --epsilon=1 --delta=2": "delta",
  "search boats --workdir=file": "file",
  "export --checkpoint=empty --to=x --format=t5x": "expected a T5 checkpoint",
  "export --checkpoint=no --to=x --format=t5x": "no: expected the folder of",
  # Files that are none.
  "run --gin_file=bytes --workdir=w": "bytes: ",
  "run --gin_file=loop.gin --workdir=w": "loop.gin",
  "run --gin_file=code.gin --workdir=w": "code.gin",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=jsonl:bytes": "another suffix: rename or convert it",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=jsonl:deep.jsonl": "deep.jsonl:1: expected one JSON",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=jsonl:keys.jsonl": "keys.jsonl:1: expected",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=jsonl:other.csv": "give --gin.QUERY_FIELD=search_term",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=jsonl:other.csv --dry_run": "got 2 others (search_term, body): give --gin.QUERY_FIELD=search_term --gin.DOCUMENT_FIELD=body",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=jsonl:other.csv --dry_run --gin.QUERY_FIELD=body": '"document"',
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=log:other.csv@other.csv --dry_run": "--gin.DOCUMENT_FIELD=body",
  f"{RUN} --gin.NUM_DOCUMENTS=None --gin.SOURCE=log:one.jsonl@keys.jsonl": 'expected a key "_id"',
  f"{RUN} --gin.CHECKPOINT=google/t5-v1_1-small": "run `hf download google/t5-v1_1-small --local-dir checkpoints/t5-v1_1-small`, then give --gin.CHECKPOINT=checkpoints/t5-v1_1-small",
  f"{RUN} --dry_run --gin.STATIC_DIM=0 --gin.ENCODER=sentence-transformers/all-MiniLM-L6-v2": "then give --gin.ENCODER=checkpoints/all-MiniLM-L6-v2",
  "export --checkpoint=google/t5-v1_1-small --to=x --format=t5x": "then give --checkpoint=checkpoints/t5-v1_1-small",
  "search boats --workdir=runs/demoo": "runs/demoo: ",
  "means runs/demo runs/dem0": "runs/demo: expected",
  f"{RUN} --gin.CHECKPOINT=pickled": "config.json: expected a T5 shape",
  # Places, processes, the environment.
  "run --gin_file=demo_tiny.gin --workdir=no://b/x": "no://b/x: Protocol not known",
  f"{RUN} --gin.SOURCE=beir:no://b/x": "no://b/x: Protocol not known",
  "study --gin_file=images.gin --workdir=gs://b/x": "study works in a folder",
  "audit --gin_file=demo_tiny.gin --workdir=gs://b/x --mirror=s3://b": "--mirror=s3://b: expected a path",
  "corpus_overlap --corpus=a --workdir=gs://b/x": "--workdir=gs://b/x: expected a path",
  "run --gin_file=gs://b/x.gin --workdir=w": "--gin_file[0]=gs://b/x.gin: expected",
  "search boats --workdir=no://b/x": "no://b/x: Protocol not known",
  "export --checkpoint=no://b/x --to=x --format=t5x": "no://b/x: Protocol not known",
  "export --checkpoint=empty --to=gs://b/x --format=t5x": "--to=gs://b/x: expected",
  "run --gin_file=demo_tiny.gin --workdir=file": "file",
  f"{RUN} --distributed=local": "needs --coordinator_address",
  f"{RUN} --distributed=tpu --process_id=1": "takes no --process_id",
  f"{RUN} --cpu_devices=0": "expected --cpu_devices of 1 or more",
  f"{RUN} --distributed=slurm": "in the environment, got none",
  f"SYNTHQ_DISTRIBUTED=clou {RUN}": "clou",
  f"SYNTHQ_DISTRIBUTED=local SYNTHQ_NUM_PROCESSES=two {RUN}": "got 'two'",
}
"""A command, with variables of the environment before it, and its one line."""

FILES = {
  "file": b"",
  "bytes": b"\xff\x00\x80 {[(",
  "deep.jsonl": b"[" * 100_000,
  "keys.jsonl": b'{"a": 1}\n',
  "one.jsonl": b'{"query": "a", "document": "b"}\n',
  "other.csv": b"search_term;body\na;b\n",
  "loop.gin": b"include 'loop.gin'\n",
  "code.gin": b"import no_such_module_of_anybody\n",
  "empty/.keep": b"",
  "pickled/pytorch_model.bin": b"cos\nsystem\n(S'touch ran'\ntR.",
  "pickled/config.json": b'{"model_type": "t5", "d_model": 8}',
}
"""What lies in the folder where the commands run."""


@pytest.mark.parametrize("command", WRONG_USES)
def test_a_wrong_use_ends_in_one_line_that_helps(
  capsys, command, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  for name, content in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
  argv = shlex.split(command)
  while argv and (setting := re.fullmatch(r"([A-Z_]+)=(.*)", argv[0])):
    monkeypatch.setenv(*setting.groups())
    del argv[0]
  assert WRONG_USES[command] in fails(capsys, *argv)
  assert not (tmp_path / "ran").exists()  # nothing that was read ran
  assert not list(tmp_path.rglob("result.json"))
  assert not list(tmp_path.rglob("ledger.jsonl"))


def test_an_error_in_a_file_names_file_and_line(tmp_path, capsys):
  bad = tmp_path / "bad.gin"
  bad.write_text("include 'gin_configs/recipes/demo.gin'\nplan.Rows.bm52 = 1\n")
  line = fails(capsys, "run", f"--gin_file={bad}", f"--workdir={tmp_path}")
  assert f'In file "{bad}", line 2' in line


def test_errors_of_the_pipeline_end_politely(monkeypatch, tmp_path, capsys):
  def run(*args, **kwargs):
    raise ValueError("x.tsv:3: expected 2 columns\n  got 1")

  ours = {"__name__": "synthq_jax.data.files", "ValueError": ValueError}
  monkeypatch.setattr(plan, "run", types.FunctionType(run.__code__, ours))
  argv = ["run", DEMO, f"--workdir={tmp_path}"]
  assert fails(capsys, *argv) == "synthq: x.tsv:3: expected 2 columns got 1"
  with pytest.raises(ValueError, match="expected 2 columns"):
    main.main([*argv, "--debug"])


_WIDENING = """
import jax

def widen(x):
  return jax.numpy.broadcast_to(x, (3, 3))

def run(*_, **__):
  return {}(jax.numpy.zeros((2, 3)))
"""


@pytest.mark.parametrize("filtering", ["off", "auto"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_an_error_of_jax_keeps_its_traceback(
  monkeypatch, tmp_path, filtering, is_jitted
):
  """It ended with code 2 and one line, as if the user had to mend something."""
  ours = {"__name__": "synthq_jax.training.dp_step"}
  exec(_WIDENING.format("jax.jit(widen)" if is_jitted else "widen"), ours)
  monkeypatch.setattr(plan, "run", ours["run"])
  before = jax.config.jax_traceback_filtering
  jax.config.update("jax_traceback_filtering", filtering)
  try:
    with pytest.raises(ValueError, match="roadcast"):
      main.main(["run", DEMO, f"--workdir={tmp_path}"])
  finally:
    jax.config.update("jax_traceback_filtering", before)


def test_a_number_that_python_refuses_is_a_defect(monkeypatch, tmp_path):
  monkeypatch.setattr(plan, "run", lambda *_, **__: int("x"))
  with pytest.raises(ValueError, match="invalid literal"):
    main.main(["run", DEMO, f"--workdir={tmp_path}"])


def test_the_calculator_agrees_with_the_recorded_noise(capsys):
  assert main.main([*MSMARCO.split(), "--epsilon=8"]) == 0
  printed = capsys.readouterr().out
  values = re.findall(r"noise multiplier ([\d.]+)", printed)
  poisson, plain = map(float, values)
  assert poisson == pytest.approx(0.554, abs=0.0015)
  assert plain == pytest.approx(3.58, abs=0.006)
  assert "15600 steps, delta 9.39e-07" in printed
  printed, _, meaning = printed.partition("\n\n")
  assert "odds that it is in the log change" in meaning.replace("\n", " ")
  assert "about 2,981 for epsilon 8" in meaning.replace("\n", " ")
  table = [line.split() for line in printed.splitlines()[-5:]]
  sizes, steps, noises, signals = zip(*(row[:4] for row in table), strict=True)
  assert sizes == ("256", "512", "1024", "2048", "4096")
  assert steps == ("62400", "31200", "15600", "7800", "3900")
  noises, signals = ([float(x) for x in row] for row in (noises, signals))
  assert noises[2] == poisson and noises == sorted(noises)
  assert signals[2] == pytest.approx(poisson / 1024, rel=5e-3)
  assert signals == sorted(signals, reverse=True)


def test_the_calculator_says_what_the_epsilon_of_a_user_means(capsys):
  user = ["--unit=user", "--queries_per_user=2"]
  text = output(capsys, *MSMARCO.split(), "--epsilon=3", *user)
  meaning = " ".join(text.rpartition("\n\n")[2].split())
  assert "tells about the queries of one user" in meaning
  assert "e^epsilon: about 20.1 for epsilon 3" in meaning


def test_the_calculator_runs_backwards(capsys):
  assert main.main([*MSMARCO.split(), "--noise_multiplier=0.730"]) == 0
  values = re.findall(r"epsilon ([\d.]+)", capsys.readouterr().out)
  assert float(values[0]) == pytest.approx(3.0, abs=0.015)


@pytest.mark.parametrize(
  "number, code", [(errno.ESTALE, 75), (errno.EPIPE, 75), (errno.ENOSPC, 2)]
)
def test_a_failure_that_may_pass_has_a_code_of_its_own(
  number, code, monkeypatch, capsys
):
  def fail(argv):
    raise OSError(number, os.strerror(number), "somewhere")

  monkeypatch.setattr(main, "_dispatch", fail)
  assert main.main(["report"]) == code
  said = capsys.readouterr().err
  assert said.startswith("synthq: somewhere: ") and said.count("\n") == 1


def output(capsys, *argv: str) -> str:
  """What a command prints that must not fail."""
  capsys.readouterr()
  assert main.main(argv) == 0
  return capsys.readouterr().out


def test_a_process_that_is_told_to_stop_first_joins_the_others(
  ran, monkeypatch, tmp_path, capsys
):
  """They would wait for it."""
  joined = []

  def start(settings):
    os.kill(os.getpid(), signal.SIGTERM)
    joined.append(settings)

  monkeypatch.setattr(distributed, "start", start)
  assert main.main(["run", DEMO, f"--workdir={tmp_path}"]) == 143
  assert joined and not ran
  assert "told to stop" in capsys.readouterr().err


def test_recipes_are_listed_in_a_line_each(capsys):
  lines = output(capsys, "recipes").splitlines()
  known = {
    f"{folder}/{path.name}"
    for folder in ("recipes", "studies")
    for path in (ROOT / "gin_configs" / folder).glob("*.gin")
  }
  words = {line.split()[0]: line for line in lines if ".gin" in line}
  assert set(words) == known and len(lines) == len(known) + 5
  assert all(len(line) <= 100 for line in lines)
  assert all(len(line.split()) > 5 for line in words.values())
  needy = lines.index("need data or a checkpoint:")
  assert lines.index(words["recipes/paper_t5_small.gin"]) > needy
  assert lines.index(words["recipes/demo.gin"]) < needy


@pytest.mark.parametrize("folder", ["recipes", "studies"])
def test_a_recipe_says_what_it_needs(capsys, folder):
  for path in (ROOT / "gin_configs" / folder).glob("*.gin"):
    entry = output(capsys, "recipes", path.stem)
    assert "Required: " in entry and len(entry) > 60, path
  entry = output(capsys, "recipes", "paper_t5_small.gin")
  assert "SOURCE, the data" in entry and "Hours: " in entry


def test_settings_fold_to_the_terminal(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "60")
  text = output(capsys, "settings", "demo_tiny.gin")
  lines = text.splitlines()
  assert max(map(len, lines)) <= 60
  assert "--gin.BATCH_SIZE=16  (demo_tiny.gin:" in text
  at = next(i for i, x in enumerate(lines) if x.startswith("--gin.BATCH_SIZE="))
  assert lines[at + 1].startswith("    Expected records of a batch")
  monkeypatch.delenv("COLUMNS")
  plain = output(capsys, "settings", "demo_tiny.gin").splitlines()
  names = {line.split()[0] for line in plain[2:]}
  folded = {line.partition("=")[0] for line in lines if line[0] == "-"}
  assert folded == names


def test_who_reads_one_line_alone_gets_no_error(tmp_path):
  """As `| head -1`: the reader is gone before all is written."""
  for_reading, for_writing = os.pipe()
  os.close(for_reading)
  with open(for_writing, "wb") as closed:
    done = subprocess.run(
      [sys.executable, "-m", "synthq_jax", "recipes"],
      stdout=closed,
      stderr=subprocess.PIPE,
      cwd=tmp_path,
      env=os.environ | {"PYTHONPATH": str(ROOT)},
      check=False,
    )
  assert done.returncode == 0 and b"roken" not in done.stderr, done.stderr


def test_settings_say_value_place_and_meaning(capsys):
  lines = output(capsys, "settings", "demo_tiny.gin").splitlines()
  rows = [re.split(r"  +", line, maxsplit=3) for line in lines[2:]]
  by_name = {row[0]: row[1:] for row in rows}
  value, place, meaning = by_name["--gin.BATCH_SIZE"]
  assert value == "16" and re.fullmatch(r"demo_tiny\.gin:\d+", place)
  assert meaning.startswith("Expected records of a batch")  # of what it sets
  assert by_name["--gin.finetune_dp.Config.batch_size"][0] == "16"
  assert by_name["--gin.DELTA"][2] == "None: 1 / (2n)"
  value, place, meaning = by_name["--gin.generate.Config.p"]
  assert place == "default" and meaning
  for name in ("--gin.plan.Rows.compared", "--gin.loop.Settings.save_seconds"):
    assert any(name.startswith(one[: len(name)]) for one in by_name), name
  few = output(capsys, "settings", "--name=generate.Config.").splitlines()
  assert all("generate.Config." in line for line in few[2:])
  assert {"default"} == {re.split(r"  +", line)[2] for line in few[2:]}


def test_a_macro_has_the_meaning_of_the_line_that_counts(tmp_path, capsys):
  above, below = tmp_path / "above.gin", tmp_path / "below.gin"
  above.write_text("PART = 'all'  # all of it\n")
  below.write_text("PART = 'some'  # some of it\n")
  [line] = guide.settings(None, [[above], [below]]).splitlines()[2:]
  assert "below.gin:1" in line and line.endswith("some of it")
  text = output(capsys, "settings", "encoder_queries.gin", "--name=TRAINED")
  assert "lora.gin" in text and "the whole model" not in text


def test_a_dry_run_makes_nothing_and_says_what_it_would_cost(tmp_path, capsys):
  place = tmp_path / "run"
  flags = ["--gin.EPSILON=3"]
  text = output(capsys, "run", DEMO, f"--workdir={place}", "--dry_run", *flags)
  assert not place.exists()
  assert "prepare_data: to make: prepare_data" in text
  assert "\nunit of privacy: one query\nfinetune_dp/eps3: epsilon 3" in text
  assert "epsilon of synthetic_eps3: 3, released" in text
  assert "direct_dp_eps3: 3, only compared" in text
  assert "adapter_eps3: 3, only compared" in text
  assert "BM25's scores: 0.5 for each of 2 rows, released" in text
  assert "releases, together: at most 4.5, " in text
  assert "at the sum of their deltas" in text
  assert "Hardware and time: 2 cores" in text


def test_a_dry_run_names_the_settings_that_made_what_is_there(tmp_path, capsys):
  others = ["TEST_SPLIT='dev+test'", "SECRET_SEED=0", "SEED=0"]
  recipe = DEMO.partition("=")[2]
  text = main.configure(plan.RunConfig, [recipe], others)[1]
  (tmp_path / "config.gin").write_text(main._SECRET.sub(main._HIDDEN, text))
  command = ["run", DEMO, f"--workdir={tmp_path}", "--dry_run"]
  line = "prepare_data: to make: prepare_data"
  assert f"{line}\n" in output(capsys, *command)
  (tmp_path / "prepare_data").mkdir()
  (tmp_path / "prepare_data/result.json").write_text('{"result": {}}')
  why = " (made with other settings: SECRET_SEED, TEST_SPLIT)"
  assert f"{line}{why}\n" in output(capsys, *command)
  # A model that changed in its folder: the line sent its reader to config.gin.
  text = main.configure(plan.RunConfig, [recipe], [])[1]
  (tmp_path / "config.gin").write_text(text)
  assert f"{line} (made with other settings: none in" in output(
    capsys, *command
  )


@pytest.mark.parametrize("stage", ["generate", "report"])
def test_a_dry_run_of_a_stage_prices_what_it_needs(tmp_path, capsys, stage):
  flags = ["--gin.plan.Canaries.number=64"]
  place = f"--workdir={tmp_path / 'run'}"
  text = output(capsys, stage, DEMO, place, "--dry_run", *flags)
  assert "epsilon of synthetic_eps8: 8, released" in text
  # The weights of two rows; then scores.
  total = {"report": "9.5"}.get(stage, "8")
  assert f"releases, together: at most {total}, " in text


@pytest.mark.parametrize(
  ("rows", "words"),
  [
    ("('public_only', 'synthetic')", "0.5 for each of 2 rows, released"),
    ("('public_only',)", "0.5 for one row, released"),
    ("('adapter',)", None),  # only compared
  ],
)
def test_a_dry_run_prices_released_weights_alone(tmp_path, capsys, rows, words):
  place = f"--workdir={tmp_path / 'run'}"
  text = output(capsys, "run", DEMO, place, "--dry_run", f"--gin.LTR={rows}")
  lines = [x for x in text.splitlines() if "weights of BM25's scores" in x]
  assert [x.partition("scores: ")[2] for x in lines] == (
    [words] if words else []
  )


def test_a_dry_run_for_users_wants_their_column(tmp_path, capsys):
  log, corpus = tmp_path / "log.csv", tmp_path / "corpus.jsonl"
  corpus.write_text('{"_id": "d1", "text": "boats"}\n')
  place = f"--workdir={tmp_path / 'run'}"
  argv = ["run", DEMO, place, "--dry_run", f"--gin.SOURCE=log:{log}@{corpus}"]
  argv += ["--gin.BATCH_SIZE=2", "--gin.DIRECT_BATCH_SIZE=2"]
  argv.append("--gin.RETRIEVER_BATCH_SIZE=2")
  log.write_text("query,document\nboats,d1\n")
  assert "one query" in output(capsys, *argv)
  line = fails(capsys, *argv, "--gin.UNIT=user")
  assert "expected the user of each query" in line and "boats" not in line
  log.write_text("query,document,user\nboats,d1,u1\n")
  assert "finetune_dp" in output(capsys, *argv, "--gin.UNIT=user")


def test_a_dry_run_finds_what_is_there(finished_run):
  config, root = finished_run.config, finished_run.root
  text = guide.dry_run(config, root, plan.STAGES, ())
  assert "to make" not in text and "then:" not in text
  assert "generate: there: public_only, eps8" in text
  assert "started here before: 14 private trainings" in text
  rows = dataclasses.replace(config.rows, synthetic=(8.0, 2.0))
  changed = dataclasses.replace(config, rows=rows)
  text = guide.dry_run(changed, root, plan.STAGES, ())
  assert "finetune_dp: there: eps8; to make: eps2" in text
  assert "then:\ngenerate: public_only, eps8, eps2\nfilter_queries:" in text
  assert "direct_dp_group_eps8: 8, only compared" in text
