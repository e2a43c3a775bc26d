"""Ledgers: entered once, read back, added up, refused where they are broken."""

import errno
import json
import math
import os

import pytest

from synthq_jax.cli import main
from synthq_jax.privacy import ledger, sampling, statement
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.storage import artifacts
from tests.privacy import statements

SAMPLER = sampling.Poisson.with_margin(
  num_examples=6000, expected_batch_size=256
)


def made(identifier, **changes):
  settings = {
    "sampler": SAMPLER,
    "noise_multiplier": 1.0,
    "l2_clip_norm": 0.1,
    "steps": 300,
    "delta": 1 / 12000,
  }
  return statements.made(identifier, **(settings | changes))


@pytest.fixture(name="path")
def fixture_path(tmp_path):
  path = tmp_path / "private" / "ledger.jsonl"
  for name in ("finetune_dp/a", "tuning/b"):
    ledger.enter(path, name, made(name))
  ledger.enter(path, "finetune_dp/inf", statement.non_private())
  return path


def test_what_was_entered_is_read_back_in_order(path):
  found = ledger.read(path)
  assert list(found) == ["finetune_dp/a", "tuning/b", "finetune_dp/inf"]
  assert found["tuning/b"] == made("tuning/b")
  assert found["finetune_dp/inf"].epsilon == math.inf


def test_a_resumed_training_is_entered_once(path):
  before = path.read_text()
  ledger.enter(path, "tuning/b", made("tuning/b"))
  assert path.read_text() == before


@pytest.mark.parametrize(
  "other",
  [{"steps": 200}, {"noise_multiplier": 1.01}, {"unit": unit_lib.CLIENT}, None],
  ids=str,
)
def test_another_training_of_the_same_name_is_refused(path, other):
  """It would publish a result that the ledger does not count."""
  before = path.read_bytes()
  second = made("tuning/b", **other) if other else statement.non_private()
  with pytest.raises(ValueError, match="got another one for.*tuning/b"):
    ledger.enter(path, "tuning/b", second)
  assert path.read_bytes() == ledger.copy_of(path).read_bytes() == before


def test_a_resumed_training_may_find_its_noise_on_another_processor(path):
  before = path.read_bytes()
  ledger.enter(path, "tuning/b", made("tuning/b", noise_multiplier=1 + 1e-9))
  assert path.read_bytes() == before


def numbers(text):
  (line,) = [x for x in text.splitlines() if x.startswith("together")]
  return line.split("epsilon ")[1].split(",")[0]


def test_all_trainings_together_cost_what_their_composition_does(path, capsys):
  whole = statement.compose([made("finetune_dp/a"), made("tuning/b")])
  assert main.main(["privacy", f"--ledger={path}"]) == 0
  printed = capsys.readouterr().out
  assert whole.epsilon <= float(numbers(printed)) <= whole.epsilon + 1.1e-3
  assert "together (2)" in printed and "not counted: 1" in printed
  assert "finetune_dp/inf: no claim" in printed
  one = made("finetune_dp/a").epsilon
  line = printed.splitlines()[0]
  assert line.startswith("finetune_dp/a: epsilon ")
  assert one <= float(line.split()[2].strip(",")) <= one + 1.1e-3


def test_a_smaller_delta_costs_epsilon(path):
  loose = float(numbers(ledger.describe(path)))
  assert float(numbers(ledger.describe(path, delta=1e-6))) > loose


def test_different_units_are_not_added_up(path):
  queries_alone = numbers(ledger.describe(path))
  ledger.enter(
    path, "clients", made("clients", unit=unit_lib.CLIENT, steps=100)
  )
  printed = ledger.describe(path).splitlines()
  queries, clients = (x for x in printed if x.startswith("alone"))
  assert f"alone (2): epsilon {queries_alone}," in queries
  assert queries.endswith("for one query (ADD_OR_REMOVE_ONE)")
  assert clients.startswith("alone (1)")
  assert clients.endswith("for one client (ADD_OR_REMOVE_ONE)")
  assert float(clients.split()[3].strip(",")) < float(queries_alone)
  assert not [x for x in printed if x.startswith("together")]
  assert any(x.startswith("no joint claim") for x in printed)
  assert queries not in ledger.describe(path, delta=1e-6)


@pytest.mark.parametrize(
  "line", ["{", "[]", "{}", '{"identifier": "a", "statement": {}}', "[" * 9999]
)
def test_a_broken_line_is_named(path, line):
  path.write_text(path.read_text() + line + "\n")
  words = r"ledger\.jsonl:4: expected an entry.*put .*ledger_copy\.jsonl in its"
  with pytest.raises(ValueError, match=words):
    ledger.read(path)


def test_a_digit_that_changed_is_found(path):
  lines = path.read_text().splitlines(keepends=True)
  lines[1] = lines[1].replace('"steps": 300', '"steps": 200')
  path.write_text("".join(lines))
  words = r"ledger\.jsonl:2: expected an entry.*another checksum"
  with pytest.raises(ValueError, match=words):
    ledger.read(path)


