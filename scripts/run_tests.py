"""Run the test suites one after the other, each in a process of its own, and report the coverage of explorer/ over all.

    python scripts/run_tests.py [unit] [engine] [browser] [-- pytest arguments]

Every suite runs even when an earlier one failed; the exit code is that of the first failure. The least coverage is
asked for only when all suites run. The coverage data lie in .out/coverage.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("unit", "engine", "browser")
LEAST = 95  # percent of explorer/, branches included


def main(arguments: list[str]) -> int:
    if "--" in arguments:
        cut = arguments.index("--")
        names, extra = arguments[:cut], arguments[cut + 1 :]
    else:
        names, extra = arguments, []
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        print(f"run_tests: no suite {unknown[0]!r}: there is {', '.join(SUITES)}", file=sys.stderr)
        return 2
    data = ROOT / ".out" / "coverage"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    # Children of the tests (kernels, engines in a process of their own) write their data to the same place.
    environment = os.environ | {"COVERAGE_FILE": str(data / "data")}
    coverage = [sys.executable, "-m", "coverage"]
    results = {}
    for suite in names or SUITES:
        print(f"== tests/{suite}", flush=True)
        start = time.monotonic()
        run = [*coverage, "run", "-m", "pytest", f"tests/{suite}", *extra]
        code = subprocess.run(run, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
        results[suite] = (code, time.monotonic() - start)
    print("== coverage of explorer/", flush=True)
    codes = [code for code, _ in results.values()]
    codes.append(subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, env=environment).returncode)
    least = [] if names else [f"--fail-under={LEAST}"]
    codes.append(subprocess.run([*coverage, "report", *least], cwd=ROOT, env=environment).returncode)
    for suite, (code, seconds) in results.items():
        print(f"{suite}: {'passed' if code == 0 else f'FAILED (pytest ended with {code})'} in {seconds:.0f} s")
    if codes[-1] == 2:
        print(f"coverage: FAILED, explorer/ is covered less than {LEAST} %")
    return next((code for code in codes if code != 0), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
