"""`python -m convmesh`: the command line without an installed script."""

import os
import sys

from convmesh.cli import main

if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:
        # A rank of a job: after a failure, threads of its process groups may abort the interpreter's own exit, which
        # would turn "bad input" into a crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
