"""Set what verl reads on import: a platform for the CPU, and the engines that it registers for "cuda"."""

import os

os.environ |= {"VERL_USE_EXTERNAL_MODULES": "cpu_platform", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
