"""Grids of gin bindings: the papers' own, and those of the command line.

A sweep is a list of points; a point has a name and the bindings that make it.
Both launchers (xm.py, tpu_vm.py) run one job for each point, in a working
directory of its own. Each such job is a private training with a ledger of its
own: whoever chooses among them by private results owes the sum of all of them.
A seed is such a point, too (SEED=0,1,2), and `synthq means` says what their runs
score in the mean.
"""

import dataclasses
import difflib
import functools
import hashlib
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence

import gin_text

__all__ = [
  "READY",
  "Point",
  "names_are_safe",
  "papers_grid",
  "papers_table",
  "parse",
  "points",
  "short",
]

_MSMARCO_QUERIES = 502_939  # n of the papers' set when the unit is the query
_RECIPE = "gin_configs/recipes/paper_t5_{size}.gin"
_SAFE = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST = 40  # a VM's name has at most 63 characters, and the job's is in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """One point of a grid."""

  name: str  # of lower-case letters, digits and hyphens: files, VMs
  bindings: tuple[str, ...] = ()  # NAME=value, as behind --gin.
  gin_file: str | None = None  # where the point has a recipe of its own
  labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Values for `{...}` in other bindings, e.g. {"size": "base"}."""


def papers_grid(num_records: int = _MSMARCO_QUERIES) -> tuple[Point, ...]:
  """Returns the grid that the papers searched: 192 points.

  They searched it with T5 Small (paper_t5_small.gin) and took the best BLEU on a
  validation set. Nothing here chooses: every point owes its epsilon.
  Learning rate 1e-3 * 2**-k for k = 0..3, clip norm, batch size and epochs.
  Recipes know steps, not epochs: an epoch is n // batch size of them.

  Args:
    num_records: n, the private training records. Default: MS MARCO's.

  Returns:
    The points.
  """
  rates = [1e-3 * 2**-k for k in range(4)]
  clips = (0.1, 0.25, 0.5, 1.0)
  grid = itertools.product(rates, clips, (128, 256, 512, 1024), (10, 20, 30))
  return tuple(
    Point(
      name=(
        f"lr-{_slug(f'{rate:g}')}-clip-{_slug(f'{clip:g}')}"
        f"-batch-{batch}-epochs-{epochs}"
      ),
      bindings=(
        f"LEARNING_RATE={rate:g}",
        f"CLIP_NORM={clip:g}",
        f"BATCH_SIZE={batch}",
        f"TRAIN_STEPS={epochs * (num_records // batch)}",
      ),
    )
    for rate, clip, batch, epochs in grid
  )


def papers_table() -> tuple[Point, ...]:
  """Returns the papers' generators: four sizes, each at epsilon inf, 16, 8 and 3.

  Their tables have T5-Base at all four epsilons, and the other sizes at 3 alone.
  The rows that do not depend on the generator are made once: training on the
  real queries with T5-Base at inf, direct DP with T5-Base at each epsilon, about
  a week of a TPU v4 chip each, which the chips of a slice share.
  """
  return tuple(
    _table_point(size, epsilon)
    for size in ("small", "base", "large", "xl")
    for epsilon in ("inf", "16", "8", "3")
  )


def _table_point(size: str, epsilon: str) -> Point:
  value = "%INF" if epsilon == "inf" else f"{float(epsilon)}"
  direct = f"{value}," if size == "base" and epsilon != "inf" else ""
  bindings = [f"EPSILONS=({value},)", f"DIRECT_EPSILONS=({direct})"]
  if (size, epsilon) != ("base", "inf"):
    bindings.append("plan.Rows.original=False")
  return Point(
    name=f"{size}-eps-{epsilon}",
    bindings=tuple(bindings),
    gin_file=_RECIPE.format(size=size),
    labels={"size": size, "epsilon": epsilon},
  )


READY = {"papers_grid": papers_grid, "papers_table": papers_table}
"""Sweeps by the name that --sweep takes."""


def parse(text: str) -> tuple[Point, ...]:
  """Reads one --sweep: the name of a ready one, or NAME=a,b,c.

  >>> [p.name for p in parse("CLIP_NORM=0.1,1")]
  ['clip-norm-0p1', 'clip-norm-1']

  Args:
    text: the flag's value. Commas inside brackets or quotes do not separate.

  Returns:
    The points.

  Raises:
    ValueError: if it is neither.
  """
  name, equals, values = text.partition("=")
  if not equals and name in READY:
    return READY[name]()
  options = [value.strip() for value in _split(values)]
  if not equals or not name.strip() or not all(options):
    raise ValueError(
      f"expected --sweep=NAME=a,b,c or one of {', '.join(READY)}, got"
      f" --sweep={text}"
    )
  label = _slug(name.rpartition(".")[2])
  return tuple(
    Point(
      name=f"{label}-{_slug(value)}".rstrip("-"),
      bindings=(f"{name.strip()}={value}",),
      labels={name.strip(): value},
    )
    for value in options
  )


def points(
  sweeps: Sequence[str],
  *,
  gin_file: str | None,
  bindings: Sequence[str],
  root: pathlib.Path,
) -> tuple[Point, ...]:
  """Returns the product of sweeps, complete and checked.

  Args:
    sweeps: values of --sweep; none: a single point without a name.
    gin_file: the recipe of points that have none of their own.
    bindings: NAME=value for every point. `{size}` and other labels of a point
      are filled in. A macro goes to the points whose recipe defines it.
    root: the checkout with the gin files.

  Returns:
    Points with a gin file and all bindings, with different names.

  Raises:
    ValueError: if a gin file is missing, nobody defines a macro, a macro is
      swept twice, or one without a default is given no value.
  """
  combined = itertools.product(*map(parse, sweeps))
  joined = [
    functools.reduce(_join, combination, Point(name=""))
    for combination in combined
  ]
  complete = [_complete(point, gin_file, bindings, root) for point in joined]
  for binding in bindings:
    _check_somebody_has(binding, complete, root)
  named = _distinct(complete)
  assert names_are_safe([point.name for point in named])
  return named


def short(name: str, limit: int = _LONGEST) -> str:
  """Shortens a name deterministically, keeping different ones different.

  >>> short("a" * 50, 20)
  'aaaaaaaaaaaa-160b4e4'
  """
  if len(name) <= limit:
    return name
  digest = hashlib.sha256(name.encode()).hexdigest()[:7]
  return f"{name[: limit - 8].rstrip('-')}-{digest}"


def names_are_safe(names: Sequence[str]) -> bool:
  """Whether names are different, and fit for files and machines."""
  return len(set(names)) == len(names) and all(
    not name or _SAFE.fullmatch(name) for name in names
  )


def _split(text: str) -> list[str]:
  """Splits at the commas that stand outside brackets and quotes."""
  parts, depth, quote = [""], 0, ""
  for letter in text:
    if quote:
      quote = "" if letter == quote else quote
    elif letter in "'\"":
      quote = letter
    depth += (letter in "([{") - (letter in ")]}") if not quote else 0
    if letter == "," and not depth and not quote:
      parts.append("")
    else:
      parts[-1] += letter
  return parts


def _slug(text: str) -> str:
  """Letters, digits and hyphens that say what a value is."""
  text = re.sub(r"(?<=\d)\.(?=\d)", "p", text.lower())
  return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _name_of(binding: str) -> str:
  return binding.partition("=")[0].strip()


def _join(left: Point, right: Point) -> Point:
  """One point of a product."""
  twice = {_name_of(b) for b in left.bindings} & {
    _name_of(b) for b in right.bindings
  }
  if twice or (left.gin_file and right.gin_file):
    setting = min(twice) if twice else "the recipe"
    raise ValueError(
      f"{setting} stands in two sweeps; give each --sweep another macro"
    )
  return Point(
    name=f"{left.name}-{right.name}".strip("-"),
    bindings=(*left.bindings, *right.bindings),
    gin_file=left.gin_file or right.gin_file,
    labels={**left.labels, **right.labels},
  )


def _complete(
  point: Point,
  gin_file: str | None,
  bindings: Sequence[str],
  root: pathlib.Path,
) -> Point:
  """Adds recipe and common bindings, and holds them against the recipe."""
  recipe = point.gin_file or gin_file
  if recipe is None:
    raise ValueError(
      "expected --gin_file=FILE, got none; try"
      " --gin_file=gin_configs/recipes/demo.gin"
    )
  defined = gin_text.macros(gin_text.find(recipe, root), root)
  swept = {_name_of(binding) for binding in point.bindings}
  for name in sorted(swept):
    if "." not in name and name not in defined:
      raise ValueError(
        f"--sweep changes {name}, which {recipe} does not define; it has"
        f" {', '.join(sorted(defined))}"
      )
  common = [
    _fill(binding, point.labels)
    for binding in bindings
    if "." in _name_of(binding) or _name_of(binding) in defined
  ]
  if twice := swept & {_name_of(binding) for binding in common}:
    raise ValueError(
      f"{min(twice)} stands in --sweep and in --gin.{min(twice)}; keep one"
    )
  bound = swept | {_name_of(binding) for binding in common}
  missing = [
    n for n in defined if defined[n] == gin_text.REQUIRED and n not in bound
  ]
  if missing:
    flags = " ".join(f"--gin.{name}=..." for name in missing)
    raise ValueError(f"values are missing: give {flags} (see {recipe})")
  return dataclasses.replace(
    point, gin_file=recipe, bindings=(*common, *point.bindings)
  )


def _fill(binding: str, labels: Mapping[str, str]) -> str:
  for label, value in labels.items():
    binding = binding.replace(f"{{{label}}}", value)
  return binding


def _check_somebody_has(
  binding: str, complete: Sequence[Point], root: pathlib.Path
) -> None:
  """Refuses a binding that no point's recipe knows."""
  name = _name_of(binding)
  if "=" not in binding or not name:
    raise ValueError(f"expected --gin.NAME=value, got --gin.{binding}")
  if any(name == _name_of(b) for point in complete for b in point.bindings):
    return
  defined = sorted(
    {
      macro
      for point in complete
      for macro in gin_text.macros(gin_text.find(point.gin_file, root), root)
    }
  )
  close = difflib.get_close_matches(name, defined, 1) or defined
  raise ValueError(
    f"--gin.{binding}: no gin file defines {name}; did you mean"
    f" {', '.join(close)}?"
  )


def _distinct(complete: Sequence[Point]) -> tuple[Point, ...]:
  """Shortens names, and tells apart those that look alike."""
  names = [point.name for point in complete]
  return tuple(
    dataclasses.replace(
      point,
      name=short(
        point.name
        if names.count(point.name) == 1
        # Values such as 1.0 and "1-0" are written alike.
        else f"{point.name}-{_digest(point.bindings)}"
      ),
    )
    for point in complete
  )


def _digest(bindings: Sequence[str]) -> str:
  return hashlib.sha256("\n".join(bindings).encode()).hexdigest()[:7]
