"""Names one private training of a working directory and makes its randomness.

Batches, dropout and noise come from the secret of the working directory and
from numbers that are drawn when a training starts. These numbers lie with the
training's states. A training that is resumed is the same release; one that is
made again is another release.
"""

import dataclasses
import json
import pathlib
import secrets

import jax

from synthq_jax.runtime import workspace
from synthq_jax.storage import artifacts
from synthq_jax.training import checkpoints, distributed

__all__ = ["RECORD", "Release", "remove", "start"]

RECORD = "release.json"
"""File next to the states of a training; states without it belong to no
release."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
  """Identifier and randomness of a private training that has started."""

  identifier: str
  """Name in the ledger and in statements, which may be published. It holds a
  digest of the drawn numbers, keyed with the secret."""
  batch_seed: list[int]
  """Secret seed of the sampling."""
  dropout_key: jax.Array
  """Secret key of dropout."""
  noise_key: jax.Array
  """Secret key of the noise."""


def start(
  space: workspace.Workspace,
  stage: str,
  digest: str,
  *,
  directory: pathlib.Path,
  program: str,
  promise: str = "",
) -> Release:
  """Starts a training, or resumes one that was interrupted.

  Process 0 draws and the other processes follow. The drawn numbers are on disk
  when this function returns: enter the identifier into the ledger next, and
  only then draw noise.

  Formal guarantee:
    Two calls return the same noise key only if `directory` kept its record in
    between and `program` was the same. Otherwise key and identifier are drawn
    anew, so that the noise of one step is added to the gradients of one program
    alone. A saved state is resumed only under the same `promise`, whose noise
    its steps had. If another program resumes it, the batches stay those that
    the training began with, and the noise of the coming steps is drawn anew.
    The result then has as many steps as it claims, each with noise of its own,
    and the ledger counts two trainings. Assumed: what an interrupted training
    computed after its last saved state is gone with the process (except lines
    of metrics, which are private); nobody restores an older copy of
    `directory`; and `program` differs between programs whose gradients differ.
    A secret that the settings fix draws nothing: the same training again is the
    same release, bit for bit, on any machine, and it protects nobody.

  Args:
    space: the working directory, with its secret.
    stage: name of the stage and row, e.g. "finetune_dp/eps8".
    digest: fingerprint of everything the training depends on.
    directory: folder of its states.
    program: from `fingerprints.program`.
    promise: digest of sampling, noise and sensitivity; empty for a release
      without states.
  """
  batches, noise = distributed.decided(
    f"{stage} release", lambda: _drawn(directory, program, promise)
  )
  if space.is_fixed:
    batches = noise = ""

  def purpose(use: str, drawn: str) -> str:
    return " ".join(filter(None, (stage, use, digest, drawn)))

  identifier = f"{stage}/{digest}"
  if noise:
    words = space.seed(purpose("identifier", noise))
    identifier += "-" + "".join(f"{word:08x}" for word in words[:2])
  return Release(
    identifier=identifier,
    batch_seed=space.seed(purpose("batches", batches)),
    dropout_key=space.key(purpose("dropout", batches)),
    noise_key=space.key(purpose("noise", noise)),
  )


def remove(directory: pathlib.Path) -> None:
  """Removes the states of a training whose result is saved.

  The record of the release is removed first. If the removal is interrupted, the
  remaining states belong to no release, and no training resumes from them.

  Args:
    directory: folder of the states; it may be missing.
  """
  artifacts.remove(directory / RECORD)
  artifacts.remove(directory)


def _drawn(
  directory: pathlib.Path, program: str, promise: str
) -> tuple[str, str]:
  """Returns the numbers of the batches and of the noise, new or stored."""
  path = directory / RECORD
  record = artifacts.read_json(path) if path.exists() else {}
  if record.get("promise") != promise:
    record = {}
  if record.get("program") != program:
    drawn = secrets.token_hex(16)
    if not record or checkpoints.latest_step(directory) is None:
      # These states belong to no release, or to one with other noise.
      artifacts.remove(directory, must=True)
      record = {"batches": drawn}
    record |= {"noise": drawn, "program": program, "promise": promise}
    with artifacts.replacing(path, mode=0o600) as stream:
      text = json.dumps(artifacts.sealed(record), indent=1) + "\n"
      stream.write(text.encode())
  return record["batches"], record["noise"]
