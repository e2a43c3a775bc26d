"""The page of `synthq --help`, and what is suggested for unknown flags."""

import pathlib

import gin
import pytest

from synthq_jax import stages
from synthq_jax.cli import flags, guide, main


@pytest.fixture(name="page")
def _page(capsys):
  with pytest.raises(SystemExit, match="0"):
    main.main(["--help"])
  return capsys.readouterr().out


def test_help_names_six_commands_first_and_stages_last(page):
  titles = ("commands:", "examples:", "more commands:", "stages of `run`")
  places = [page.index(f"\n{title}") for title in titles]
  assert places == sorted(places)
  first = page[places[0] : places[1]].splitlines()
  names = [line.split()[0] for line in first if line[2:3].strip()]
  common = ["run", "search", "export", "privacy", "recipes", "settings"]
  assert names == ["commands:", *common]
  behind = page[places[3] :]
  assert all(f"\n  {name} " in behind for name in stages.SUMMARIES)
  assert all(len(line) <= 80 for line in page.splitlines())


def test_help_shows_three_examples_that_parse(page):
  examples = page.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
  assert len(examples) == 3
  top = flags.parser({**main._GUIDES, **main.tools.TOOLS})
  for line in examples:
    program, *argv = line.replace('"parse a date"', "date").split()
    assert program == "synthq" and top.parse_args(argv).stage == argv[0]


def test_every_command_stands_on_the_page_of_help(page):
  for name in (*main.STAGES, *main._GUIDES, *main.tools.TOOLS):
    assert page.count(f"\n  {name} ") == 1, name


def test_macros_of_all_gin_files_are_known():
  assert {"EPSILON", "SOURCE", "ENCODER", "FUSED"} <= {*guide.list_macros()}


@pytest.mark.parametrize(
  ("name", "macro"),
  [("Epsilon", "EPSILON"), ("batch-size", "BATCH_SIZE"), ("xyzzy", "")],
)
def test_a_macro_is_found_whatever_its_case(name, macro):
  assert flags.find_macro(name, guide.list_macros()) == macro


@pytest.mark.parametrize(
  ("lines", "value"),
  [
    (("include 'b.gin'", "include 'c.gin'"), 2.0),
    (("include 'c.gin'", "include 'b.gin'"), 1.0),
    (("EPSILON = 5.0", "include 'b.gin'"), 1.0),
    (("include 'b.gin'", "EPSILON = 5.0"), 5.0),
  ],
)
def test_a_setting_is_where_gin_takes_it_from(
  tmp_path, monkeypatch, lines, value
):
  """The first file of the list was shown, with its epsilon."""
  monkeypatch.chdir(tmp_path)
  texts = {"a": "\n".join(lines), "b": "EPSILON = 1.0", "c": "EPSILON = 2.0"}
  for name, text in texts.items():
    pathlib.Path(f"{name}.gin").write_text(f"{text}\n")
  with gin.unlock_config():
    gin.clear_config()
    gin.parse_config_file("a.gin")
    assert gin.query_parameter("EPSILON/macro.value") == value
    gin.clear_config()
  group = [pathlib.Path(f"{name}.gin") for name in texts]
  path, _, number = flags.locate("EPSILON", [group], ()).rpartition(":")
  line = pathlib.Path(path).read_text().splitlines()[int(number) - 1]
  assert line == f"EPSILON = {value}"
