import dataclasses
import errno
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from synthq_jax.stages import filter_queries, finetune_dp, fuse
from synthq_jax.storage import array_files, artifacts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  mean: float
  count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  name: str
  score: Score
  scores: tuple[Score, ...]
  by_name: dict[str, Score]
  pairs: tuple[tuple[str, str], ...]
  epsilon: float | None
  delta: float | None
  maybe: Score | None
  flags: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
  entry: tuple[str, Score, float]
  entries: tuple[tuple[int, Score], ...]
  none: tuple[Score, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
  name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  threads: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  steps: int = 3
  batch: int = dataclasses.field(default=8, metadata={"speed_only": True})
  speed: Speed = dataclasses.field(
    default_factory=Speed, metadata={"speed_only": True}
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
  first: Config = dataclasses.field(default_factory=Config)
  more: tuple[Config, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin:
  steps: int = 3


RESULT = Result(
  name="synthetic – ε 8",
  score=Score(mean=0.1 + 0.2, count=3),
  scores=(Score(mean=1.0, count=1), Score(mean=-0.0, count=2)),
  by_name={"nDCG@10": Score(mean=1e-300, count=4)},
  pairs=(("q", "d"), ("q\n2", 'd"2')),
  epsilon=math.inf,
  delta=None,
  maybe=Score(mean=-math.inf, count=0),
  flags=(True, False),
)


def test_a_result_comes_back_as_it_was(tmp_path):
  artifacts.save(tmp_path, RESULT, "abc")
  loaded = artifacts.load(tmp_path, Result)
  assert loaded == RESULT
  assert isinstance(loaded.scores[1], Score)
  assert math.copysign(1, loaded.scores[1].mean) == -1


def test_a_missing_optional_part_and_no_number_come_back(tmp_path):
  nothing = dataclasses.replace(RESULT, maybe=None, epsilon=math.nan, pairs=())
  artifacts.save(tmp_path, nothing, "abc")
  loaded = artifacts.load(tmp_path, Result)
  assert loaded.maybe is None and loaded.delta is None and loaded.pairs == ()
  assert math.isnan(loaded.epsilon)


def test_the_file_is_json_that_any_reader_takes(tmp_path):
  artifacts.save(tmp_path, RESULT, "abc")
  text = (tmp_path / artifacts.RESULT_NAME).read_text()

  def refuse(constant):
    raise ValueError(constant)  # NaN and Infinity are no JSON

  content = json.loads(text, parse_constant=refuse)
  assert content["fingerprint"] == "abc"
  assert content["result"]["epsilon"] == "inf"
  assert content["result"]["by_name"]["nDCG@10"]["_type"] == "Score"


def test_arrays_of_no_dimension_and_paths_become_plain_values():
  value = {"a": np.float32(0.5), 3: (np.array(7), pathlib.Path("x") / "y")}
  assert artifacts.to_json(value) == {"a": 0.5, "3": [7, "x/y"]}
  assert artifacts.to_json(np.float32(np.inf)) == "inf"


@pytest.mark.parametrize("value", [np.ones(3), {1, 2}, b"bytes", Score])
def test_what_has_no_json_form_is_refused(value):
  with pytest.raises(ValueError, match="plain values"):
    artifacts.to_json({"deep": [value]})


def test_equal_configurations_have_equal_fingerprints():
  assert artifacts.fingerprint(Outer(), "a") == artifacts.fingerprint(
    Outer(), "a"
  )
  first = artifacts.fingerprint({"b": 1, "a": 2})
  assert first == artifacts.fingerprint({"a": 2, "b": 1})


def test_what_changes_the_result_changes_the_fingerprint():
  parts = [
    (Outer(),),
    (Outer(first=Config(steps=4)),),
    (Outer(more=(Config(),)),),
    (Outer(more=(Config(steps=4),)),),
    (Outer(), "earlier"),
    ("earlier", Outer()),
    (Config(),),
    (Twin(),),
    ({"steps": 3},),
    (),
  ]
  assert len({artifacts.fingerprint(*p) for p in parts}) == len(parts)


def test_what_changes_speed_only_does_not_count():
  slow = Config()
  fast = Config(batch=64, speed=Speed(threads=8))
  assert artifacts.fingerprint(slow) == artifacts.fingerprint(fast)
  nested = [Outer(first=c, more=(c, c)) for c in (slow, fast)]
  assert artifacts.fingerprint(nested[0]) == artifacts.fingerprint(nested[1])
  assert artifacts.fingerprint(Speed()) != artifacts.fingerprint(
    Speed(threads=8)
  )


def test_results_stay_finished_when_a_setting_goes():
  before, after, other = (
    dataclasses.make_dataclass("Recipe", fields, namespace=namespace)()
    for fields, namespace in (
      ([("steps", int, 3), ("old", int, 1)], {}),
      ([("steps", int, 3)], {"GONE": {"old": 1}}),
      ([("steps", int, 3)], {"GONE": {"old": 2}}),
    )
  )
  assert artifacts.fingerprint(after) == artifacts.fingerprint(before)
  assert artifacts.fingerprint(other) != artifacts.fingerprint(before)


@pytest.mark.parametrize(
  ("config", "digest"),
  [
    (finetune_dp.Config(), "268974f0b9f27307"),
    (fuse.Config(), "b49cc43e52d1b7f3"),
    (filter_queries.Config(top_k=3), "ddfb385f518aa5c2"),
  ],
)
def test_settings_that_lost_a_field_keep_their_digest(config, digest):
  """As commit b02ffe1b made them: private trainings stay finished."""
  assert artifacts.fingerprint(config) == digest


def test_a_directory_without_result_is_unfinished(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("{}\n")
  assert artifacts.read_fingerprint(tmp_path) is None
  assert artifacts.read_fingerprint(tmp_path / "nowhere") is None
  with pytest.raises(ValueError, match="expected a finished Result, got no"):
    artifacts.load(tmp_path, Result)
  artifacts.save(tmp_path, RESULT, "0123")
  assert artifacts.read_fingerprint(tmp_path) == "0123"


def test_a_result_of_another_kind_is_refused(tmp_path):
  artifacts.save(tmp_path, Other(name="x"), "abc")
  with pytest.raises(ValueError, match="expected a Result, got a Other"):
    artifacts.load(tmp_path, Result)


def test_a_digit_that_changed_in_a_result_is_found(tmp_path):
  artifacts.save(tmp_path, RESULT, "abc")
  path = tmp_path / artifacts.RESULT_NAME
  path.write_text(path.read_text().replace('"count": 4', '"count": 5'))
  with pytest.raises(ValueError, match=f"another checksum.*delete {tmp_path}"):
    artifacts.load(tmp_path, Result)


def saved(root):
  """A public result with files, and a part of it that is private."""
  public, private = root / "made", root / "private" / "made"
  for name in ("a.txt", "b/c.npy", "state_0123456789abcdef/x", ".b.partial"):
    artifacts.write_atomically(public / name, name)
  artifacts.write_atomically(public / "inner" / artifacts.RESULT_NAME, "{}")
  artifacts.write_atomically(private / "metrics.jsonl", "{}")
  artifacts.save(public, RESULT, "abc", folders=(public, private))
  return public, private


def test_a_result_lists_its_files_each_folder_its_own(tmp_path):
  public, private = saved(tmp_path)
  listed = artifacts.read_json(public / artifacts.FILES_NAME)["files"]
  assert list(listed) == ["a.txt", "b/c.npy"]
  assert listed["a.txt"][0] == 5 and len(listed["a.txt"][1]) == 64
  assert "metrics" not in (public / artifacts.FILES_NAME).read_text()
  assert list(artifacts.read_json(private / artifacts.FILES_NAME)["files"]) == [
    "metrics.jsonl"
  ]
  artifacts.check(public)
  shutil.rmtree(public / "state_0123456789abcdef")
  artifacts.check(public)  # which was no part of it


@pytest.mark.parametrize(
  ("name", "how"),
  [
    ("made/a.txt", "removed"),
    ("made/b/c.npy", "cut"),
    ("private/made/metrics.jsonl", "changed"),
    ("made/a.txt", "manifest"),
    ("private/made/metrics.jsonl", "manifest"),
  ],
)
def test_a_file_that_was_damaged_is_named_with_what_to_delete(
  tmp_path, name, how
):
  public, private = saved(tmp_path)
  path = tmp_path / name
  if how == "removed":
    path.unlink()
  elif how == "cut":
    path.write_bytes(path.read_bytes()[:-1])
  elif how == "changed":
    path.write_bytes(b"x" + path.read_bytes()[1:])
  else:
    path = (private if "private" in name else public) / artifacts.FILES_NAME
    path.unlink()
  words = f"{path}: expected.*delete {public}, and it is made again"
  with pytest.raises(ValueError, match=words):
    artifacts.check(public)
  if "private" in name:  # the public folder alone was handed on
    artifacts.check(public, everywhere=False)


def test_a_result_of_an_older_version_lists_nothing_and_passes(tmp_path):
  artifacts.save(tmp_path, RESULT, "abc")
  (tmp_path / "params.safetensors").write_bytes(b"x")
  artifacts.check(tmp_path)


def test_a_field_of_a_newer_version_is_passed_over(tmp_path):
  artifacts.save(tmp_path, Other(name="x"), "abc")
  path = tmp_path / artifacts.RESULT_NAME
  content = json.loads(path.read_text())
  content["result"]["later"] = 1
  del content["checksum"]
  path.write_text(json.dumps(content))
  assert artifacts.load(tmp_path, Other) == Other(name="x")


def test_a_write_that_dies_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "c.txt"
  artifacts.write_atomically(path, "old")

  def die(descriptor):
    del descriptor
    raise OSError("disk full")

  with monkeypatch.context() as patch:
    patch.setattr(os, "fsync", die)
    with pytest.raises(OSError, match="disk full"):
      artifacts.write_atomically(path, "new and longer")
  assert path.read_text() == "old"
  artifacts.write_atomically(path, "new")
  assert path.read_text() == "new"
  assert [p.name for p in tmp_path.iterdir()] == ["c.txt"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_no_part_of_it(kind, tmp_path):
  with pytest.raises(kind, match="line 7"):  # noqa: SIM117
    with artifacts.replacing(tmp_path / "private.jsonl") as stream:
      stream.write(b"what somebody asked")
      raise kind("line 7")
  assert not list(tmp_path.iterdir())


def test_a_file_and_its_name_are_on_disk_before_the_next_is_written(
  tmp_path, monkeypatch
):
  synced = []
  fsync = os.fsync

  def noted(descriptor):
    synced.append(os.fstat(descriptor).st_ino)
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", noted)
  path = tmp_path / "folder" / "file"
  artifacts.write_atomically(path, "content")
  assert synced == [path.stat().st_ino, path.parent.stat().st_ino]


def test_a_new_folder_takes_no_place_that_is_taken(tmp_path, monkeypatch):
  (tmp_path / "empty").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "empty")
  (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
  monkeypatch.chdir(tmp_path)
  for taken in ("link", "dangling", "."):
    with (
      pytest.raises(ValueError, match="one that is taken"),
      artifacts.new_folder(taken, "export"),
    ):
      pass
  assert {p.name for p in tmp_path.iterdir()} == {"empty", "link", "dangling"}


def test_a_new_folder_is_locked_until_it_is_there(tmp_path, monkeypatch):
  path, replace = tmp_path / "made", os.replace

  def meanwhile(hidden, to):
    with (
      pytest.raises(ValueError, match="nobody else to write"),
      artifacts.new_folder(path, "export"),
    ):
      pass
    replace(hidden, to)

  with artifacts.new_folder(path, "export") as folder:
    (folder / "model").write_text("whole")
    monkeypatch.setattr(os, "replace", meanwhile)
  assert [p.name for p in path.iterdir()] == ["model"]


def test_an_array_is_whole_or_not_there(tmp_path):
  path, rows = tmp_path / "folder" / "rows.npy", np.arange(6.0).reshape(3, 2)
  with pytest.raises(FileNotFoundError):
    array_files.read(path)
  array_files.save(path, rows)
  np.testing.assert_array_equal(array_files.read(path), rows)
  assert isinstance(array_files.read(path, mapped=True), np.memmap)
  for kept in (0, 50, len(path.read_bytes()) - 1):
    path.write_bytes(path.read_bytes()[:kept])
    for mapped in (False, True):
      with pytest.raises(ValueError, match="rows.npy: expected arrays"):
        array_files.read(path, mapped=mapped)
    array_files.save(path, rows)


_FULL_DISK = """
import pathlib, resource, signal, sys
import numpy as np
from synthq_jax.storage import array_files

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rows = np.arange(25_000, dtype=np.float32)
files = {
  "rows.npy": lambda path: array_files.save(path, rows),
  "rows.npz": lambda path: array_files.save_npz(path, {"a": rows, "b": rows}),
  "columns.npy": lambda path: array_files.save(
    path, np.asfortranarray(rows.reshape(500, 50))
  ),
}
for limit in map(int, sys.argv[2:]):
  folder = pathlib.Path(sys.argv[1]) / str(limit)
  folder.mkdir()
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
  for name, write in files.items():
    try:
      write(folder / name)
    except OSError as error:
      said = f"{error.errno} {error.filename}"
    else:
      said = f"written {(folder / name).stat().st_size}"
    print(f"{limit} {name} {said}")
"""


def _written(folder, *limits):
  """What is said of each file where no more than so many bytes fit in one."""
  done = subprocess.run(
    [sys.executable, "-c", _FULL_DISK, str(folder), *map(str, limits)],
    capture_output=True,
    text=True,
    check=True,
  )
  said = {limit: {} for limit in limits}
  for line in done.stdout.splitlines():
    limit, name, words = line.split(" ", 2)
    said[int(limit)][name] = words
  return said


def test_an_array_that_is_cut_anywhere_is_an_error_with_its_number(tmp_path):
  whole = _written(tmp_path, 10**7)[10**7]
  sizes = {name: int(said.split()[1]) for name, said in whole.items()}
  assert len(sizes) == 3 and max(sizes.values()) > 200_000
  # Of a last block of 4,096 bytes C reports nothing before the file is closed.
  ends = {size - less for size in sizes.values() for less in (1, 300)}
  for cut, said in _written(tmp_path, *{0, 100, 12_468} | ends).items():
    folder = tmp_path / str(cut)
    for name, size in sizes.items():
      if cut >= size:
        assert said[name] == f"written {size}"
        continue
      assert said[name] == f"{errno.EFBIG} {folder / name}", cut
      assert not (folder / name).exists()


def test_a_tuple_of_several_types_comes_back():
  score = Score(mean=0.5, count=2)
  mixed = Mixed(entry=("a", score, 1.0), entries=((1, score), (2, score)))
  data = json.loads(json.dumps(artifacts.to_json(mixed)))
  read = artifacts.from_json(Mixed, data)
  assert read == mixed
  data["entry"][2] = 1  # as another program may write a float
  assert isinstance(artifacts.from_json(Mixed, data).entry[2], float)


@pytest.mark.parametrize("long", [0, 2000])
def test_one_long_text_widens_no_other_in_a_file_of_arrays(tmp_path, long):
  """10,000 ids of 6 characters and one of 2,000 took 80 MB."""
  names = [f"id{k:04}" for k in range(10_000)] + ["\u00e9" * long, ""][
    : bool(long)
  ]
  path = tmp_path / "texts.npz"
  rows = array_files.as_texts(names)
  array_files.save_npz(path, {"ids": rows, "n": np.arange(3)})
  assert path.stat().st_size < 400_000
  read = array_files.read_npz(path)
  assert set(read) == {"ids", "n"}
  assert read["ids"].tolist() == names
  assert read["ids"].nbytes < 400_000
  kept = read["ids"][np.array([1, len(names) - 1])]
  assert [str(name) for name in kept] == [names[1], names[-1]]


def test_a_result_of_another_version_is_named(tmp_path):
  old = dataclasses.make_dataclass("Changed", ["directory"], frozen=True)
  new = dataclasses.make_dataclass("Changed", ["directory", "row"], frozen=True)
  artifacts.save(tmp_path, old(directory="x"), "digest")
  with pytest.raises(ValueError, match=r"result.json: .*use the version that"):
    artifacts.load(tmp_path, new)
