"""`python -m tests.support` writes docs/support.md."""

from convmesh.testing import RankPool
from tests.support.page import PAGE, page
from tests.support.trials import try_all

if __name__ == "__main__":
    pool = RankPool(2)
    PAGE.write_text(page(try_all(pool)), encoding="utf-8")
    pool.close()
