"""The support page says what the tests show."""

from tests.conftest import Pools
from tests.support.page import PAGE, page
from tests.support.trials import UNTRIED, try_all


def test_page_is_up_to_date_and_every_function_has_a_sample(pools: Pools) -> None:
    cells = try_all(pools[2])
    assert not [name for name, row in cells.items() if UNTRIED in row], "add a sample to tests/support/samples.py"
    assert page(cells) == PAGE.read_text(encoding="utf-8"), "run `make docs`"
