"""Grids: the papers' own, and those of the command line."""

import itertools
import math
import pathlib
import re

import gin
import pytest

import gin_text
import sweeps
from synthq_jax.cli import main
from synthq_jax.stages import plan

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = "gin_configs/recipes/paper_t5_base.gin"
NEEDS = (
  "SOURCE=msmarco:m",
  "CHECKPOINT=t5_{size}",
  "VOCABULARY=v.model",
  "ENCODER=t5_base",
)


def _points(*texts: str, gin_file=BASE, bindings=NEEDS[:3]):
  return sweeps.points(texts, gin_file=gin_file, bindings=bindings, root=ROOT)


def _configured(point: sweeps.Point) -> plan.RunConfig:
  """What synthq makes of a point."""
  return main.configure(plan.RunConfig, [point.gin_file], point.bindings)[0]


def test_the_grid_is_the_papers():
  points = sweeps.papers_grid()
  assert len(points) == 4 * 4 * 4 * 3
  assert len({point.bindings for point in points}) == len(points)
  values = [dict(b.split("=") for b in point.bindings) for point in points]
  assert {float(v["LEARNING_RATE"]) for v in values} == {
    1e-3, 5e-4, 2.5e-4, 1.25e-4,
  }  # fmt: skip
  assert {v["CLIP_NORM"] for v in values} == {"0.1", "0.25", "0.5", "1"}
  assert {v["BATCH_SIZE"] for v in values} == {"128", "256", "512", "1024"}
  largest = [v["TRAIN_STEPS"] for v in values if v["BATCH_SIZE"] == "1024"]
  assert set(largest) == {"4910", "9820", "14730"}


def test_the_grid_changes_what_the_recipe_trains_with():
  points = _points("papers_grid")
  point = next(
    p for p in points if p.name == "lr-0p0005-clip-0p25-batch-512-epochs-20"
  )
  tuned = _configured(point).finetune_dp
  assert tuned.learning_rate == 5e-4
  assert tuned.clip_norm == 0.25
  assert tuned.batch_size == 512
  assert tuned.steps == 20 * (502_939 // 512)


def test_every_point_of_the_papers_table_is_a_run_of_its_own():
  points = _points("papers_table", gin_file=None, bindings=NEEDS)
  assert len(points) == 16
  made = {point.name: _configured(point) for point in points}
  for size, epsilon in itertools.product(
    ("small", "base", "large", "xl"), ("inf", "16", "8", "3")
  ):
    config = made[f"{size}-eps-{epsilon}"]
    value = math.inf if epsilon == "inf" else float(epsilon)
    assert config.rows.synthetic == (value,)
    assert config.checkpoint == f"t5_{size}"
  originals = [name for name, c in made.items() if c.rows.original]
  assert originals == ["base-eps-inf"]
  direct = {name: c.rows.direct_dp for name, c in made.items()}
  assert {name: rows for name, rows in direct.items() if rows} == {
    f"base-eps-{e}": (float(e),) for e in ("16", "8", "3")
  }


@pytest.mark.parametrize(
  ("sweep", "bindings"), [("papers_grid", NEEDS[:3]), ("papers_table", NEEDS)]
)
def test_names_are_safe_different_and_the_same_every_time(sweep, bindings):
  names = [p.name for p in _points(sweep, bindings=bindings)]
  assert len({*names}) == len(names)
  assert all(re.fullmatch("[a-z][a-z0-9-]*[a-z0-9]", name) for name in names)
  assert max(map(len, names)) <= 40
  assert names == [p.name for p in _points(sweep, bindings=bindings)]


def test_sweeps_multiply():
  points = _points("EPSILONS=(3.0,),(8.0, 16.0)", "CLIP_NORM=0.1,1")
  assert [p.name for p in points] == [
    "epsilons-3p0-clip-norm-0p1",
    "epsilons-3p0-clip-norm-1",
    "epsilons-8p0-16p0-clip-norm-0p1",
    "epsilons-8p0-16p0-clip-norm-1",
  ]
  config = _configured(points[-1])
  assert config.rows.synthetic == (8.0, 16.0)
  assert config.finetune_dp.clip_norm == 1.0


def test_no_sweep_is_one_point_without_a_name():
  (point,) = _points()
  assert point.name == ""
  assert _configured(point).rows.synthetic[1:] == (16.0, 8.0, 3.0)


def test_values_that_are_written_alike_get_different_names():
  points = _points("MODEL=a_b,a-b,c", gin_file=BASE)
  names = [point.name for point in points]
  assert len({*names}) == 3
  assert names[0].startswith("model-a-b-") and names[2] == "model-c"
  assert names == [p.name for p in _points("MODEL=a_b,a-b,c")]


def test_long_names_are_cut_and_stay_different():
  texts = [f"CHECKPOINT={'x' * 60}{end}" for end in "ab"]
  both = [
    _points(text, bindings=(NEEDS[0], NEEDS[2]))[0].name for text in texts
  ]
  assert len(set(both)) == 2
  assert all(len(name) <= 40 for name in both)


@pytest.mark.parametrize(
  ("texts", "bindings", "words"),
  [
    (["CLIP_NORM"], NEEDS[:3], "papers_grid, papers_table"),
    (["=1,2"], NEEDS[:3], "expected --sweep=NAME=a,b,c"),
    (["CLIP_NORM=1,2", "CLIP_NORM=3"], NEEDS[:3], "two sweeps"),
    (["CLIP=1"], NEEDS[:3], "does not define"),
    (["CLIP_NORM=1"], (*NEEDS[:3], "CLIP_NORM=2"), "keep one"),
    ([], NEEDS[:1], "give --gin.CHECKPOINT=... --gin.VOCABULARY=..."),
    ([], (*NEEDS[:3], "CLIP_NROM=2"), "no gin file defines CLIP_NROM"),
  ],
)
def test_what_is_wrong_is_said_in_one_line(texts, bindings, words):
  with pytest.raises(ValueError) as caught:
    _points(*texts, bindings=bindings)
  assert words in str(caught.value)
  assert "\n" not in str(caught.value)


def test_a_recipe_is_needed():
  with pytest.raises(ValueError, match="expected --gin_file"):
    _points("papers_grid", gin_file=None)


@pytest.mark.parametrize(
  "path",
  sorted((ROOT / "gin_configs/recipes").glob("*.gin")),
  ids=lambda p: p.stem,
)
def test_macros_read_as_text_are_those_that_gin_reads(path):
  gin.clear_config()
  gin.add_config_file_search_path(str(ROOT))
  try:
    gin.parse_config_file(str(path))
    text = gin.config_str()
  finally:
    gin.clear_config()
  required = rf"(?m)^(\w+) =\s+(?:\\\n\s+)?{gin_text.REQUIRED}$"
  known = gin_text.macros(path, ROOT)
  assert set(known) == set(re.findall(r"(?m)^(\w+) =", text))
  assert {n for n in known if known[n] == gin_text.REQUIRED} == set(
    re.findall(required, text)
  )
