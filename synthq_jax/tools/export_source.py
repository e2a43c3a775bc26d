"""Reads a result that is to be exported, with what its run says of it."""

import dataclasses
import math
import pathlib

from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints
from synthq_jax.models import token_ids as token_ids_lib
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.runtime import inputs, results, system_results
from synthq_jax.storage import artifacts

__all__ = ["Source", "read"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A result that is to be exported."""

  folder: pathlib.Path
  """Folder of the result."""
  result: (
    results.Checkpoint
    | results.SyntheticQueries
    | system_results.Ranking
    | None
  )
  """Record of its run; None where no run made it."""
  root: pathlib.Path | None
  """The working directory of that run."""
  prepared: results.PreparedData | None
  """That run's data, of which the settings are read."""
  in_t5x: statement_lib.PrivacyStatement | None = None
  """Record of a private training in T5X's own trainer."""

  @property
  def vocabulary(self) -> pathlib.Path | None:
    """The vocabulary beside a checkpoint, or that of its run."""
    places = [inputs.vocabulary_beside(self.folder)]
    if self.root is not None:
      places.append(self.root / "prepare_data" / inputs.VOCABULARY_NAME)
    return next((place for place in places if place.is_file()), None)

  @property
  def token_ids(self) -> token_ids_lib.TokenIds | None:
    """The special ids of its vocabulary."""
    path = self.vocabulary
    return None if path is None else vocabulary_lib.load(path).token_ids

  @property
  def claim(self) -> statement_lib.PrivacyStatement | None:
    """Privacy statement of its training; None where nothing is known of it."""
    return self.in_t5x if self.result is None else self.result.statement

  @property
  def is_private(self) -> bool:
    """Whether it must not be shared: by its folder, wherever it was moved to,
    and by its claim."""
    place, root = self.folder.resolve(), self.root and self.root.resolve()
    if root and place.is_relative_to(root):  # folders above do not count
      place = place.relative_to(root)
    if results.is_private_path(place.as_posix()):
      return True
    if self.result is not None:
      return not results.is_shareable(self.result)
    return self.in_t5x is not None and math.isinf(self.in_t5x.epsilon)


def read(folder: pathlib.Path) -> Source:
  """Reads what a run says about its result, and about its data.

  Args:
    folder: of the result, or of a checkpoint that no run made.

  Raises:
    ValueError: if there is none, it was damaged, or it is nothing to export.
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
    made = content["result"]
    if made.get("_type") == system_results.Fusion.__name__:
      fused = artifacts.load(folder, system_results.Fusion)
      raise ValueError(
        f"{folder}: expected a model or queries, got the weight"
        f" {fused.weight:g} of {fused.retriever} beside BM25: export the"
        f" checkpoint train_retriever/{fused.retriever} and apply the weight"
        f" where you search, to scores that {type(fused.method).__name__} made"
        f" comparable among the first {fused.depth} of each; the"
        f" statement in {artifacts.RESULT_NAME} here is that of both together"
      )
    kind = kinds.get(made.get("_type"))
    if kind is not None:
      result = artifacts.load(folder, kind)
  if result is not None:
    place, own = folder.resolve(), pathlib.PurePosixPath(result.directory).parts
    if place.parts[-len(own) :] == own:
      root = place.parents[len(own) - 1]
    elif not isinstance(result, results.Checkpoint):
      raise ValueError(
        f"{folder}: expected a run's result where it put it, at"
        f" {result.directory}, beside its other results: give it there"
      )
    data = root and root / results.PRIVATE / "prepare_data"
    if data and artifacts.read_fingerprint(data) is not None:
      artifacts.check(data, here=False)  # the public part, which is exported
      artifacts.check_data(folder, data)
      prepared = artifacts.load(data, results.PreparedData)
  in_t5x = t5_checkpoints.claim(folder) if result is None else None
  return Source(
    folder=folder, result=result, root=root, prepared=prepared, in_t5x=in_t5x
  )
