"""Records one private training of T5X: its name, its secret and its first step.

MODEL_DIR/privacy holds the privacy statement of the training; all of it may be
published with the checkpoints. The secret must be elsewhere: T5X copies its
configuration to MODEL_DIR, so that gin may name the file but must not hold the
number.
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
"""Folder in MODEL_DIR with release.json, ledger.jsonl and statement.txt."""

_BEFORE = "initial_checkpoint"
"""Name of the initial checkpoint's statement in the ledger."""
_RECORD = "release.json"
_MESSAGE = 8192
"""Size in bytes of the message that the first process broadcasts."""
_ERROR = "error"
_SAVED = re.compile(r"checkpoint_(\d+)")  # T5X's folders, of both layouts
_DIGITS = 24  # fewest digits of a secret, whose published check allows guessing


class Release:
  """Identifies a private training, however often it is resumed.

  Its name is drawn when it is first opened in a MODEL_DIR, and read from there
  later. Batches, noise and dropout are functions of the secret, the name, the
  settings and the step; dropout is also a function of the example. So a resumed
  training repeats the same release, and a training in another MODEL_DIR never draws
  the same noise.

  Formal guarantee: the guarantee of `Settings` for all checkpoints together, if
  a repeated step has the same gradient as before, since its noise is the same.
  So a resumed training is refused with other settings, learning rates, loss,
  module, optimizer, records, first parameters, libraries, or another kind or
  number of devices. Changes of the model's own code are not detected.
  """

  def __init__(
    self,
    settings: settings_lib.Settings,
    *,
    model_dir: str | os.PathLike,
    secret_file: str | os.PathLike,
    secret_in_bucket: bool = False,
    initial_checkpoint: str | os.PathLike | None = None,
    checkpoint_cfg: Any = None,
  ):
    """Opens the release of a MODEL_DIR, or begins one.

    Args:
      settings: the settings of the training.
      model_dir: T5X's MODEL_DIR.
      secret_file: file of the secret, outside of MODEL_DIR; a new secret is drawn
        if the file is missing and no training has begun.
      secret_in_bucket: whether the secret may be in a bucket, whose rights decide
        who can read it, instead of the file's mode.
      initial_checkpoint: checkpoint from which the training starts. If it was
        itself trained on private examples, the ledger in MODEL_DIR holds both
        trainings, and the statement covers both together.
      checkpoint_cfg: T5X's CheckpointConfig, to see that it restores
        `initial_checkpoint`; None: not checked.

    Raises:
      ValueError: if the secret is in MODEL_DIR, or in a bucket without
        `secret_in_bucket`, or the training there has other settings or another
        secret; if another checkpoint is restored than the initial one.
    """
    _refuse_other_checkpoint(checkpoint_cfg, initial_checkpoint)
    self.settings = settings
    self.noise_multiplier = settings.claim.noise_multiplier
    self._folder = epath.Path(model_dir) / FOLDER
    self._initial = initial_checkpoint
    if "://" in os.fspath(secret_file) and not secret_in_bucket:
      raise ValueError(
        f"expected SECRET_FILE on a disk, got {secret_file}: anyone who may read the"
        " bucket could remove the noise; release.Release.secret_in_bucket ="
        " True allows it"
      )
    secret_file = epath.Path(secret_file)
    if _is_inside(secret_file, epath.Path(model_dir)):
      raise ValueError(
        f"expected SECRET_FILE outside of MODEL_DIR, got {secret_file}: anyone"
        " who gets the checkpoints could remove the noise"
      )
    opened = _broadcast_from_first(lambda: self._open(secret_file))
    self.identifier = opened["identifier"]
    self._secret = int(opened["secret"], 16)
    self.has_begun = bool(opened["first_step"])
    """Whether this is a training that goes on."""
    self._next: int | None = None
    self._records: dict[str, str] = {}

  def noise_key(self) -> jax.Array:
    """Returns the secret key of the noise, which depends on no other seed."""
    return self._derive_key("noise")

  def dropout_key(self) -> jax.Array:
    """Returns the secret key of dropout, from which steps and examples get
    theirs."""
    return self._derive_key("dropout")

  def batch_seed(self) -> list[int]:
    """Returns the secret seed of the Poisson sampling."""
    return self._derive_words("batches")

  def check_records(self, digest: str) -> None:
    """Refuses records that differ between machines, and notes them for `begin`.

    `begin` refuses to resume a training with other records. The hash that it writes
    is keyed with the secret, so that it cannot confirm a guess of the records.

    Args:
      digest: digest of all records in their order.

    Raises:
      ValueError: on every machine, if one of them has other records.
    """
    text = f"{self._secret:x} {self.identifier} records {digest}"
    hashed = hashlib.sha256(text.encode()).digest()[:16]
    own = np.frombuffer(hashed, np.uint8)
    hashes = np.reshape(multihost_utils.process_allgather(own), (-1, 16))
    if (hashes != hashes[0]).any():
      raise ValueError(
        "expected the same records in the training split on every machine, got"
        " others on some: the machines' files differ, or a preprocessor of the task"
        " draws at random; give all the same files, and leave the preprocessor out"
      )
    self._records = {"records": hashed.hex()}

  def begin(self, step: int, facts: Mapping[str, Any], start: str = "") -> int:
    """Enters the training in the ledger before its first step.

    Args:
      step: step of T5X's state, which counts earlier training, too.
      facts: facts that must not change when the training is resumed, as JSON.
      start: digest of the parameters, compared if the training restarts at its
        first step.

    Returns:
      The first step of this training.

    Raises:
      ValueError: if the training has begun at a later step or with other facts, or
        starts from a private checkpoint and no claim covers both.
    """
    facts = json.loads(json.dumps({**facts, **self._records}))
    began = _broadcast_from_first(lambda: self._begin(step, facts, start))
    self._next = step - began["first_step"]
    return began["first_step"]

  def next_step(self) -> int:
    """Counts one step and returns its number in this training, from 0.

    Raises:
      ValueError: if `begin` has not run, or all steps are taken: the statement
        would not cover another one.
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
        " TRAIN_STEPS_RELATIVE, which restarts its count when resumed, None"
      )
    self._next += 1
    return self._next - 1

  def statement(self) -> statement_lib.PrivacyStatement:
    """Returns the privacy statement of this training."""
    return self.settings.claim.statement(f"t5x/{self.identifier}")

  def _derive_key(self, purpose: str) -> jax.Array:
    """Derives a secret key for one purpose of this training."""
    words = np.array(self._derive_words(purpose)[:2], np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")

  def _derive_words(self, purpose: str) -> list[int]:
    """Derives 128 secret bits for one purpose of this training."""
    digest = artifacts.fingerprint(self.settings)
    text = f"{self._secret:x} {self.identifier} {digest} {purpose}"
    hashed = hashlib.sha256(text.encode()).digest()
    return np.frombuffer(hashed[:16], np.uint32).tolist()

  def _open(self, secret_file: epath.Path) -> dict[str, str]:
    """Reads or draws name and secret; only the first process calls it."""
    record = _read(self._folder / _RECORD)
    settings = artifacts.to_json(self.settings)
    if record is None:
      secret = _read_secret(secret_file, draw=True)
      name = secrets.token_hex(8)
      record = {
        "identifier": name,
        "secret_check": _compute_check(secret, name),
        "settings": settings,
      }
      text = json.dumps(record, indent=2, sort_keys=True)
      _write_text(self._folder / _RECORD, text + "\n")
      return {"identifier": name, "secret": secret, "first_step": ""}
    where = self._folder / _RECORD
    _refuse_changes(where, record["settings"], settings)
    secret = _read_secret(secret_file, draw=False)
    if _compute_check(secret, record["identifier"]) != record["secret_check"]:
      raise ValueError(
        f"{secret_file}: expected the secret that the training of {where} began"
        " with, got another: its steps would get new batches and noise"
      )
    return {
      "identifier": record["identifier"],
      "secret": secret,
      "first_step": str(record.get("first_step", "")),
    }

  def _begin(
    self, step: int, facts: Mapping[str, Any], start: str
  ) -> dict[str, int]:
    """Records the first step, or compares; only the first process calls it."""
    where = self._folder / _RECORD
    record = _read(where) or {}
    if record.get("identifier") != self.identifier:
      raise ValueError(
        f"{where}: expected the training that was opened here, got another one,"
        " which began in the meantime: run one job for each MODEL_DIR"
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
    _refuse_unknown_start(self._folder.parent, self._initial, step)
    statement = self.statement()
    entries = ledger.line(f"t5x/{self.identifier}", statement)
    if (before := _read_promise(self._initial)) is not None:
      statement = joint.claim([before, statement])
      if statement is None or math.isinf(statement.epsilon):
        raise ValueError(
          f"{self._initial}: expected a public initial checkpoint, or one that a"
          " finite claim covers together with this training, got one without noise"
          " or of another unit: start from another"
        )
      entries = ledger.line(_BEFORE, before) + entries
    _write_text(self._folder / ledger.NAME, entries)
    words = statement_lib.in_words(statement)
    _write_text(self._folder / "statement.txt", words + "\n")
    # Written last: if the training is killed before, it enters the same line again.
    record |= {"first_step": step, "facts": dict(facts), "start": start}
    _write_text(where, json.dumps(record, indent=2, sort_keys=True) + "\n")
    return {"first_step": step}


def _list_saved(folder: epath.Path) -> list[int]:
  """Lists the steps of T5X's checkpoints in a folder."""
  names = [child.name for child in folder.iterdir()]
  return sorted(int(m[1]) for name in names if (m := _SAVED.fullmatch(name)))


