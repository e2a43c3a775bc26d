"""Docstrings: of small packages made for one test, and of the real ones."""

import importlib

import pytest

from synthq_jax.data import docstrings, environment_docs


def module_source(docs):
  """Returns a module with one public function for each (first, rest)."""
  return "\n".join(
    f'def function_{number}():\n  """{first}\n\n  {rest}\n  """\n'
    for number, (first, rest) in enumerate(docs)
  )


@pytest.fixture
def install(tmp_path, monkeypatch):
  """Returns install(package, files, version="1.0"): package on sys.path.

  `files` maps paths inside the package to sources, or is a list of
  (first paragraph, rest) that becomes one module.
  """
  monkeypatch.syspath_prepend(tmp_path)

  def make(package, files, version="1.0"):
    if not isinstance(files, dict):
      files = {"things.py": module_source(files)}
    for name, source in {"__init__.py": "", **files}.items():
      path = tmp_path / package / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(source)
    info = tmp_path / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
      f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    )
    (info / "top_level.txt").write_text(f"{package}\n")
    importlib.invalidate_caches()

  return make


@pytest.fixture(scope="session")
def installed_docstrings():
  """Returns package -> docstrings of the demo set: read once, it takes 10 s."""
  found = {}
  for package in environment_docs.PACKAGES:
    try:
      found[package] = list(docstrings.read(package))
    except ValueError:
      continue  # not installed
  return found


@pytest.fixture
def read_once(installed_docstrings, monkeypatch):
  """Hands the installed docstrings out from memory for one test."""

  def read(package):
    if package not in installed_docstrings:
      raise ValueError(f"{package} is not installed")
    return iter(installed_docstrings[package])

  monkeypatch.setattr(docstrings, "read", read)
  return installed_docstrings
