"""Run `python -m rl_training.attach SCRIPT.py`: probes on the trainers of a script, see hosts/trl/launcher.py.

Importing this module gives the function `attach`, so `rl_training.attach` is the function before and after.
"""

from __future__ import annotations

import sys

from rl_training.hosts.trl import attach

if __name__ == "__main__":
    from rl_training.hosts.trl.launcher import main

    main()
else:
    sys.modules[__name__] = attach  # type: ignore[assignment]  # import binds this to rl_training.attach
