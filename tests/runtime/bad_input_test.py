"""Bad input from the command line: one line that helps, nothing half done."""

import errno
import os
import pathlib
import re
import shutil

import finished_runs
import pytest
import small_data

from synthq_jax.cli import main
from synthq_jax.data import shipped, sources
from synthq_jax.privacy import ledger
from synthq_jax.runtime import queries as queries_lib
from synthq_jax.runtime import workspace
from synthq_jax.stages import plan
from synthq_jax.storage import artifacts, stores
from synthq_jax.training import pairs

TINY = "--gin_file=recipes/demo_tiny.gin"
TRAIN = 30


@pytest.fixture(name="folder")
def _folder(tmp_path):
  """A sound BEIR folder of 40 pairs."""
  small_data.write_split_beir(tmp_path / "data", train=TRAIN, test=40 - TRAIN)
  return tmp_path / "data"


@pytest.fixture(name="sound", scope="module")
def _sound(tmp_path_factory):
  """Where the same data lies, and a run that has prepared it: to be copied."""
  place = tmp_path_factory.mktemp("sound")
  small_data.write_split_beir(place / "data", train=TRAIN, test=40 - TRAIN)
  assert main.main(command(place / "data", place / "run")) == 0
  return place


@pytest.fixture(name="run")
def _run(sound, tmp_path):
  """A working directory in which the data is prepared."""
  return shutil.copytree(sound / "run", tmp_path / "run")


def command(folder, workdir, *flags, stage="prepare_data"):
  flags = ["--gin.NUM_DOCUMENTS=8", *flags]
  source = f"--gin.SOURCE=beir:{folder}"
  return [stage, TINY, source, f"--workdir={workdir}", "--quiet", *flags]


def refused(capsys, argv, code=2):
  """Runs a command that must fail; returns its only line, but for notes."""
  capsys.readouterr()
  assert main.main(argv) == code
  lines = capsys.readouterr().err.splitlines()
  lines = [line for line in lines if not line.startswith("synthq: note: ")]
  assert len(lines) == 1, lines
  assert lines[0].startswith("synthq: ")
  return lines[0]


def finished(workdir):
  """Names the folders of a working directory that look finished."""
  found = pathlib.Path(workdir).rglob(artifacts.RESULT_NAME)
  return sorted(p.parent.relative_to(workdir).as_posix() for p in found)


def change(path, line, text):
  """Puts another text into a line, counted from 1."""
  lines = path.read_bytes().splitlines(keepends=True)
  lines[line - 1] = text if isinstance(text, bytes) else f"{text}\n".encode()
  path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_without_pairs_is_refused(folder, tmp_path, capsys, split):
  path = folder / "qrels" / f"{split}.tsv"
  path.write_text(path.read_text().replace("\t1\n", "\t0\n"))
  message = refused(capsys, command(folder, tmp_path / "run"))
  assert f"expected relevant pairs in split '{split}', got none" in message
  assert "add their judgements" in message
  path.unlink()
  message = refused(capsys, command(folder, tmp_path / "run", "--strict"))
  assert re.search(f"(in|got) split[ =]'{split}'", message)
  assert finished(tmp_path) == []


@pytest.mark.parametrize(
  ("split", "words"),
  [
    ("test+dev", "TEST_SPLIT=test+dev: expected a split of ['test', 'train']"),
    ("test+train", "must leave out 'train', on which every model"),
  ],
)
def test_a_test_split_that_cannot_be_is_named_with_its_setting(
  folder, tmp_path, capsys, split, words
):
  argv = command(folder, tmp_path / "run", f"--gin.TEST_SPLIT={split}")
  message = refused(capsys, argv)
  assert words in message and "TEST_SPLIT" in message
  assert finished(tmp_path) == []


def test_a_query_of_two_splits_is_named_with_the_setting(
  folder, tmp_path, capsys
):
  change(folder / "qrels/test.tsv", 2, "q0\td0\t1")
  message = refused(capsys, command(folder, tmp_path / "run"))
  assert "some queries are judged in train and in test" in message
  assert "or name another TEST_SPLIT" in message