def test_a_field_of_another_version_is_refused(path):
  """Without it the entry would cost less than its training did."""
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  [release] = lines[0]["statement"]["ledger"]
  for value in (None, {"mean": 4.0}):
    release["trials"] = value
    del lines[0]["checksum"]
    lines[0] = artifacts.sealed(lines[0])
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    path.write_text(text)
    ledger.copy_of(path).write_text(text)
    if value is None:
      assert ledger.read(path)["finetune_dp/a"] == made("finetune_dp/a")
  with pytest.raises(ValueError, match=r"ledger\.jsonl:1: .*unknown 'trials'"):
    ledger.read(path)


@pytest.mark.parametrize("kept", [0, 1, 40, -1, -2])
def test_a_line_that_was_torn_while_it_was_entered_is_explained(path, kept):
  """A kill after any byte: its training had read nothing yet."""
  before, copy = path.read_bytes(), ledger.copy_of(path).read_bytes()
  ledger.enter(path, "torn", made("torn"))
  line = path.read_bytes()[len(before) :]
  path.write_bytes(before + (line[:kept] if kept else b""))
  ledger.copy_of(path).write_bytes(copy)
  is_whole = kept == -1  # but for the end of the line
  assert ("torn" in ledger.read(path)) == is_whole
  said = ledger.describe(path)
  assert ("line 4 is torn" in said) == (kept in (1, 40, -2))
  ledger.enter(path, "torn", made("torn"))
  assert path.read_bytes() == before + line
  assert ledger.copy_of(path).read_bytes() == before + line


@pytest.mark.parametrize("lost", ["all", "file", "last", "half", "first"])
def test_a_ledger_with_fewer_trainings_than_were_begun_is_refused(
  path, lost, capsys
):
  lines = path.read_bytes().splitlines(keepends=True)
  copy = ledger.copy_of(path)
  whole = copy.read_bytes()
  if lost == "file":
    path.unlink()
  else:
    kept = {
      "all": [],
      "last": lines[:-1],
      "half": [*lines[:-1], lines[-1][:50]],
      "first": lines[1:],
    }
    path.write_bytes(b"".join(kept[lost]))
  before = path.exists() and path.read_bytes()
  with pytest.raises(ValueError, match="put .*ledger_copy.jsonl in its place"):
    ledger.enter(path, "later", made("later"))
  assert (path.exists() and path.read_bytes()) == before
  assert main.main(["privacy", f"--ledger={path}"]) == 2
  assert len(capsys.readouterr().err.splitlines()) == 1
  assert copy.read_bytes() == whole
  path.write_bytes(whole)  # the advice is followed
  ledger.enter(path, "later", made("later"))
  assert len(ledger.read(path)) == 4


def test_a_copy_that_was_lost_or_damaged_is_made_again(path):
  copy = ledger.copy_of(path)
  for change in (copy.unlink, lambda: copy.write_bytes(b"\0" * 30)):
    change()
    assert len(ledger.read(path)) == 3
    ledger.enter(path, "tuning/b", made("tuning/b"))
    assert copy.read_bytes() == path.read_bytes()
    change()
    ledger.mend(path)
    assert copy.read_bytes() == path.read_bytes()


def test_nothing_is_mended_from_a_ledger_that_lost_a_line(path):
  copy, lines = ledger.copy_of(path), path.read_bytes().splitlines(True)
  path.write_bytes(b"".join(lines[:-1]))
  before = copy.read_bytes()
  with pytest.raises(ValueError, match="expected the 3 trainings"):
    ledger.mend(path)
  assert copy.read_bytes() == before
  path.unlink()
  ledger.mend(path)
  assert copy.read_bytes() == before and not path.exists()


def test_a_lost_line_is_missed_though_the_copy_is_damaged_too(path):
  """The next entry would make the copy anew, and the training be forgotten."""
  lines = path.read_bytes().splitlines(keepends=True)
  copy = ledger.copy_of(path)
  for lost in range(len(lines)):
    path.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    for damaged in range(len(lines)):
      flipped = bytes([lines[damaged][20] ^ 1])
      changed = [*lines]
      changed[damaged] = flipped.join(
        [lines[damaged][:20], lines[damaged][21:]]
      )
      copy.write_bytes(b"".join(changed))
      for look in (ledger.read, lambda p: ledger.enter(p, "new", made("new"))):
        with pytest.raises(
          ValueError, match=f"expected the {len(lines)} train"
        ):
          look(path)
      assert copy.read_bytes() == b"".join(changed)


def test_an_entry_is_on_disk_with_its_name_before_enter_returns(
  path, monkeypatch
):
  synced = []
  fsync = os.fsync

  def noted(descriptor):
    synced.append(os.fstat(descriptor).st_ino)
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", noted)
  inode = path.stat().st_ino
  ledger.enter(path, "later", made("later"))
  assert path.stat().st_ino == inode  # appended to, never replaced
  copy = ledger.copy_of(path).stat().st_ino
  folders = [folder.stat().st_ino for folder in path.absolute().parents]
  folder, *above = folders
  # A folder that was just made is a name in the one above it.
  assert above[0] in synced and set(synced[1:-2]) <= set(folders)
  assert (synced[:2], synced[-2:]) == ([inode, folder], [copy, folder])


def test_a_full_disk_leaves_the_ledger_as_it_was(path, monkeypatch):
  before = path.read_bytes()

  def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patched:
    patched.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*ledger\.jsonl"):
      ledger.enter(path, "later", made("later"))
  assert path.read_bytes().startswith(before)
  ledger.enter(path, "later", made("later"))
  assert list(ledger.read(path))[3:] == ["later"]
