"""The page of `synthq --help`, and where settings are found."""

import pathlib

import gin
import pytest

from synthq_jax.cli import flags, main


@pytest.fixture(name="page")
def _page(capsys):
  with pytest.raises(SystemExit, match="0"):
    main.main(["--help"])
  return capsys.readouterr().out


def test_every_command_stands_on_the_page_of_help(page):
  for name in (*main.STAGES, *main._GUIDES, *main.tools.TOOLS):
    assert page.split().count(name) > 0, name


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