def test_a_wrong_type_in_a_file_is_named_with_its_line(tmp_path, capsys):
  own = tmp_path / "own.gin"
  text = "include 'gin_configs/recipes/demo_tiny.gin'\n\nBATCH_SIZE = 2.5\n"
  own.write_text(text)
  argv = ["run", f"--gin_file={own}", f"--workdir={tmp_path / 'run'}"]
  message = refused(capsys, argv)
  assert f"{own}:3: finetune_dp.Config.batch_size: expected int, got 2.5" in (
    message
  )
  own.write_text(text.replace("BATCH_SIZE =", "evaluate.Config.depth ="))
  assert f"{own}:3: " in refused(capsys, argv)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (
      f"--gin.DELTA={1 / TRAIN}",
      "finetune_dp.Config.delta must be above 0 and",
    ),
    ("--gin.DELTA=0.4", "below 1/n = 0.0333"),
    ("--gin.BATCH_SIZE=31", f"must be at most {TRAIN}, the number of private"),
    (
      "--gin.direct_dp.Config.batch_size=31 --gin.RETRIEVER_BATCH_SIZE=8",
      "direct_dp.Config.batch_size must be at most",
    ),
    (
      "--gin.RETRIEVER_BATCH_SIZE=31 --gin.NUM_DOCUMENTS=None",
      f"must be at most {TRAIN - 3}, as there are no more real queries",  # a tenth waits
    ),
    (
      "--gin.RETRIEVER_BATCH_SIZE=9 --gin.NUM_DOCUMENTS=8",
      "must be at most 8, as there are no more synthetic queries",
    ),
    # One line more than there are documents: a blank one, say.
    ("--gin.NUM_DOCUMENTS=41", "40, the size of the collection, got 41: set a"),
  ],
)
def test_what_the_data_rules_out_is_refused_before_any_training(
  folder, run, capsys, flags, words
):
  flags = ["--gin.direct_dp.Config.batch_size=8", *flags.split()]
  argv = command(folder, run, *flags, stage="encode_documents")
  assert words in refused(capsys, argv)
  assert finished(run) == ["private/prepare_data"]
  assert not (run / "private/ledger.jsonl").exists()


@pytest.mark.parametrize("flag", ["--dry_run", "--quiet"])
@pytest.mark.parametrize("kind", ["environment_docs", "beir"])
def test_more_documents_than_a_source_can_have_are_refused_before_it_is_read(
  kind, flag, folder, tmp_path, capsys, monkeypatch
):
  def read(source):
    raise AssertionError("was read")

  monkeypatch.setattr(sources.Source, "read", read)
  source = kind if kind == "environment_docs" else f"{kind}:{folder}"
  argv = [
    "run",
    TINY,
    f"--gin.SOURCE={source}",
    f"--workdir={tmp_path / 'run'}",
  ]
  message = refused(capsys, [*argv, flag, "--gin.NUM_DOCUMENTS=99999999"])
  assert f"got 99,999,999, which is more than {source} can have" in message
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ("SOURCE=msmarco:data UNIT=user", "source of UNIT='user' must be beir:DIR"),
    ("SOURCE=beir:half", "half: expected a file queries.jsonl"),
    ("SOURCE=log:no.csv@data/corpus.jsonl", "got no.csv: no such file"),
    ("SOURCE=log:data/corpus.jsonl@no.csv", "got no.csv: no such file"),
    ("SOURCE=tfds:fiqa@no", "no: expected a folder with SPLIT.tsv files"),
    ("CHECKPOINT=no", "got no file no/params.safetensors: check CHECKPOINT"),
    (
      "ENCODER=no STATIC_DIM=0",
      "ENCODER must be the folder of a model, got 'no'",
    ),
    ("ENCODER=no", "got 16 and no: set STATIC_DIM=0"),
    ("VOCABULARY=no", "got no file no: check CHECKPOINT and VOCABULARY"),
    ("VOCABULARY=data/corpus.jsonl", "expected a SentencePiece model"),
    ("TEST_SETS=('beir:no',)", "test_sets: expected a folder, got none: no"),
    ("TEST_SETS=('beir:half',)", "half: expected a file queries.jsonl"),
    ("TEST_SETS=('beer:gs://b/x',)", "RunConfig.test_sets must be beir:DIR"),
    ("MODEL=t5_1_1_base", "with vocab_size=32128, got vocab_size=8192"),
  ],
)
def test_a_dry_run_refuses_what_is_not_there(
  folder, tmp_path, capsys, monkeypatch, flags, words
):
  monkeypatch.chdir(tmp_path)
  shutil.copytree(folder, "half")
  pathlib.Path("half/queries.jsonl").unlink()
  flags = [f"--gin.{flag}" for flag in ("NUM_DOCUMENTS=None", *flags.split())]
  argv = ["run", TINY, "--workdir=run", "--dry_run", "--quiet"]
  assert words in refused(capsys, [*argv, *flags])
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
@pytest.mark.parametrize("name", ["CHECKPOINT", "ENCODER"])
def test_a_checkpoint_that_was_cut_is_refused_before_any_work(
  tmp_path, capsys, name, flags
):
  shutil.copytree(shipped.DIRECTORY, tmp_path / "t5")
  weights = tmp_path / "t5" / "params.safetensors"
  weights.write_bytes(weights.read_bytes()[:-1])
  argv = ["run", TINY, f"--workdir={tmp_path / 'run'}", "--quiet", *flags]
  argv += [f"--gin.{name}={tmp_path / 't5'}", "--gin.STATIC_DIM=0"]
  assert "expected safetensors, got a damaged" in refused(capsys, argv)
  assert not (tmp_path / "run").exists()


