"""`python -m convmesh`: the command line without an installed script."""

import sys

from convmesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