def read_step(step: Any) -> int:
  """Reads the step of a state and refuses one that a cast may have rounded.

  A lower step would repeat the batch and the noise of a step taken before.

  Args:
    step: a scalar of T5X's state.

  Raises:
    ValueError: unless its type is an integer type.
  """
  value = np.asarray(step)
  if not np.issubdtype(value.dtype, np.integer):
    raise ValueError(
      f"expected a step of an integer type, got {value.dtype}: the whole state was"
      " cast, which rounds steps; set utils.SaveCheckpointConfig.dtype and"
      " utils.RestoreCheckpointConfig.dtype to None"
    )
  return int(value)


def _refuse_unsaved(folder: epath.Path, step: int) -> None:
  """Refuses a step without a checkpoint in a folder with checkpoints."""
  saved = _list_saved(folder)
  if saved and step not in saved:
    raise ValueError(
      f"{folder}: expected a state of one of the checkpoints there, of steps"
      f" {', '.join(map(str, saved))}, got step {step}: restore one of them as it"
      " was saved, in its own types"
    )


def _refuse_other_checkpoint(
  checkpoint_cfg: Any, initial: str | os.PathLike | None
) -> None:
  """Refuses to restore a checkpoint whose claim nobody would look for."""
  restore = getattr(checkpoint_cfg, "restore", None)
  if restore is None:
    return
  path = restore.path  # one, or several
  paths = path if isinstance(path, list | tuple) else [path]
  names = {p and os.fspath(p).rstrip("/") for p in (*paths, initial)}
  if len(names) > 1:
    raise ValueError(
      "expected utils.RestoreCheckpointConfig.path of INITIAL_CHECKPOINT_PATH ="
      f" {initial}, got {path}: name what is restored by INITIAL_CHECKPOINT_PATH"
      " alone, so that its own claim counts"
    )