def test_a_dry_run_looks_at_no_url_and_reads_nothing(
  folder, tmp_path, capsys, monkeypatch
):
  def read(*_, **__):
    raise AssertionError("was read")

  monkeypatch.setattr(sources.Source, "read", read)
  monkeypatch.setattr(stores, "local", lambda place: place)
  other = small_data.write_split_beir(tmp_path / "other", train=3, test=3)
  flags = [
    f"--gin.SOURCE=beir:{folder}",
    f'--gin.TEST_SETS=("{other}", "beir:gs://b/fiqa")',
    "--gin.CHECKPOINT=gs://b/t5",
    "--gin.NUM_DOCUMENTS=None",
    "--gin.BATCH_SIZE=2",
    "--gin.DIRECT_BATCH_SIZE=2",
  ]
  argv = ["run", TINY, f"--workdir={tmp_path / 'run'}", "--dry_run", *flags]
  assert main.main(argv) == 0
  assert "prepare_data: to make" in capsys.readouterr().out


def test_a_bad_test_set_is_refused_before_any_training(
  folder, tmp_path, capsys
):
  finished_runs.write_test_set(tmp_path / "bad", first=0, split="dev")
  flags = (
    f'--gin.TEST_SETS=("beir:{tmp_path / "bad"}",)',
    "--gin.plan.Rows.synthetic=()",
    "--gin.plan.Rows.public_only=False",
    "--gin.plan.Rows.direct_dp=()",
  )
  argv = command(folder, tmp_path / "run", *flags, stage="run")
  message = refused(capsys, argv)
  words = f"{tmp_path / 'bad'}: expected a split of ['dev'], got split='test'"
  assert words in message
  assert "on which bad is scored: add its judgements, or leave" in message
  assert not (tmp_path / "run" / "train_retriever").exists()


def test_a_vocabulary_of_another_checkpoint_is_refused(
  folder, tmp_path, capsys
):
  flag = "--gin.prepare_data.Config.vocabulary=train"
  size = "--gin.prepare_data.Config.vocab_size=60"
  argv = command(folder, tmp_path / "run", flag, size, stage="finetune_dp")
  message = refused(capsys, argv)
  assert "belongs to vocabulary.model beside it" in message
  assert "leave prepare_data.vocabulary empty" in message


def test_a_working_directory_of_other_data_is_refused(
  sound, folder, run, capsys
):
  # The same data elsewhere is the same data.
  assert main.main(command(folder, run)) == 0
  change(folder / "corpus.jsonl", 1, '{"_id": "d0", "text": "another"}')
  kept = [run / "prepare_data/corpus.jsonl", run / "config.gin"]
  before = [path.read_bytes() for path in kept]
  message = refused(capsys, command(folder, run))
  was = f"beir:{sound / 'data'}"
  assert f"results of SOURCE={was}: give another --workdir" in message
  assert [path.read_bytes() for path in kept] == before
  assert finished(run) == ["private/prepare_data"]


