"""`python -m tests.support` writes docs/support.md."""

from convmesh.testing import run_ranks
from tests.support.page import PAGE, page
from tests.support.trials import try_all

if __name__ == "__main__":
    PAGE.write_text(page(run_ranks(2, try_all)[0]), encoding="utf-8")