def _refuse_unknown_start(
  folder: epath.Path, initial: str | os.PathLike | None, step: int
) -> None:
  """Refuses to begin with a state of which nobody says how it was trained.

  T5X prefers a checkpoint in MODEL_DIR to the initial one, and takes the latter from
  utils.RestoreCheckpointConfig.path, which gin may bind to another folder.
  """
  if saved := _list_saved(folder):
    raise ValueError(
      f"{folder}: expected a MODEL_DIR without checkpoints, got that of step"
      f" {saved[-1]}, whose training {FOLDER}/ here does not know: restore its"
      f" {FOLDER}/, or take another MODEL_DIR and name the checkpoint by"
      " INITIAL_CHECKPOINT_PATH"
    )
  name = "" if initial is None else os.fspath(initial).rstrip("/")
  named = _SAVED.fullmatch(name.rpartition("/")[2])
  expected = int(named[1]) if named else 0
  if step != expected and (named or initial is None):
    raise ValueError(
      f"expected a state of step {expected}, as INITIAL_CHECKPOINT_PATH ="
      f" {initial} says, got step {step}: name the checkpoint that is restored by"
      " INITIAL_CHECKPOINT_PATH, not by utils.RestoreCheckpointConfig.path, so"
      " that its own claim counts"
    )


