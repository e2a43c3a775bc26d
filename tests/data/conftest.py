"""Docstrings of small packages made for one test."""

import importlib

import pytest


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
