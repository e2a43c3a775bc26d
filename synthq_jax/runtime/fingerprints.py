"""Fingerprints the files and versions that results depend on."""

import ast
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import synthq_jax
from synthq_jax.models import sentence_encoder, t5_checkpoints
from synthq_jax.optim import auto
from synthq_jax.storage import artifacts, file_lists

__all__ = [
  "check_checkpoint",
  "check_file",
  "machine",
  "of_checkpoint",
  "of_file",
  "of_result",
  "program",
  "versions",
]


_COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_LIBRARIES = re.compile(
  r"flax|optax|jax[-_]privacy|libtpu|jax[-_](cuda|rocm).*|nvidia-(cublas|cudnn)-.*"
  r"|bm25s|pystemmer|faiss[-_].*|numba|scipy",  # candidate search
  re.IGNORECASE,
)


def versions() -> str:
  """Names the libraries that draw batches and noise; a new version is a new
  release."""
  return f"jax {jax.__version__}, numpy {np.__version__}"


def program(
  config: Any, mesh: jax.sharding.Mesh | None, read: Sequence[pathlib.Path] = ()
) -> str:
  """Digests the settings, code and devices that decide a gradient's last bits.

  The digest covers all settings, also those that change only the speed, the
  devices, the code and the contents read. A public result that is made again on
  another machine keeps its fingerprint and may have other bits; the digest then
  differs. The model of the CPU and the nondeterminism of an accelerator are not
  covered.

  Args:
    config: the stage's settings; its field `settings`, of saving and reporting,
      is left out.
    mesh: devices of the training; None: one device.
    read: folders of results that the training reads.
  """
  settings = dict(artifacts.to_json(config))
  settings.pop("settings", None)
  lists = (folder / artifacts.FILES_NAME for folder in read)
  return artifacts.fingerprint(
    settings,
    machine(mesh, settings.get("strategy", "auto")),
    [of_file(path) for path in lists if path.exists()],
  )


def machine(mesh: jax.sharding.Mesh | None, strategy: str | None = None) -> str:
  """Digests the devices, this package, its libraries and their settings.

  Args:
    mesh: devices of the training; None: one device.
    strategy: how gradients are clipped, if they are; "auto" also depends on the
      memory.
  """
  config: Any = jax.config  # its flags are made at run time
  return artifacts.fingerprint(
    _code(),
    auto.memory() if strategy == "auto" else None,
    None if mesh is None else list(mesh.shape.items()),
    jax.process_count(),
    jax.default_backend(),
    jax.local_devices()[0].device_kind,
    jaxlib.__version__,
    *(os.environ.get(name, "") for name in _COMPILER_FLAGS),
    *_libraries(),
    str(config.jax_default_matmul_precision),
    (config.jax_threefry_partitionable, config.jax_enable_x64),
  )


@functools.cache
def _libraries() -> list[str]:
  """Lists the installed libraries other than JAX that compute results."""
  installed = importlib.metadata.distributions()
  relevant = (
    package for package in installed if _LIBRARIES.fullmatch(package.name or "")
  )
  return sorted({f"{package.name} {package.version}" for package in relevant})


@functools.cache
def _code() -> str:
  """Digests the modules of this package."""
  return _digest_code(pathlib.Path(synthq_jax.__file__).parent)


def _digest_code(root: pathlib.Path) -> str:
  """Digests the modules below a folder, without comments and docstrings.

  A comment that is mended between a kill and the next start therefore does not
  interrupt a training: it continues, and the ledger gets no other release.
  """
  digest = hashlib.sha256()
  for path in sorted(root.rglob("*.py")):
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
      fields = vars(node)
      if isinstance(body := fields.get("body"), list):
        fields["body"] = [each for each in body if not _is_docstring(each)]
    content = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    digest.update(f"{path.relative_to(root)} {content}\n".encode())
  return digest.hexdigest()


def _is_docstring(node: ast.AST) -> bool:
  """Checks whether a statement is a text alone: a docstring."""
  value = node.value if isinstance(node, ast.Expr) else None
  return isinstance(value, ast.Constant) and isinstance(value.value, str)


def of_result(fingerprint: str, result: Any) -> str:
  """Returns the fingerprint by which other results depend on this one.

  A private training that is made again has the same settings and another noise.
  The identifiers of its releases in the ledger tell the two results apart.

  Args:
    fingerprint: the fingerprint of its settings and of the results it reads.
    result: the result.
  """
  claim = getattr(result, "statement", None)
  entries = getattr(claim, "ledger", ())
  if not entries:
    return fingerprint
  return artifacts.fingerprint(
    fingerprint, *(entry.identifier for entry in entries)
  )


def of_checkpoint(directory: pathlib.Path) -> str:
  """Fingerprints the public checkpoint that a stage starts from."""
  files = t5_checkpoints.files(directory)
  if sentence_encoder.is_folder(directory):
    files = sentence_encoder.files(directory)
  return artifacts.fingerprint(*map(of_file, files))


def of_folder(directory: str | os.PathLike) -> str:
  """Fingerprints the files below a folder, such as a BERT's, with their names.

  Folders whose names begin with a dot, such as .git, are left out.
  """
  root = pathlib.Path(directory)
  names = {path.relative_to(root): path for path in file_lists.below(root)}
  return artifacts.fingerprint(
    [
      (name.as_posix(), of_file(path))
      for name, path in names.items()
      if not any(part.startswith(".") for part in name.parts[:-1])
    ]
  )


def of_file(path: str | os.PathLike) -> str:
  """Digests a file; "train" stands for a vocabulary that the run trains."""
  path = pathlib.Path(path)
  if path == pathlib.Path("train"):
    return "train"
  check_file(path)
  with open(path, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def check_checkpoint(directory: pathlib.Path) -> None:
  """Refuses a checkpoint with a missing or truncated file."""
  for path in t5_checkpoints.files(directory):
    check_file(path)
  t5_checkpoints.check(directory)


def check_file(path: pathlib.Path) -> None:
  """Refuses a file of a checkpoint, or a vocabulary, that is missing."""
  if not path.is_file():
    advice = "check CHECKPOINT and VOCABULARY"
    if path.suffix == ".model" and path.with_name("tokenizer.json").is_file():
      advice = (
        "transformers 5 saves tokenizer.json alone, which does not replace it;"
        " copy spiece.model from the model that this one was trained from"
      )
    if path.with_name("adapter_config.json").is_file():
      advice = "merge this adapter of PEFT into its model (merge_and_unload)"
    raise ValueError(
      f"expected a file of a checkpoint, got no file {path}: {advice}"
    )