def _read_promise(
  checkpoint: str | os.PathLike | None,
) -> statement_lib.PrivacyStatement | None:
  """Reads the statement of a checkpoint on disk or in a bucket; None if it is
  public."""
  if checkpoint is None:
    return None
  if "://" not in os.fspath(checkpoint):
    promise = t5_checkpoints.claim(checkpoint)
  else:
    path = epath.Path(checkpoint)
    parents = (path, *list(path.parents)[:2])
    steps = [step for each in parents for step in each.glob("checkpoint_*")]
    with tempfile.TemporaryDirectory() as scratch:
      copies = [
        _copy_claim(folder, pathlib.Path(scratch) / str(number))
        for number, folder in enumerate(dict.fromkeys((*parents, *steps)))
      ]
      promise = t5_checkpoints.claim_in(checkpoint, copies)
  return None if promise is None or promise.is_public else promise


def _copy_claim(folder: epath.Path, target: pathlib.Path) -> pathlib.Path:
  """Copies the claim files of a folder in a bucket to a local folder."""
  for name in t5_checkpoints.CLAIM_FILES:
    if (folder / name).exists():
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      (target / name).write_text((folder / name).read_text())
  return target


def _broadcast_from_first(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """Calls a function on the first process and broadcasts its result or error."""
  if jax.process_count() == 1:
    return make()
  message = np.zeros(_MESSAGE, np.uint8)
  if jax.process_index() == 0:
    try:
      result = make()
    except Exception as error:  # the other processes wait for a message
      result = {_ERROR: (str(error) or repr(error))[: _MESSAGE // 8]}
    text = json.dumps(result).encode()
    message[: len(text)] = np.frombuffer(text, np.uint8)
  sent = np.asarray(multihost_utils.broadcast_one_to_all(message))
  received = json.loads(sent.astype(np.uint8).tobytes().rstrip(b"\0"))
  if _ERROR in received:
    raise ValueError(received[_ERROR])
  return received


def _read_secret(path: epath.Path, *, draw: bool) -> str:
  """Reads the secret, or draws 128 bits if there is none and `draw` is set."""
  if not path.exists():
    if not draw:
      raise ValueError(
        f"{path}: expected the secret that this MODEL_DIR's training began"
        " with, got no file: restore it, or start again in another MODEL_DIR"
      )
    content = f"{secrets.randbits(128):032x}\n"
    if "://" in os.fspath(path):
      path.write_text(content)
    else:
      with artifacts.replacing(os.fspath(path), mode=0o600) as stream:
        stream.write(content.encode())
  if "://" not in os.fspath(path):  # the rights of a bucket decide who reads it
    checks.owner_alone(path)
  text = path.read_text().strip()
  if len(text) < _DIGITS or set(text) - set("0123456789abcdef"):
    raise ValueError(
      f"{path}: expected one hexadecimal number of {_DIGITS} digits or more, got"
      " something else: name a file that does not exist, and it is created"
    )
  return text


def _compute_check(secret: str, identifier: str) -> str:
  """Returns a hash that identifies a secret; 128 bits cannot be guessed."""
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
  """Refuses to resume a training with changed settings or facts."""
  names = sorted(before.keys() | now.keys())
  changed = [n for n in names if before.get(n) != now.get(n)]
  if changed:
    shown = "; ".join(f"{n} {before.get(n)}, now {now.get(n)}" for n in changed)
    raise ValueError(
      f"{where}: expected the settings that this training began with, got"
      f" others ({shown}): restore them, or begin in another MODEL_DIR"
    )


def _read(path: epath.Path) -> dict[str, Any] | None:
  return json.loads(path.read_text()) if path.exists() else None


def _write_text(path: epath.Path, text: str) -> None:
  """Writes a file atomically, on disk or in a bucket."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if "://" in os.fspath(path):
    path.write_text(text)  # the object appears when the file is closed
  else:
    artifacts.write_atomically(os.fspath(path), text)
