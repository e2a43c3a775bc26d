"""A checkout to launch from, and a gcloud that costs nothing."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


# Undoes what nohup and `&` leave to children: deafness to a terminal.
_HEARS = (
  sys.executable,
  "-c",
  "import os, signal, sys\n"
  "for number in (signal.SIGINT, signal.SIGHUP):\n"
  "  signal.signal(number, signal.SIG_DFL)\n"
  "os.execv(sys.argv[1], sys.argv[1:])",
)


@pytest.fixture(name="checkout", scope="session")
def _checkout(tmp_path_factory) -> pathlib.Path:
  """A small git checkout with the real gin files."""
  folder = tmp_path_factory.mktemp("launch") / "checkout"
  shutil.copytree(ROOT / "gin_configs", folder / "gin_configs")
  shutil.copy(ROOT / "pyproject.toml", folder)
  git = (
    "git",
    "-C",
    str(folder),
    "-c",
    "user.name=a",
    "-c",
    "user.email=a@b.c",
  )
  for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
    subprocess.run((*git, *words), check=True, capture_output=True)
  return folder


@dataclasses.dataclass(frozen=True)
class Cloud:
  """The fake gcloud of one test."""

  folder: pathlib.Path
  checkout: pathlib.Path

  @property
  def environment(self) -> dict[str, str]:
    path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "FAKE_GCLOUD": str(self.folder)}

  @property
  def flags(self) -> list[str]:
    return [
      "--accelerator=v4-16",
      "--zone=us-central2-b",
      "--project=my-project",
      "--bucket=my-bucket",
      "--private_in_bucket",
      "--gin_file=gin_configs/recipes/demo_tiny.gin",
      "--gin.MESH_DATA=-1",  # the recipe wants one device
      f"--source={self.checkout}",
      f"--results={self.folder / 'runs'}",
      "--poll_seconds=0",
    ]

  def answers(self, **answers) -> None:
    (self.folder / "answers.json").write_text(json.dumps(answers))

  def command(self, *flags: str, script: str = "tpu_vm") -> list[str]:
    path = ROOT / "launch" / f"{script}.py"
    return [sys.executable, str(path), *self.flags, *flags]

  def run(self, *flags: str, script: str = "tpu_vm"):
    return subprocess.run(
      self.command(*flags, script=script),
      env=self.environment,
      cwd=self.folder,
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )

  def start(
    self, *flags: str, script: str = "tpu_vm", **environment: str
  ) -> subprocess.Popen:
    """Starts a launcher as a terminal does: in a group of its own."""
    return subprocess.Popen(
      [*_HEARS, *self.command("--confirm_cost", *flags, script=script)],
      env={**self.environment, **environment},
      cwd=self.folder,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )

  @property
  def calls(self) -> list[dict]:
    lines = (self.folder / "calls.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  @property
  def kinds(self) -> list[str]:
    return [call["kind"] for call in self.calls]

  @property
  def costs(self) -> bool:
    return (self.folder / "vm").exists()


@pytest.fixture(name="cloud")
def _cloud(tmp_path, checkout) -> Cloud:
  (tmp_path / "bin").mkdir()
  fake = tmp_path / "bin/gcloud"
  source = pathlib.Path(__file__).with_name("fake_gcloud.py").read_text()
  fake.write_text(f"#!{sys.executable} -S\n{source}")
  fake.chmod(0o755)
  (tmp_path / "calls.jsonl").touch()
  cloud = Cloud(tmp_path, checkout)
  cloud.answers()
  return cloud
