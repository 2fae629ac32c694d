"""Run `python -m rl_training.attach SCRIPT.py`: probes on the trainers of a script, see hosts/trl/launcher.py.

`attach` of the package stays the function: imported under its own name, this module stands back for it.
"""

from __future__ import annotations

import sys

from rl_training.hosts.trl import attach

if __name__ == "__main__":
    from rl_training.hosts.trl.launcher import main

    main()
else:
    sys.modules[__name__] = attach  # type: ignore[assignment]  # what import binds to the package's name `attach`
