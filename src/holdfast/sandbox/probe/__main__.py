"""python -m holdfast.sandbox.probe: the findings as JSON; status 0 if a strict sandbox is possible."""

import dataclasses
import json
import sys

from holdfast.sandbox import probe


def main() -> int:
    findings = probe.find()
    json.dump([dataclasses.asdict(finding) for finding in findings], sys.stdout, indent=2)
    return 0 if probe.strict(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
