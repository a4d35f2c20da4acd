"""python -m freerun.data.worker: tokenize the job that standard input describes."""

from __future__ import annotations

import sys

from freerun.data.tokenizing import Job, run_job
from freerun.errors import DataError

if __name__ == "__main__":
    try:
        run_job(Job.from_json(sys.stdin.read()))
    except DataError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
