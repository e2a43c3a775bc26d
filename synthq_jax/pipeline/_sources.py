"""Where a collection comes from: a kind and a place, as settings name it."""

import dataclasses
import hashlib
import os
import pathlib

from synthq_jax.data import (
  beir,
  collection,
  environment_docs,
  jsonl,
  msmarco,
  tfds_beir,
)

__all__ = ["Source", "parse"]

_KINDS = ("environment_docs", "beir:DIR", "msmarco:DIR", "jsonl:FILE")


@dataclasses.dataclass(frozen=True)
class Source:
  """A collection that has not been read yet.

  Attributes:
    kind: "environment_docs", "beir", "msmarco", "jsonl" or "tfds".
    place: a folder, a file, or NAME@QRELS for tfds; "" for the demo set.
    seed: of splits, where the source has none of its own.
    fields: of a line, for jsonl.
  """

  kind: str
  place: str
  seed: int = 0
  fields: jsonl.Fields = jsonl.Fields()  # noqa: RUF009  (frozen)

  def read(self) -> collection.Collection:
    """Reads it; documents in files stay there.

    Raises:
      ValueError: if a file is missing or malformed.
    """
    if self.kind == "environment_docs":
      return environment_docs.build(self._demo())
    if self.kind == "beir":
      return beir.read_beir(self.place, in_memory=False)
    if self.kind == "msmarco":
      return msmarco.read_msmarco(self.place, in_memory=False)
    if self.kind == "tfds":
      name, _, qrels = self.place.partition("@")
      return tfds_beir.read(name, qrels)
    return jsonl.read_jsonl(self.place, self.fields, seed=self.seed)

  def packages(self) -> str:
    """Names the packages and versions of the demo set; "" for others."""
    if self.kind == "environment_docs":
      return environment_docs.digest(self._demo())
    return ""

  def digest(self) -> str:
    """Returns what the content depends on.

    Names and versions of packages for the demo set, a digest of the content for
    files, so that a changed file is read again and a moved one is not.
    """
    if self.kind == "environment_docs":
      return self.packages()
    name, _, qrels = self.place.partition("@")
    if self.kind == "tfds":
      return f"{name} {_digest_of(pathlib.Path(qrels))}"
    return _digest_of(pathlib.Path(self.place) if self.place else None)

  def _demo(self) -> environment_docs.EnvironmentDocs:
    return environment_docs.EnvironmentDocs(seed=self.seed)


def parse(
  text: str, setting: str, *, seed: int = 0, fields: jsonl.Fields | None = None
) -> Source:
  """Reads a setting such as "beir:DIR".

  Args:
    text: of `_KINDS`, or "tfds:NAME@QRELS": a set that TFDS has prepared, and
      the folder of its judgements.
    setting: its name, for the message.
    seed: of splits.
    fields: of a line, for jsonl.

  Raises:
    ValueError: if it is of no such kind.
  """
  kind, _, place = text.partition(":")
  needs_place = kind in ("beir", "msmarco", "jsonl")
  fits = (
    (kind == "environment_docs" and not place)
    or (needs_place and place)
    or (kind == "tfds" and all(place.partition("@")))
  )
  if not fits:
    raise ValueError(
      f"{setting} must be {', '.join(_KINDS)} or tfds:NAME@QRELS, got"
      f" source={text!r}"
    )
  return Source(kind, place, seed, fields or jsonl.Fields())


def _digest_of(root: pathlib.Path | None) -> str:
  """Digests a file, or all files of a folder by their names below it."""
  state = hashlib.sha256()
  if root is None:
    return state.hexdigest()
  files = [root]
  if root.is_dir():
    walked = os.walk(root, followlinks=True)
    files = [
      pathlib.Path(place, n) for place, _, names in walked for n in names
    ]
  for path in sorted(files):
    if path.is_file():
      state.update(path.relative_to(root).as_posix().encode() + b"\0")
      with open(path, "rb") as stream:
        state.update(hashlib.file_digest(stream, "sha256").digest())
  return state.hexdigest()
