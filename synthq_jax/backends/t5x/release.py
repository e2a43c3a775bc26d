"""One private training of T5X: its name, its secret, its place in the steps.

MODEL_DIR/privacy says what the training promises; all of it may be published
with the checkpoints. The secret lies elsewhere: T5X copies its configuration
into MODEL_DIR, so that gin may name the file but must not hold the number.
"""

import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from synthq_jax import checks, extras
from synthq_jax.backends.t5x import settings as settings_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.privacy import joint, ledger
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.storage import artifacts

with extras.required("run"):
  from etils import epath

__all__ = ["FOLDER", "Release", "read_step"]

FOLDER = "privacy"
"""In MODEL_DIR: release.json, ledger.jsonl, statement.txt."""

_BEFORE = "initial_checkpoint"
"""Of what was promised of it, in the ledger."""
_RECORD = "release.json"
_MESSAGE = 8192
"""Bytes, at most, that one process tells the others."""
_ERROR = "error"
_SAVED = re.compile(r"checkpoint_(\d+)")  # T5X's folders, of both layouts
_DIGITS = 24  # of a secret, at least: its check is published, and can be tried


class Release:
  """A private training, the same one however often it is resumed.

  Its name is drawn when it is first opened in a MODEL_DIR, and read from there
  later. Batches, noise and dropout are functions of the secret, the name, the
  settings and the step, dropout of the example, too. So a resumed training
  makes the same release again, and a training in another MODEL_DIR never draws
  the same noise.

  Formal guarantee: that of `Settings`, for all checkpoints together, if a step
  that is taken again has the gradient that it had: its noise is the same, too.
  So a resumed training is refused with other settings, learning rates, loss,
  module, optimizer, records, first parameters, libraries, or another kind or
  number of devices. Not noticed: code of the model's own that changed.
  """

  def __init__(
    self,
    settings: settings_lib.Settings,
    *,
    model_dir: str | os.PathLike,
    secret_file: str | os.PathLike,
    secret_in_bucket: bool = False,
    initial_checkpoint: str | os.PathLike | None = None,
  ):
    """Opens the release of a MODEL_DIR, or begins one.

    Args:
      settings: what is promised.
      model_dir: T5X's.
      secret_file: outside of MODEL_DIR; drawn where it is missing and nothing
        was begun.
      secret_in_bucket: whether it may lie in a bucket, where not its mode but
        the bucket's rights say who reads it.
      initial_checkpoint: what the training starts from. Where that was trained
        on private examples itself, MODEL_DIR holds both releases, and its
        statement is of both together.

    Raises:
      ValueError: if the secret is to lie in MODEL_DIR, or in a bucket without
        `secret_in_bucket`, or the training there was begun with other settings
        or another secret.
    """
    self.settings = settings
    self.noise_multiplier = settings.claim.noise_multiplier
    self._folder = epath.Path(model_dir) / FOLDER
    self._initial = initial_checkpoint
    if "://" in os.fspath(secret_file) and not secret_in_bucket:
      raise ValueError(
        f"expected SECRET_FILE on a disk, got {secret_file}: whoever may read the"
        " bucket could take the noise away; release.Release.secret_in_bucket ="
        " True allows it"
      )
    secret_file = epath.Path(secret_file)
    if _is_inside(secret_file, epath.Path(model_dir)):
      raise ValueError(
        f"expected SECRET_FILE outside of MODEL_DIR, got {secret_file}: whoever"
        " gets the checkpoints would get what takes the noise away"
      )
    opened = _from_first_process(lambda: self._open(secret_file))
    self.identifier = opened["identifier"]
    self._secret = int(opened["secret"], 16)
    self._next: int | None = None
    self._records: dict[str, str] = {}

  def noise_key(self) -> jax.Array:
    """Returns the secret key of the noise, which no other seed moves."""
    return self._key("noise")

  def dropout_key(self) -> jax.Array:
    """Returns the secret key of dropout, for each step and example one more."""
    return self._key("dropout")

  def batch_seed(self) -> list[int]:
    """Returns the secret seed of the Poisson sampling."""
    return self._words("batches")

  def check_records(self, digest: str) -> None:
    """Holds that every machine reads the same records, now and when resumed.

    Args:
      digest: of all records in their order.

    Raises:
      ValueError: on every machine, if one has others. `begin` refuses records
        that are not those of the beginning; what it writes is keyed with the
        secret, and confirms nothing.
    """
    text = f"{self._secret:x} {self.identifier} records {digest}"
    hashed = hashlib.sha256(text.encode()).digest()[:16]
    mine = np.frombuffer(hashed, np.uint8)
    found = np.reshape(multihost_utils.process_allgather(mine), (-1, 16))
    if (found != found[0]).any():
      raise ValueError(
        "expected the same records in the training split on every machine, got"
        " others on some: a preprocessor of the task draws at random, or their"
        " files differ; cache the task, and set USE_CACHED_TASKS = True"
      )
    self._records = {"records": hashed.hex()}

  def begin(self, step: int, facts: Mapping[str, Any], start: str = "") -> int:
    """Enters the training into the ledger before its first step.

    Args:
      step: that of T5X's state, which counts earlier training too.
      facts: what must be the same when the training is resumed, as JSON.
      start: tells the parameters of the first step from others; looked at when
        the training begins again from there.

    Returns:
      The first step of this training.

    Raises:
      ValueError: if it was begun at a later step or with other facts, or starts
        from a private checkpoint that no claim covers together with it.
    """
    facts = json.loads(json.dumps({**facts, **self._records}))
    began = _from_first_process(lambda: self._begin(step, facts, start))
    self._next = step - began["first_step"]
    return began["first_step"]

  def next_step(self) -> int:
    """Counts one step; returns its number in this training, from 0.

    Raises:
      ValueError: if there was no `begin`, or all steps were taken: another
        one would not be covered by the statement.
    """
    if self._next is None:
      raise ValueError(
        "expected batches to be asked for by dp_trainer.DPTrainer, got another"
        " trainer_cls: only that one clips and adds noise"
      )
    if self._next >= self.settings.steps:
      raise ValueError(
        f"expected at most PRIVATE_STEPS={self.settings.steps} steps, got one"
        " more: the statement does not cover it; lower TRAIN_STEPS, and leave"
        " TRAIN_STEPS_RELATIVE, which counts anew when resumed, None"
      )
    self._next += 1
    return self._next - 1

  def statement(self) -> statement_lib.PrivacyStatement:
    """Returns what this training promises."""
    return self.settings.claim.statement(f"t5x/{self.identifier}")

  def _key(self, purpose: str) -> jax.Array:
    """Returns a secret key for one purpose of this training."""
    words = np.array(self._words(purpose)[:2], np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")

  def _words(self, purpose: str) -> list[int]:
    """Returns 128 secret bits for one purpose of this training."""
    digest = artifacts.fingerprint(self.settings)
    text = f"{self._secret:x} {self.identifier} {digest} {purpose}"
    hashed = hashlib.sha256(text.encode()).digest()
    return np.frombuffer(hashed[:16], np.uint32).tolist()

  def _open(self, secret_file: epath.Path) -> dict[str, str]:
    """Reads or draws name and secret; on the first process alone."""
    record = _read(self._folder / _RECORD)
    settings = artifacts.to_json(self.settings)
    if record is None:
      secret = _secret(secret_file, draw=True)
      name = secrets.token_hex(8)
      record = {
        "identifier": name,
        "secret_check": _check_of(secret, name),
        "settings": settings,
      }
      text = json.dumps(record, indent=2, sort_keys=True)
      _write_text(self._folder / _RECORD, text + "\n")
      return {"identifier": name, "secret": secret}
    where = self._folder / _RECORD
    _refuse_changes(where, record["settings"], settings)
    secret = _secret(secret_file, draw=False)
    if _check_of(secret, record["identifier"]) != record["secret_check"]:
      raise ValueError(
        f"{secret_file}: expected the secret that the training of {where} began"
        " with, got another: its steps would be drawn and noised anew"
      )
    return {"identifier": record["identifier"], "secret": secret}

  def _begin(
    self, step: int, facts: Mapping[str, Any], start: str
  ) -> dict[str, int]:
    """Notes the first step, or compares; on the first process alone."""
    where = self._folder / _RECORD
    record = _read(where) or {}
    if record.get("identifier") != self.identifier:
      raise ValueError(
        f"{where}: expected the training that was opened here, got another one,"
        " which began meanwhile: one job for each MODEL_DIR"
      )
    if "first_step" in record:
      _refuse_changes(where, record["facts"], facts)
      first = record["first_step"]
      if not first <= step:
        raise ValueError(
          f"{where}: expected a state of step {first} or later, with which this"
          f" training began, got step {step}: take another MODEL_DIR"
        )
      if step > first:
        _refuse_unsaved(self._folder.parent, step)
      if step == first:
        _refuse_changes(where, {"start": record["start"]}, {"start": start})
      return {"first_step": first}
    statement = self.statement()
    entries = ledger.line(f"t5x/{self.identifier}", statement)
    if (before := _promise_of(self._initial)) is not None:
      statement = joint.claim([before, statement])
      if statement is None or math.isinf(statement.epsilon):
        raise ValueError(
          f"{self._initial}: expected a public initial checkpoint, or one whose"
          " training and this one one finite claim covers, got one without noise"
          " or of another unit: start from another"
        )
      entries = ledger.line(_BEFORE, before) + entries
    _write_text(self._folder / ledger.NAME, entries)
    words = statement_lib.in_words(statement)
    _write_text(self._folder / "statement.txt", words + "\n")
    # Last: a training that was killed before enters the same line again.
    record |= {"first_step": step, "facts": dict(facts), "start": start}
    _write_text(where, json.dumps(record, indent=2, sort_keys=True) + "\n")
    return {"first_step": step}


def read_step(step: Any) -> int:
  """Reads the step of a state. Refuses one that a cast may have rounded.

  A lower step draws the batch and the noise of a step that was taken already.

  Args:
    step: a scalar, as T5X's state holds it.

  Raises:
    ValueError: unless its type is an integer's.
  """
  value = np.asarray(step)
  if not np.issubdtype(value.dtype, np.integer):
    raise ValueError(
      f"expected a step of an integer type, got {value.dtype}: the whole state was"
      " cast, which rounds steps; restore it as it was saved"
    )
  return int(value)


def _refuse_unsaved(folder: epath.Path, step: int) -> None:
  """Refuses a step of which no checkpoint lies here, where others do."""
  names = [child.name for child in folder.iterdir()]
  saved = {match[1] for name in names if (match := _SAVED.fullmatch(name))}
  if saved and str(step) not in saved:
    raise ValueError(
      f"{folder}: expected a state of one of the checkpoints there, of steps"
      f" {', '.join(sorted(saved, key=int))}, got step {step}: restore one of them"
      " as it was saved, in its own types"
    )


def _promise_of(
  checkpoint: str | os.PathLike | None,
) -> statement_lib.PrivacyStatement | None:
  """Returns what was promised of a checkpoint, in a bucket, too; None: public."""
  if checkpoint is None:
    return None
  if "://" not in os.fspath(checkpoint):
    found = t5_checkpoints.claim(checkpoint)
  else:
    place = epath.Path(checkpoint)
    with tempfile.TemporaryDirectory() as here:
      copies = [
        _copied(folder, pathlib.Path(here) / str(number))
        for number, folder in enumerate((place, place.parent))
      ]
      found = t5_checkpoints.claim_in(checkpoint, copies)
  return None if found is None or found.is_public else found


def _copied(folder: epath.Path, here: pathlib.Path) -> pathlib.Path:
  """Copies what a folder of a bucket says of its checkpoint."""
  for name in t5_checkpoints.CLAIM_FILES:
    if (folder / name).exists():
      (here / name).parent.mkdir(parents=True, exist_ok=True)
      (here / name).write_text((folder / name).read_text())
  return here


def _from_first_process(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """Returns what the first process makes, on every process."""
  if jax.process_count() == 1:
    return make()
  message = np.zeros(_MESSAGE, np.uint8)
  if jax.process_index() == 0:
    try:
      made = make()
    except Exception as error:  # the others wait for what it says
      made = {_ERROR: (str(error) or repr(error))[: _MESSAGE // 8]}
    text = json.dumps(made).encode()
    message[: len(text)] = np.frombuffer(text, np.uint8)
  sent = np.asarray(multihost_utils.broadcast_one_to_all(message))
  told = json.loads(sent.astype(np.uint8).tobytes().rstrip(b"\0"))
  if _ERROR in told:
    raise ValueError(told[_ERROR])
  return told


def _secret(path: epath.Path, *, draw: bool) -> str:
  """Reads the secret, or draws 128 bits where there is none yet."""
  if not path.exists():
    if not draw:
      raise ValueError(
        f"{path}: expected the secret that this MODEL_DIR's training began"
        " with, got no file: restore it, or begin anew in another MODEL_DIR"
      )
    content = f"{secrets.randbits(128):032x}\n"
    if "://" in os.fspath(path):
      path.write_text(content)
    else:
      with artifacts.replacing(os.fspath(path), mode=0o600) as stream:
        stream.write(content.encode())
  if "://" not in os.fspath(path):  # a bucket says who reads
    checks.owner_alone(path)
  text = path.read_text().strip()
  if len(text) < _DIGITS or set(text) - set("0123456789abcdef"):
    raise ValueError(
      f"{path}: expected one hexadecimal number of {_DIGITS} digits or more, got"
      " something else: name a file that does not exist, and it is made"
    )
  return text


def _check_of(secret: str, identifier: str) -> str:
  """Returns what shows that a secret is the same; 128 bits cannot be guessed."""
  text = f"{int(secret, 16):x} {identifier} check"
  return hashlib.sha256(text.encode()).hexdigest()


def _is_inside(path: epath.Path, folder: epath.Path) -> bool:
  if "://" not in os.fspath(path):
    path = path.resolve()
  if "://" not in os.fspath(folder):
    folder = folder.resolve()
  return folder in (path, *path.parents)


def _refuse_changes(
  where: epath.Path, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
  """Refuses to resume a training as another one."""
  names = sorted(before.keys() | now.keys())
  changed = [n for n in names if before.get(n) != now.get(n)]
  if changed:
    shown = "; ".join(f"{n} {before.get(n)}, now {now.get(n)}" for n in changed)
    raise ValueError(
      f"{where}: expected the settings that this training began with, got"
      f" others ({shown}): take them back, or begin in another MODEL_DIR"
    )


def _read(path: epath.Path) -> dict[str, Any] | None:
  return json.loads(path.read_text()) if path.exists() else None


def _write_text(path: epath.Path, text: str) -> None:
  """Writes a file that is whole or not there, also in a bucket."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if "://" in os.fspath(path):
    path.write_text(text)  # appears when it is closed
  else:
    artifacts.write_atomically(os.fspath(path), text)
