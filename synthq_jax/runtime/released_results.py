"""Finds what a working directory gives away, and what was ever trained in it.

What counts as released is decided by the place alone, so that no list of rows
can leave anything out: every result outside of `private/`, whichever settings
made it.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from synthq_jax.privacy import joint, ledger
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import results
from synthq_jax.storage import artifacts

__all__ = ["Released", "read"]

_Statements = dict[str, statement_lib.PrivacyStatement]
_WITHOUT_RECORDS = ("prepare_data", "report")
"""Folders without a result.json; what they hold is public or said elsewhere."""

_SCORES = "release_scores/"
"""Begins the identifiers of what may be shown as soon as it is drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released:
  """The claims of a working directory."""

  shared: _Statements
  """Of every result outside of `private/` that has a claim, by its folder; and of
  every release of scores that was begun, since it may have been shown; and of every
  training behind scores, which is every one where the result of scores is gone."""
  compared: _Statements
  """Of results under `private/` that claim something, by their folders."""
  started: _Statements
  """Of the ledger: every private training, by its identifier."""
  unclaimed: tuple[str, ...]
  """Folders outside of `private/` that hold files and no finished result."""

  def including(self, made: Sequence[results.Claimed]) -> "Released":
    """Counts results of a run, too, wherever their files are.

    Args:
      made: models and queries; those that must not be shared are left out.
    """
    own = {x.directory: x.statement for x in made if results.is_shareable(x)}
    return dataclasses.replace(self, shared={**own, **self.shared})

  @functools.cached_property
  def together(self) -> statement_lib.PrivacyStatement | None:
    """The claim for whoever sees all that is released; None: there is none.

    Formal guarantee:
      That of `joint.claim` for all results outside of `private/`. Nothing is
      claimed where a folder there holds files that no result accounts for.
    """
    if self.unclaimed or not self.shared:
      return None
    return joint.claim(list(self.shared.values()))

  @functools.cached_property
  def everything(self) -> statement_lib.PrivacyStatement | None:
    """The claim for whoever sees all private trainings; None: there is none.

    It has the delta of `together`, where there is one.

    Formal guarantee:
      That of `joint.claim` for all trainings of the ledger and all results that
      claim anything. Trainings without privacy are not covered.
    """
    together = self.together
    known = [*self.started.values(), *self.compared.values()]
    claimed = [one for one in known if one.epsilon < math.inf]
    claimed += self.shared.values()
    delta = None if together is None else together.delta or None
    return joint.claim(claimed, delta=delta) if claimed else None

  @property
  def trials(self) -> int:
    """Private trainings of which no result is here: made again, or given up."""
    held = [*self.shared.values(), *self.compared.values()]
    known = {entry for one in held for entry in one.ledger}
    return sum(
      one.epsilon < math.inf and not known >= set(one.ledger)
      for one in self.started.values()
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
  made = {folder: content["result"] for folder, content in contents.items()}
  claims = {
    folder: artifacts.from_json(
      statement_lib.PrivacyStatement, result["statement"]
    )
    for folder, result in made.items()
    if result.get("statement") is not None
  }
  shared = {k: v for k, v in claims.items() if not results.is_private_path(k)}
  path = root / results.PRIVATE / ledger.NAME
  started = ledger.read(path) if ledger.begun(path) else {}
  known = {entry for one in shared.values() for entry in one.ledger}
  # Scores tell of the systems that were scored, also of those made again since.
  behind = {
    name
    for folder in shared
    for name in made[folder].get("systems", ())
    if name in started
  }
  if any(
    name.startswith(_SCORES) and not known >= set(one.ledger)
    for name, one in started.items()
  ):  # scores were shown whose result is gone: whatever there is was scored
    behind = {k for k, one in started.items() if one.epsilon < math.inf}
  shared |= {
    f"{ledger.NAME}: {name}": one
    for name, one in started.items()
    if (name in behind or name.startswith(_SCORES))
    and not known >= set(one.ledger)
  }
  return Released(
    shared=shared,
    compared={
      folder.removeprefix(f"{results.PRIVATE}/"): claim
      for folder, claim in claims.items()
      if results.is_private_path(folder) and claim.epsilon < math.inf
    },
    started=started,
    unclaimed=tuple(_unclaimed(root, contents)),
  )


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
      # Indexes that earlier versions saved say no claim of their own.
      if top.name == "search" or not _says_its_claim(content):
        yield name


def _says_its_claim(content: Mapping[str, Any] | None) -> bool:
  """Says whether a result is there, with a claim if private records made it."""
  if content is None:
    return False
  result = content["result"]
  # Scores of older versions have an epsilon and no statement.
  return result.get("epsilon") is None or result.get("statement") is not None


def _leaves(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the topmost folders that hold files; hidden ones are no results."""
  inside = [p for p in sorted(folder.iterdir()) if not p.name.startswith(".")]
  if any(one.is_file() for one in inside):
    yield folder
    return
  for one in inside:
    if one.is_dir():
      yield from _leaves(one)
