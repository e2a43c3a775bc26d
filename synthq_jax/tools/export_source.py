"""Reads a result for an export, with the record and the data of its run."""

import dataclasses
import math
import pathlib

from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import model_files, results, system_results
from synthq_jax.storage import artifacts

__all__ = ["Source", "check_target", "read"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A result to export."""

  folder: pathlib.Path
  """Folder of the result."""
  result: (
    results.Checkpoint
    | results.SyntheticQueries
    | system_results.Ranking
    | None
  )
  """Record that a run wrote; None for a checkpoint from elsewhere."""
  root: pathlib.Path | None
  """Working directory of the run; None if the folder is not inside one."""
  prepared: results.PreparedData | None
  """Record of the run's prepared data, with its lengths; None without a run."""
  stored_statement: statement_lib.PrivacyStatement | None = None
  """Statement in the folder of a checkpoint that no run wrote, or T5X's ledger."""

  @property
  def vocabulary(self) -> pathlib.Path | None:
    """Path of the vocabulary next to the checkpoint, else of its run's."""
    paths = [model_files.vocabulary_beside(self.folder)]
    if self.root is not None:
      paths.append(self.root / "prepare_data" / model_files.VOCABULARY_NAME)
    return next((path for path in paths if path.is_file()), None)

  @property
  def token_ids(self) -> token_ids_lib.TokenIds | None:
    """Special token ids of the vocabulary; None without one."""
    path = self.vocabulary
    return None if path is None else vocabulary_lib.load(path).token_ids

  @property
  def claim(self) -> statement_lib.PrivacyStatement | None:
    """Privacy statement of the training; None if nothing is known of it."""
    return (
      self.stored_statement if self.result is None else self.result.statement
    )

  @property
  def is_private(self) -> bool:
    """True if the result must not be shared.

    That is so if its folder, or the folder in its record, is under `private/`, or
    if its statement claims nothing. Moving it out does not make it shareable.
    """
    folder, root = self.folder.resolve(), self.root and self.root.resolve()
    # A folder above the run may be called "private", too.
    if root and folder.is_relative_to(root):
      folder = folder.relative_to(root)
    if results.is_private_path(folder.as_posix()):
      return True
    if self.result is not None:
      return not results.is_shareable(self.result)
    return self.stored_statement is not None and math.isinf(
      self.stored_statement.epsilon
    )


def read(folder: pathlib.Path) -> Source:
  """Reads a result, and the record and data of its run if there is one.

  Args:
    folder: the result's folder, or a checkpoint that no run wrote.

  Raises:
    ValueError: if the folder is missing or damaged, or no export takes its result.
  """
  kinds = {
    kind.__name__: kind
    for kind in (
      results.Checkpoint,
      results.SyntheticQueries,
      system_results.Adapter,
      system_results.Ranking,
    )
  }
  result = root = prepared = None
  if not folder.is_dir():
    raise ValueError(f"{folder}: expected the folder of a result, got none")
  if artifacts.read_fingerprint(folder) is not None:
    artifacts.check(folder, everywhere=False)
    content = artifacts.read_json(folder / artifacts.RESULT_NAME)
    record = content["result"]
    if record.get("_type") == system_results.Fusion.__name__:
      fusion = artifacts.load(folder, system_results.Fusion)
      raise ValueError(
        f"{folder}: expected a model or queries, got the weight"
        f" {fusion.weight:g} of {fusion.retriever} beside BM25: export the"
        f" checkpoint of the row {fusion.retriever} and apply the weight"
        " to scores of your search, scaled to [0, 1] among the first"
        f" {fusion.depth} of each system; the statement in"
        f" {artifacts.RESULT_NAME} here covers both together"
      )
    kind = kinds.get(record.get("_type"))
    if kind is not None:
      result = artifacts.load(folder, kind)
  if result is not None:
    path_in_run = pathlib.PurePosixPath(result.directory).parts
    absolute = folder.resolve()
    if absolute.parts[-len(path_in_run) :] == path_in_run:
      root = absolute.parents[len(path_in_run) - 1]
    elif not isinstance(result, results.Checkpoint) or isinstance(
      result, system_results.Adapter
    ):
      raise ValueError(
        f"{folder}: expected the result in its run, at {result.directory}, got a"
        " copy elsewhere: export it from the run"
      )
    data = root and root / results.PRIVATE / "prepare_data"
    # A copy without private/ has no such folder; a run that is under way has one.
    if data and data.is_dir():
      artifacts.check_data(folder, data)
      artifacts.check(data, here=False)  # the public part, which is exported
      prepared = artifacts.load(data, results.PreparedData)
  stored_statement = t5_checkpoints.claim(folder) if result is None else None
  return Source(
    folder=folder,
    result=result,
    root=root,
    prepared=prepared,
    stored_statement=stored_statement,
  )


def check_target(target: pathlib.Path) -> None:
  """Refuses a folder inside of a result or a report, which a run replaces.

  Args:
    target: the folder of an export.

  Raises:
    ValueError: naming the folder around it.
  """
  for folder in target.resolve().parents:
    is_report = folder.name == "report" and (folder / "report.html").exists()
    if is_report or (folder / artifacts.RESULT_NAME).exists():
      raise ValueError(
        f"--to={target}: {folder} belongs to a run, which removes all in it when it"
        " makes the result anew: choose a folder beside it"
      )
