"""Stands in for gcloud: notes every call, and answers as a test wants.

The folder in FAKE_GCLOUD holds `answers.json`, which maps kinds of calls to
lists of answers, one for each call of the kind and the last one again and again:
an exit code, a text that it prints, {"fail": TEXT}, or "hang". `calls.jsonl` is
what was called; a file `vm` is there while the slice is. Results that it is told
to copy come with a private file in them, whose mode is that of any new file.
"""

import json
import os
import pathlib
import sys
import time

FOLDER = pathlib.Path(os.environ["FAKE_GCLOUD"])
PLAIN = {
  "account": ["someone@example.org"],
  "bucket": ["True"],
  "list": [""],
  "state": ["READY"],
  "slice": ["READY\tv4-16"],  # as gcloud separates values
  "queue": ["ACTIVE"],
}


# What is typed by hand before a slice: flags, and what gcloud prints.
BY_HAND = {
  ("auth", "login"): ((), "You are now logged in as [someone@example.org]."),
  ("services", "enable"): (
    ("--project",),
    'Operation "operations/acat.p2-1-5" finished successfully.',
  ),
  ("storage", "buckets", "create"): (
    ("--project", "--location", "--uniform-bucket-level-access",
     "--enable-hierarchical-namespace", "--public-access-prevention",
     "--soft-delete-duration"),
    "Creating gs://my-bucket/...",
  ),
  ("iam", "service-accounts", "create"): (
    ("--project",), "Created service account [synthq].",
  ),
  ("storage", "buckets", "add-iam-policy-binding"): (
    ("--member", "--role"), "bindings:\n- members: ...",
  ),
  ("storage", "cp"): (
    ("--recursive",), "Copying file://my_set/corpus.jsonl to gs://my-bucket/",
  ),
  ("storage", "ls"): ((), "gs://my-bucket/demo/\ngs://my-bucket/my_set/"),
  ("compute", "tpus", "tpu-vm", "list"): (
    ("--zone", "--project"), "Listed 0 items.",
  ),
}  # fmt: skip


def by_hand(argv: list[str]) -> str | None:
  """Answers a command of a person; None where a launcher asks.

  A flag that gcloud does not know ends it, as gcloud's own parser would.
  """
  if "--quiet" in argv:
    return None
  for words, (known, said) in BY_HAND.items():
    if tuple(argv[: len(words)]) == words:
      flags = [w.partition("=")[0] for w in argv if w.startswith("--")]
      if wrong := [flag for flag in flags if flag not in known]:
        sys.exit(f"ERROR: (gcloud) unrecognized arguments: {wrong[0]}")
      return said
  return None


def kind_of(argv: list[str]) -> str:
  """What a call is for."""
  text = " ".join(argv)
  if argv[0] == "auth":
    return "account"
  if argv[0] == "storage":
    return "bucket" if "describe" in argv else "results"
  if "ssh" in argv:
    marks = {
      "fuser": "stop",
      "synthq.lock": "run",
      "mountpoint": "mount",
      "uv venv": "install",
      "tar -czf": "pack_results",
      'rm -f "$HOME': "clean_results",
    }
    return next(name for mark, name in marks.items() if mark in text)
  if "scp" in argv:
    return "copy" if "--worker=all" in argv else "results"
  if "describe" in argv and "acceleratorType" in text:
    return "slice"
  if "describe" in argv:
    return "queue" if "queued-resources" in argv else "state"
  return next(word for word in ("create", "delete", "list") if word in argv)


def copy_results(argv: list[str]) -> None:
  """Writes what rsync, or scp of an archive, would leave on this machine."""
  if "rsync" in argv:
    secret = pathlib.Path(argv[-1]) / "private/secret_seed"
    if not any(word.startswith("--exclude=") for word in argv):
      secret.parent.mkdir(exist_ok=True)
      secret.write_text("7")
    return
  import tarfile  # slow, and no other call needs it

  words = [word for word in argv if not word.startswith("--")]
  folder, name = pathlib.Path(words[-1]), words[-2].partition(":")[2]
  with tarfile.open(folder / name, "w:gz") as archive:
    archive.addfile(tarfile.TarInfo("private/secret_seed"))  # mode 644


def main(argv: list[str]) -> int:
  """Notes the call, keeps track of the slice, answers."""
  if (said := by_hand(argv)) is not None:
    with open(FOLDER / "calls.jsonl", "a") as calls:
      calls.write(json.dumps({"kind": "by hand", "argv": argv}) + "\n")
    print(said)
    return 0
  kind = kind_of(argv)
  earlier = (FOLDER / "calls.jsonl").read_text().splitlines()
  count = sum(json.loads(line)["kind"] == kind for line in earlier)
  with open(FOLDER / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({"kind": kind, "argv": argv}) + "\n")
  answers = json.loads((FOLDER / "answers.json").read_text())
  options = answers.get(kind) or PLAIN.get(kind, [0])
  answer = options[min(count, len(options) - 1)]
  slice_ = FOLDER / "vm"
  if kind == "create" and answer == 0:
    slice_.touch()
  if kind == "delete" and answer in (0, "slow"):
    if not slice_.exists():
      print("ERROR: NOT_FOUND: no such node", file=sys.stderr)
      return 1
    time.sleep(2 if answer == "slow" else 0)
    slice_.unlink()
    return 0
  if kind == "results" and answer == 0:
    copy_results(argv)
  if answer == "hang":
    time.sleep(60)
  if isinstance(answer, dict):
    print(answer["fail"], file=sys.stderr)
    return 1
  if isinstance(answer, str):
    print(answer)
    return 0
  return answer


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
