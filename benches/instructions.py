"""Instructions of one sequence in one steady decode step, counted by valgrind and held against a committed budget.

``python benches/instructions.py`` prints the count, ``--check`` fails above the budget by more than the tolerance, ``--update``
writes the count as the new budget. Counts repeat to a fraction of a percent on one toolchain, so this does not flap like a time.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "benches" / "instructions.json"
SEQUENCES = 256
# Multiples of the block (64), so that each run fills the same number of blocks a step.
STEPS = (128, 384)
TOLERANCE = 0.05
# Rows of a sequence in each case, drafts included; proposing them is counted too.
CASES = {"decode": 1, "decode_overlap": 1, "drafts_6": 6}


def build() -> Path:
    """Builds the example with the CI profile and returns its path."""
    command = ["cargo", "build", "--profile", "ci", "-p", "deepinfer-scheduler", "--example", "steady_decode", "--message-format=json"]
    result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    for line in result.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "steady_decode" and message.get("executable"):
            return Path(message["executable"])
    raise SystemExit("cargo built no executable named steady_decode")


def count(executable: Path, steps: int, case: str) -> int:
    """Instructions of a whole run of ``steps`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", str(executable), str(steps), case]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"valgrind failed:\n{result.stderr}")
    found = re.search(r"Collected : (\d+)", result.stderr)
    if found is None:
        raise SystemExit(f"valgrind printed no count:\n{result.stderr}")
    expected = f"{case}: {SEQUENCES} sequences, {steps} steps, {SEQUENCES * steps * CASES[case]} rows"
    if expected not in result.stdout:
        raise SystemExit(f"the run was not a steady decode: {result.stdout.strip()!r}")
    return int(found.group(1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="fail above the budget")
    group.add_argument("--update", action="store_true", help="write the budget")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: install it to count instructions", file=sys.stderr)
        return 2
    executable = build()
    budgets: dict[str, float] = json.loads(BUDGET.read_text(encoding="utf-8"))
    counted, over = {}, False
    for case in CASES:
        short, long = (count(executable, steps, case) for steps in STEPS)
        each = (long - short) / ((STEPS[1] - STEPS[0]) * SEQUENCES)
        counted[case] = round(each, 2)
        change = each / budgets.get(case, each) - 1
        print(f"{case}: {each:.2f} instructions per sequence and step, budget {budgets.get(case, each):.2f}, {change:+.1%}")
        over = over or change > TOLERANCE
        if change < -TOLERANCE and not options.update:
            print("well below the budget: lower it with --update, so that it keeps holding")
    if options.update:
        BUDGET.write_text(json.dumps(counted, indent=2) + "\n", encoding="utf-8")
        return 0
    if options.check and over:
        print(f"over the budget by more than {TOLERANCE:.0%}: make the step leaner, or raise benches/instructions.json with a reason")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