def test_a_run_keeps_out_of_the_directories_of_studies_and_checkpoints(
  folder, tmp_path, capsys
):
  artifacts.save(tmp_path / "other", {"packages": []}, "digest")
  message = refused(capsys, command(folder, tmp_path / "other"))
  assert "a study, or a checkpoint: give another --workdir" in message
  assert not (tmp_path / "other/config.gin").exists()


def test_a_run_that_is_kept_out_changes_nothing(folder, run, capsys):
  path = run / "config.gin"
  before = path.read_bytes()
  with workspace.locked(run):
    flag = "--gin.DOCUMENT_LENGTH=9"
    message = refused(capsys, command(folder, run, flag))
  assert "wait for it, or give another --workdir" in message
  assert path.read_bytes() == before


def test_a_result_whose_training_the_ledger_has_lost_is_refused(
  finished_run, tmp_path
):
  root = finished_run.copy(tmp_path)
  path = root / "private" / ledger.NAME
  path.unlink()
  ledger.copy_of(path).unlink()
  with pytest.raises(ValueError, match="expected the training .*eps8.*restore"):
    plan.run(finished_run.config, root)
  assert not path.exists()


def test_damaged_files_say_what_to_delete(folder, run, capsys, monkeypatch):
  monkeypatch.setattr(pairs, "train", lambda recipe, params, *_, **__: params)
  doomed = run / "private/prepare_data"
  argv = command(
    folder,
    run,
    "--gin.plan.Rows.public_only=False",
    "--gin.plan.Rows.synthetic=()",
    "--gin.plan.Rows.direct_dp=()",
    stage="train_retriever",
  )
  damage = [
    ("prepare_data/documents/tokens.npy", None),
    ("prepare_data/documents/tokens.npy", "half"),
    ("prepare_data/documents/ids.txt", "half"),
    ("prepare_data/documents/manifest.json", "half"),
    ("private/prepare_data/train.npz", b"PK"),
    ("private/prepare_data/train.npz", None),
    ("private/prepare_data/files.json", None),
    ("prepare_data/corpus.jsonl", "changed"),
    ("prepare_data/vocabulary.model", "changed"),
  ]
  whole = {name: (run / name).read_bytes() for name, _ in damage}
  for name, content in damage:
    path, was = run / name, whole[name]
    if content is None:
      path.unlink()
    elif content == "changed":
      path.write_bytes(was[:-9] + bytes([was[-9] ^ 1]) + was[-8:])
    else:
      path.write_bytes(was[: len(was) // 2] if content == "half" else content)
    message = refused(capsys, argv)
    assert f"{path}: expected" in message
    assert f"delete {doomed}" in message
    path.write_bytes(was)
  for name in whole:
    (run / name).write_bytes(b"damaged")
  shutil.rmtree(doomed)  # the advice is followed
  assert main.main(argv) == 0
  assert {name: (run / name).read_bytes() for name in whole} == whole


def test_a_place_that_cannot_be_written_to_is_named(folder, tmp_path, capsys):
  (tmp_path / "file").write_text("")
  message = refused(capsys, command(folder, tmp_path / "file" / "run"))
  assert str(tmp_path / "file") in message
  assert "choose a folder that you may write to" in message


def test_a_disk_that_fills_up_while_writing_is_reported(
  folder, tmp_path, capsys, monkeypatch
):
  def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patched:
    patched.setattr(os, "fsync", full)
    message = refused(capsys, command(folder, tmp_path / "run"))
  assert re.search(r"run/.*: No space left on device; free some sp", message)
  assert finished(tmp_path / "run") == []
  assert main.main(command(folder, tmp_path / "run")) == 0


def test_ctrl_c_stops_in_one_line_and_the_same_command_goes_on(
  folder, tmp_path, capsys, monkeypatch
):
  flags = ("--gin.plan.Rows.synthetic=()",)
  argv = command(folder, tmp_path / "run", *flags, stage="generate")

  def interrupted(*args, **kwargs):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(queries_lib, "save", interrupted)
    message = refused(capsys, argv, code=130)
  assert message.endswith("the same command goes on with what is finished")
  assert finished(tmp_path / "run") == ["private/prepare_data"]
  assert list((tmp_path / "run/generate/public_only").glob("parts_*/0.npy"))
  assert main.main(argv) == 0
  assert "[prepare_data] finished earlier" in capsys.readouterr().out
  assert not list((tmp_path / "run/generate/public_only").glob("parts_*"))
