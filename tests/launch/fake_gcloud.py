"""Stands in for gcloud: notes every call, and answers as a test wants.

The folder in FAKE_GCLOUD holds `answers.json`, which maps kinds of calls to
lists of answers, one for each call of the kind and the last one again and again:
an exit code, a text that it prints, {"fail": TEXT}, or "hang". `calls.jsonl` is
what was called; a file `vm` is there while the slice is.
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
  "queue": ["ACTIVE"],
}


def kind_of(argv: list[str]) -> str:
  """What a call is for."""
  text = " ".join(argv)
  if argv[0] == "auth":
    return "account"
  if argv[0] == "storage":
    return "bucket" if "describe" in argv else "results"
  if "ssh" in argv:
    marks = {
      "synthq.lock": "run",
      "mountpoint": "mount",
      "uv venv": "install",
      "tar -czf": "pack_results",
    }
    return next(name for mark, name in marks.items() if mark in text)
  if "scp" in argv:
    return "copy" if "--worker=all" in argv else "results"
  if "describe" in argv:
    return "queue" if "queued-resources" in argv else "state"
  return next(word for word in ("create", "delete", "list") if word in argv)


def main(argv: list[str]) -> int:
  """Notes the call, keeps track of the slice, answers."""
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
