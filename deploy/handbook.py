"""Writes the pages of docs/reference/ that follow from the running code.

`make handbook` runs `python -m deploy.handbook`. The texts are those of the metrics, of click's
commands and of the settings, so a change of a text belongs there. It needs `schedsvc-lab`, because
it imports each command.
"""

import argparse
from pathlib import Path

from deploy.command_pages import commands_page
from deploy.file_schema import schema_text
from deploy.metric_pages import metrics_page

__all__ = ["OUTPUTS", "ROOT"]

ROOT = Path(__file__).resolve().parents[1]
#: The generated files, each with the function that writes its text.
OUTPUTS = {
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/commands.md": commands_page,
    "docs/reference/configuration.schema.json": schema_text,
}

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m deploy.handbook", description=__doc__).parse_args()
    for path, write in OUTPUTS.items():
        (ROOT / path).write_text(write())
