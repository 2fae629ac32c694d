"""What every training of a few steps would do again, and which takes it as long as the steps themselves."""

import functools
import gc
import importlib.metadata


def spare_trainings() -> None:
    """Called once after the imports: from then on trainings are spared half of their time.

    The garbage collector, which each calls, no longer walks over the objects of the imports, half a second; and
    accelerate, which asks at every backward whether peft and DeepSpeed are installed, is answered from memory.
    """
    gc.freeze()
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
