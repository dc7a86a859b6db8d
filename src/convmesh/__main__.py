"""`python -m convmesh`: the command line without an installed script."""

from convmesh.cli import script

if __name__ == "__main__":
    script()
