"""On the path of a host's processes: their clock is an hour ahead."""

import time

_true = time.time
time.time = lambda: _true() + 3600.0
