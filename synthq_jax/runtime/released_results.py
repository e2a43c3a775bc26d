"""Reads the released results and the private trainings of a working directory.

The folder alone decides whether a result or an export counts as released: all
outside `private/` do, whatever their settings. So no list of rows can leave one
out.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from synthq_jax.models import t5_checkpoints
from synthq_jax.privacy import joint, ledger
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import results
from synthq_jax.storage import artifacts

__all__ = ["Released", "read"]

_Statements = dict[str, statement_lib.PrivacyStatement]
_WITHOUT_RECORDS = ("prepare_data", "report")
"""Folders without a result.json; their content is public or claimed
elsewhere."""

_SCORES = "release_scores/"
"""Beginning of the identifiers of releases that may be shown once they are
drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released:
  """The claims of a working directory."""

  shared: _Statements
  """Claims that count as released, by folder or ledger entry: those of every
  result outside `private/`, and of every export there; of every release of
  scores that was begun, since it may have been shown; and of every training
  behind scores. If the result of scores is missing, every training is behind
  them."""
  compared: _Statements
  """Claims of results under `private/` with a finite epsilon, by folder."""
  started: _Statements
  """Statements of the ledger, by identifier: of private trainings and of releases
  of scores."""
  unclaimed: tuple[str, ...]
  """Folders outside `private/` that hold files, and neither a finished result
  nor an export with its claim."""

  def including(self, models: Sequence[results.Claimed]) -> "Released":
    """Adds the results of a run, wherever their files are.

    Args:
      models: models and queries; those that must not be shared are left out.
    """
    own = {x.directory: x.statement for x in models if results.is_shareable(x)}
    return dataclasses.replace(self, shared={**own, **self.shared})

  @functools.cached_property
  def together(self) -> statement_lib.PrivacyStatement | None:
    """The joint claim of all that is released; None: there is none.

    Formal guarantee:
      That of `joint.claim` for all results and exports outside `private/`.
      Nothing is claimed if a folder there holds files that neither a result nor
      an export accounts for.
    """
    if self.unclaimed or not self.shared:
      return None
    return joint.claim(list(self.shared.values()))

  @functools.cached_property
  def everything(self) -> statement_lib.PrivacyStatement | None:
    """The joint claim of all private trainings; None: there is none.

    Its delta is that of `together`, if there is one.

    Formal guarantee:
      That of `joint.claim` for all trainings of the ledger and all results that
      claim anything. Trainings without privacy are not covered.
    """
    together = self.together
    private = [*self.started.values(), *self.compared.values()]
    claimed = [
      statement for statement in private if statement.epsilon < math.inf
    ]
    claimed += self.shared.values()
    delta = None if together is None else together.delta or None
    return joint.claim(claimed, delta=delta) if claimed else None

  @property
  def num_private(self) -> int:
    """Number of trainings and releases of scores that `everything` counts: those
    with noise."""
    return sum(each.epsilon < math.inf for each in self.started.values())

  @property
  def trials(self) -> int:
    """Number of private trainings without a result here: made again, or given
    up."""
    statements = [*self.shared.values(), *self.compared.values()]
    entries = {entry for statement in statements for entry in statement.ledger}
    return sum(
      statement.epsilon < math.inf and not entries >= set(statement.ledger)
      for statement in self.started.values()
    )


def read(root: pathlib.Path) -> Released:
  """Reads the claims of a working directory from its files.

  Args:
    root: the working directory.

  Raises:
    ValueError: if a result or the ledger cannot be read.
  """
  contents = {
    path.parent.relative_to(root).as_posix(): artifacts.read_json(path)
    for path in sorted(root.rglob(artifacts.RESULT_NAME))
  }
  stored = {folder: content["result"] for folder, content in contents.items()}
  claims = {
    folder: artifacts.from_json(
      statement_lib.PrivacyStatement, result["statement"]
    )
    for folder, result in stored.items()
    if result.get("statement") is not None
  }
  exported = {
    name: _read_export(root / name) for name in _unclaimed(root, contents)
  }
  shared = {k: v for k, v in claims.items() if not results.is_private_path(k)}
  shared |= {name: claim for name, claim in exported.items() if claim}
  path = root / results.PRIVATE / ledger.NAME
  started = ledger.read(path) if ledger.begun(path) else {}
  shared_entries = {
    entry for statement in shared.values() for entry in statement.ledger
  }
  # Scores reveal the systems that were scored, also those made again since.
  behind = {
    name
    for folder in shared.keys() & stored.keys()
    for name in stored[folder].get("systems", ())
    if name in started
  }
  if any(
    name.startswith(_SCORES) and not shared_entries >= set(statement.ledger)
    for name, statement in started.items()
  ):  # scores whose result is gone may have been of any training
    behind = {
      k for k, statement in started.items() if statement.epsilon < math.inf
    }
  shared |= {
    f"{ledger.NAME}: {name}": statement
    for name, statement in started.items()
    if (name in behind or name.startswith(_SCORES))
    and not shared_entries >= set(statement.ledger)
  }
  return Released(
    shared=shared,
    compared={
      folder.removeprefix(f"{results.PRIVATE}/"): claim
      for folder, claim in claims.items()
      if results.is_private_path(folder) and claim.epsilon < math.inf
    },
    started=started,
    unclaimed=tuple(name for name, claim in exported.items() if claim is None),
  )


def _read_export(folder: pathlib.Path) -> statement_lib.PrivacyStatement | None:
  """Returns the joint claim of an export and of exports below it.

  None: there is no claim that is whole.
  """
  nested = (path for path in sorted(folder.rglob("*")) if path.is_dir())
  try:
    return t5_checkpoints.claim_in(folder, (folder, *nested))
  except ValueError:
    return None


def _unclaimed(
  root: pathlib.Path, contents: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
  """Yields folders with files that no result of theirs accounts for."""
  for top in sorted(root.iterdir()) if root.exists() else ():
    skipped = (results.PRIVATE, *_WITHOUT_RECORDS)
    if not top.is_dir() or top.name in skipped:
      continue
    for folder in _leaves(top):
      name = folder.relative_to(root).as_posix()
      content = contents.get(name)
      # Saved indexes of earlier versions have no claim of their own.
      if top.name == "search" or not _says_its_claim(content):
        yield name


def _says_its_claim(content: Mapping[str, Any] | None) -> bool:
  """Checks whether a result exists, with a claim if private records made it."""
  if content is None:
    return False
  result = content["result"]
  # Scores of older versions have an epsilon and no statement.
  return result.get("epsilon") is None or result.get("statement") is not None


def _leaves(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the topmost folders that hold files; hidden files are ignored."""
  paths = [p for p in sorted(folder.iterdir()) if not p.name.startswith(".")]
  if any(path.is_file() for path in paths):
    yield folder
    return
  for path in paths:
    if path.is_dir():
      yield from _leaves(path)
