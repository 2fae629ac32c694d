"""What vl-convert does, in a process of its own: PNG of charts, and the JavaScript that draws them in a page.

Its threads do not survive a fork of the process that has used it, and its memory is not the training's.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from rl_training.records.atomic_write import write_atomically
from rl_training.records.report.charts import Chart

VEGA_LITE = "6.1"  # of those that vl-convert has; 6.4 loses what a pointed-at point says
PICTURES = """
import base64, json, sys, vl_convert
for spec in json.load(sys.stdin):
    print(base64.b64encode(vl_convert.vegalite_to_png(spec, vl_version=sys.argv[1], scale=2)).decode())
"""
BUNDLE = "import sys, vl_convert; sys.stdout.write(vl_convert.javascript_bundle(None, sys.argv[1]))"


def pictures(charts: Sequence[Chart]) -> dict[str, bytes]:
    """Returns the PNG of each chart that has something to draw, black on white, by the name of its file."""
    drawn = [chart for chart in charts if chart.series]
    if not drawn:
        return {}
    lines = _run(PICTURES, json.dumps([chart.standalone() for chart in drawn])).splitlines()
    return {f"{chart.name}.png": base64.b64decode(line) for chart, line in zip(drawn, lines, strict=True)}


def javascript() -> str:
    """Returns the JavaScript of Vega, Vega-Lite and vega-embed, which vl-convert holds; kept in the user's cache.

    Putting it together takes vl-convert two seconds.
    """
    name = f"vega-lite-{VEGA_LITE}-{version('vl-convert-python')}.js"
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-training" / name
    if not kept.is_file():
        text = _run(BUNDLE).replace("</script", "<\\/script")
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically({kept: text.encode()})
        return text
    return kept.read_text(encoding="utf-8")


def _run(program: str, text: str = "") -> str:
    command = [sys.executable, "-P", "-c", program, VEGA_LITE]  # -P: a json.py of the working folder is not imported
    environment = {**os.environ, "PYTHONUTF8": "1"}
    ended = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", env=environment, check=False)
    if ended.returncode:
        raise RuntimeError(f"vl-convert could not draw a chart: {' '.join(ended.stderr.split())[-300:]}")
    return ended.stdout
