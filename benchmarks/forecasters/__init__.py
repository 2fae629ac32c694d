"""Where token entropy will be some steps ahead, told from a run so far: one method a file, a function `forecast`.

    forecast(history: History, horizons: Sequence[int]) -> list[Ahead]      log H in so many steps: mean and sd

SOURCE, beside it, says where the method stands. sd is nan where the method says none: then it gets the root mean square
of its own errors on the runs that are not held out. ALARM_ONLY = True: the method says no value, only whether entropy
is low, and its errors are not scored. A new file here is in the next table, and no run is made again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class History:
    """What a run has measured, a number for each step so far; the last is that of the step it is asked at."""

    entropy: Tensor  # (n,) nats per token, of each step's batch
    stderr: Tensor  # (n,)
    forward: Tensor  # (n,) the predicted change by each step, with its error
    forward_se: Tensor  # (n,)
