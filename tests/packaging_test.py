"""The wheel and the sdist, installed; and what runs beside few packages."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import missing
import pytest
from missing import run
from packaging import requirements

import synthq_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE_INDEX = (ROOT / "docs/index.rst").read_text()


SCRIPT = """
import pathlib, jax, jax.numpy as jnp, synthq_jax
from synthq_jax import losses, optim, privacy
folder = pathlib.Path(synthq_jax.__file__).parent
assert (folder / "py.typed").is_file()
grad_fn = optim.clipped_grad(
  lambda params, batch: (batch @ params) ** 2, l2_clip_norm=0.1)
tx = optim.dp_adam(
  1e-3, l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE"),
  noise_multiplier=1.0, denominator=4, key=jax.random.key(0))
params = jnp.ones(3)
total, _ = grad_fn(params, jnp.ones((4, 3)))
updates, _ = tx.update(total, tx.init(params), params)
assert jnp.isfinite(updates).all()
from synthq_jax.privacy import accounting, sampling
sampler = sampling.Poisson.with_margin(
  num_examples=1000, expected_batch_size=50)
accounting.noise_multiplier(
  epsilon=8.0, delta=1e-4, sampler=sampler, steps=10)
print(folder)
"""
"""A private step and its noise, with what the base brings."""


def build(kind, place, root=ROOT):
  run(
    *(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", place),
    cwd=root,
  )
  [made] = place.iterdir()
  return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  pytest.importorskip("hatchling", reason="builds wheels")
  return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
  """An environment with the wheel alone; returns its folder."""
  place = tmp_path_factory.mktemp("env") / "env"
  venv.create(place, with_pip=False)
  run(
    *(sys.executable, "-m", "pip", "--python", place / "bin/python"),
    *("install", "--quiet", "--no-deps", "--no-index", wheel),
    cwd=place,
  )
  return place


def base():
  """Names that the base brings, by what its packages ask for."""
  todo = [re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]]
  found = set()
  while todo:
    name = todo.pop().lower().replace("_", "-")
    if name in found:
      continue
    found.add(name)
    for line in importlib.metadata.requires(name) or ():
      asked = requirements.Requirement(line)
      if asked.marker is None or asked.marker.evaluate({"extra": ""}):
        todo.append(asked.name)
  return found


def others():
  """Packages by the names of imports that the base does not bring."""
  wanted = base()
  brought = importlib.metadata.packages_distributions()
  return {
    name
    for name, owners in brought.items()
    if not {owner.lower().replace("_", "-") for owner in owners} & wanted
  } - {"synthq_jax"}


def with_base(place):
  """Lets an environment see the packages of the base, and no others."""
  [site] = place.glob("lib/*/site-packages")
  (site / "block.py").write_text(missing.script(others()))
  seen = importlib.util.find_spec("jax").origin
  beside = pathlib.Path(seen).parents[1]
  (site / "base.pth").write_text(f"{beside}\nimport block\n")


@pytest.mark.slow
def test_an_installed_wheel_works_beside_the_base_alone(installed):
  python, synthq = installed / "bin/python", installed / "bin/synthq"
  clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  version = run(synthq, "--version", cwd=installed, env=clean)
  assert version == f"synthq {synthq_jax.__version__}\n"
  with_base(installed)
  where = run(python, "-c", SCRIPT, cwd=installed, env=clean)
  assert pathlib.Path(where.strip()).is_relative_to(installed)
  done = subprocess.run(
    [synthq, "run"], cwd=installed, env=clean, capture_output=True, text=True
  )
  assert done.returncode == 2
  assert done.stderr == (
    "synthq: gin is not installed: pip install 'synthq_jax[run]'\n"
  )


@pytest.mark.slow
def test_the_wheel_asks_for_the_base_and_the_base_for_nothing_large(wheel):
  with zipfile.ZipFile(wheel) as opened:
    [name] = [n for n in opened.namelist() if n.endswith("/METADATA")]
    lines = opened.read(name).decode().partition("\n\n")[0].splitlines()
  asked = [
    requirements.Requirement(line.partition(":")[2])
    for line in lines
    if line.startswith("Requires-Dist:") and "extra ==" not in line
  ]
  said = map(requirements.Requirement, PROJECT["dependencies"])
  assert set(asked) == set(said)
  assert {"jax", "optax", "jax-privacy"} <= base()
  assert not {"flax", "gin-config", "orbax-checkpoint", "tensorflow"} & base()


def test_a_built_wheel_holds_configurations_assets_and_licence(wheel):
  """Also of assets what .gitignore names, which a build leaves out."""
  held = set(zipfile.ZipFile(wheel).namelist())
  expected = {
    f"synthq_jax/{path.relative_to(ROOT)}"
    for path in (ROOT / "gin_configs").rglob("*.gin")
  }
  for folder in ("assets", "runtime", "report", "stages"):
    files = (ROOT / "synthq_jax" / folder).rglob("*")
    expected |= {
      str(p.relative_to(ROOT))
      for p in files
      if p.is_file() and p.suffix != ".pyc"
    }
  assert expected <= held
  assert any(name.endswith("licenses/LICENSE") for name in held)
  assert wheel.stat().st_size < 25e6


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(wheel, tmp_path):
  archive = build("sdist", tmp_path / "sdist")
  with tarfile.open(archive) as opened:
    opened.extractall(tmp_path / "source", filter="data")
  [source] = (tmp_path / "source").iterdir()
  again = build("wheel", tmp_path / "wheel", source)
  names = zipfile.ZipFile(wheel).namelist()
  assert sorted(zipfile.ZipFile(again).namelist()) == sorted(names)
  assert "synthq_jax/py.typed" in names


def test_a_run_comes_to_its_report_without_tensorflow(finished_run):
  packages = json.loads(
    (finished_run.root.parent / "packages.json").read_text()
  )
  assert {"jax", "synthq_jax"} <= set(packages)
  assert not missing.TENSORFLOW & set(packages)
  assert (finished_run.root / "report/report.html").is_file()


def test_the_site_lists_every_package():
  listed = set(re.findall(r"^   (synthq_jax\.\w+)$", SITE_INDEX, re.M))
  places = (ROOT / "synthq_jax").iterdir()
  modules = {path.stem for path in places if path.suffix == ".py"}
  packages = {
    path.parent.name for path in (ROOT / "synthq_jax").glob("*/__init__.py")
  }
  public = {name for name in modules | packages if not name.startswith("_")}
  assert listed == {f"synthq_jax.{name}" for name in public}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
  reason = "builds the site: pip install 'synthq_jax[docs]'"
  for name in ("sphinx", "myst_parser"):
    pytest.importorskip(name, reason=reason)
  shutil.copytree(  # pages of modules are written beside the index
    ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("api")
  )
  run(
    *(sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"),
    *("-D", "autodoc_typehints=none"),  # a fifth of the time
    *("-c", "docs/site", "docs", "site"),
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  api = tmp_path / "site/site/api"
  page = (api / "synthq_jax.optim.clipping.html").read_text()
  assert 'id="synthq_jax.optim.clipping.clipped_grad"' in page
  assert "Formal guarantee" in page
  shown = {path.stem for path in api.iterdir()}
  files = (ROOT / "synthq_jax").rglob("*.py")
  modules = [path.relative_to(ROOT).with_suffix("").parts for path in files]
  assert shown == {
    ".".join(parts).removesuffix(".__init__")
    for parts in modules
    if parts[1] != "assets"
    and not any(part.startswith("_") for part in parts[1:-1])
    and not re.match("_(?!_init__)", parts[-1])
  } - {"synthq_jax"}
  guides = {path.stem for path in (tmp_path / "site").rglob("*.html")}
  assert {path.stem for path in (ROOT / "docs").rglob("*.md")} <= guides


def test_the_version_is_said_once():
  assert PROJECT["dynamic"] == ["version"]
  assert re.fullmatch(r"\d+\.\d+\.\d+", synthq_jax.__version__)


def test_everything_that_is_cited_names_the_same_software():
  """Author, title, year, version and address: here, in CITATION.cff, in cards."""
  from synthq_jax.tools import cards

  lines = (ROOT / "CITATION.cff").read_text().splitlines()
  cff = dict(
    re.findall(r"^([\w-]+): (.+)", line)[0]
    for line in lines
    if ": " in line and line[0].isalpha()
  )
  bibtex = cards._CITATION % synthq_jax.__version__
  fields = dict(re.findall(r"(?m)^  (\w+) = \{+(.*?)\}+,?$", bibtex))
  plain = {key: text.replace("\\_", "_") for key, text in fields.items()}
  [author] = PROJECT["authors"]
  assert (
    f"  - name: {author['name']}" in lines and plain["author"] == author["name"]
  )
  assert plain["url"] == cff["url"] == PROJECT["urls"]["Homepage"]
  assert plain["version"] == cff["version"] == synthq_jax.__version__
  assert plain["year"] == cff["date-released"][:4]
  assert f'"{plain["title"]}"' == cff["title"]
  assert plain["license"] == cff["license"] == PROJECT["license"]
  changelog = (ROOT / "docs/changelog.md").read_text()
  assert f"## [{cff['version']}] - {cff['date-released']}" in changelog


def test_addresses_of_the_project_end_in_files_that_are_there():
  root = PROJECT["urls"]["Homepage"]
  for name, url in PROJECT["urls"].items():
    below = url.removeprefix(root).removeprefix("/blob/main/")
    assert url.startswith(root) and (ROOT / below).exists(), name


def test_pages_for_contributors_are_a_page_each():
  for name in ("SECURITY.md", "docs/CONTRIBUTING.md"):
    assert 30 < len((ROOT / name).read_text().splitlines()) < 100, name
  guides = SITE_INDEX.partition(":caption: API")[0].split()
  assert guides.index("tutorials/*") < guides.index("privacy")
  assert "CONTRIBUTING" in guides
