"""Everything that a run left behind, against what another one did.

Checkpoints, queries, run files, the numbers of the report, the ledger. Times are the
only thing that may differ between a run that was killed and one that was not.
"""

import json
import pathlib
import re

RECIPE = pathlib.Path(__file__).with_suffix(".gin")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMES = re.compile(r"\b(\d+ h )?(\d+ min )?\d+(\.\d+)? (s|min|h)\b")
NO_RESULT = {".lock"}
"""Files that say who is running."""


def content(path: pathlib.Path) -> bytes:
  """What has to be equal: everything but times."""
  data = path.read_bytes()
  try:
    return _timeless(path, data)
  except Exception:  # damaged: as it is
    return data


def _timeless(path: pathlib.Path, data: bytes) -> bytes:
  if path.name == "result.json":
    return json.dumps(_without_times(json.loads(data))).encode()
  if path.name == "files.json":  # digests of files that hold times
    return json.dumps(sorted(json.loads(data)["files"])).encode()
  if path.suffix in (".html", ".md"):
    return TIMES.sub("TIME", data.decode()).encode()
  if path.suffix == ".npz":
    return _arrays(path)  # the archive holds the time of writing
  return data


def _without_times(value):
  if isinstance(value, dict):
    timed = ("seconds", "checksum")
    return {k: _without_times(v) for k, v in value.items() if k not in timed}
  if isinstance(value, list):
    return [_without_times(v) for v in value]
  return value


def _arrays(path: pathlib.Path) -> bytes:
  import numpy as np

  with np.load(path) as arrays:
    parts = [
      f"{k} {v.dtype} {v.shape}".encode() + v.tobytes()
      for k, v in arrays.items()
    ]
  return b"".join(parts)


def files(workdir: pathlib.Path) -> dict[str, bytes]:
  """The contents of everything that a run left behind, by path."""
  return {
    path.relative_to(workdir).as_posix(): content(path)
    for path in sorted(workdir.rglob("*"))
    if path.is_file() and path.name not in NO_RESULT
  }


def differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
  """Names the files that are not equal, or are only in one of the two."""
  ours, theirs = files(one), files(other)
  names = sorted(ours.keys() | theirs.keys())
  return [name for name in names if ours.get(name) != theirs.get(name)]
