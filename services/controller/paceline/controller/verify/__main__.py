"""`paceline verify RUN_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.controller.verify.check import verify
from paceline.core.errors import PacelineError, exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints counts and which invariants hold; returns 1 for a breach, 2 if there is no run."""
    parser = argparse.ArgumentParser(prog="python -m paceline.controller.verify", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, help="holds events.jsonl and config.resolved.yaml")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write counts and breaches to this file"
    )
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir
    try:
        findings = verify(run_dir)
    except PacelineError as error:
        print(f"paceline verify: {error}", file=sys.stderr)
        return exit_code(error)
    except OSError as error:
        print(f"paceline verify: {run_dir} holds no run: {error}; give a run directory", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(findings.to_json() + "\n", encoding="utf-8")
    print(*findings.lines(), sep="\n")
    print("sound" if not findings.breaches else f"{len(findings.breaches)} breach(es)")
    return 1 if findings.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
