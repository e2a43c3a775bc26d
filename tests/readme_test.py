"""README: its block runs as it is printed, its commands are those that tests run."""

import pathlib
import re
import shlex
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def _commands(text: str) -> list[list[str]]:
  """Returns the words of each `synthq` command of a page, comments left out."""
  lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
  lines = lines.replace("\\\n", " ").splitlines()
  return [
    shlex.split(line, comments=True)
    for line in lines
    if line.startswith("synthq ")
  ]


def test_the_block_trains_and_prints_its_guarantee(capsys):
  (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  names: dict = {}
  exec(compile(block, "README.md", "exec"), names)  # noqa: S102
  printed = capsys.readouterr().out
  promised = names["promise"].statement("my model")
  shown = re.search(
    r"epsilon (\d+) and delta ([\d.]+) for each single example", README
  )
  assert promised.epsilon == pytest.approx(float(shown[1]), abs=0.01)
  assert promised.delta == float(shown[2])
  assert f"({shown[1]}, {shown[2]})-differentially private" in printed
  scores = names["x"] @ names["params"]["kernel"]
  assert (scores.argmax(axis=1) == names["records"]["y"]).mean() > 0.9


@pytest.mark.parametrize(
  "change", ["l2_clip_norm=10.0", "l2_clip_norm=0.1, rescale_to_unit_norm=True"]
)
@pytest.mark.parametrize(
  "page",
  [
    "README.md",
    "docs/examples/plain_jax.py",
    "docs/examples/jax_privacy_port.py",
  ],
)
def test_the_noise_follows_a_gradient_that_is_changed_alone(page, change):
  """The clip norm is written once, so that nobody can change half of it."""
  text = (ROOT / page).read_text("utf-8")
  if page == "README.md":
    (text,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  assert text.count("l2_clip_norm=1.0") == 1
  text = text.partition("@jax.jit")[0].replace("l2_clip_norm=1.0", change)
  names: dict = {}
  exec(compile(text, page, "exec"), names)  # noqa: S102
  moved = names["grad_fn"].sensitivity("ADD_OR_REMOVE_ONE")
  assert names["promise"].l2_sensitivity == moved
  assert "l2_sensitivity=promise.l2_sensitivity" in text  # of its optimizer


def test_the_commands_for_a_log_are_those_that_the_tutorials_run():
  """tests/tutorials_test.py runs both pages from a log to exports."""
  pages = [
    (ROOT / f"docs/tutorials/{name}.md").read_text("utf-8")
    for name in ("ship_it", "adapter")
  ]
  run = [
    [word for word in command if word != "--dry_run"]
    for page in pages
    for command in _commands(page)
  ]
  commands = _commands(README)
  assert len(commands) == 4
  for command in commands:
    assert command in run


def test_the_demo_is_installed_by_the_script_of_the_repository():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
  ]
  assert f"git clone {project['urls']['Homepage']} " in README
  assert "\nbash launch/local.sh " in README
  assert (ROOT / "launch/local.sh").exists()


def test_the_five_queries_are_the_first_of_those_that_were_drawn():
  fifty = (ROOT / "docs/lab/fifty_queries.md").read_text("utf-8")
  rows = re.findall(r"(?m)^\| \d+ \| (.*?) \| (.*) \| (\w+) \|$", fifty)
  verdicts = [verdict for *_, verdict in rows]
  assert len(rows) == 50
  table = README.partition("| answered? |")[2].partition("\n\n")[0]
  shown = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
  assert len(shown) == 5
  for (query, document, verdict), row in zip(shown, rows, strict=False):
    assert (query, verdict) == (row[0], row[2])
    begins = document.removesuffix(" ...")
    assert row[1].startswith(begins) or begins.startswith(row[1][:-4])
  counts = [verdicts.count(x) for x in ("yes", "partly", "no")]
  said = re.search(
    r"judged the fifty: (\d+) yes, (\d+) partly\s.*?, (\d+) no", README, re.S
  )
  assert counts == [int(x) for x in said.groups()]
