"""`schedsvc workload` reads, describes, converts and makes traces."""

import click

from schedsvc_lab.workload.cli.conversations import conversations
from schedsvc_lab.workload.cli.fetch import fetch
from schedsvc_lab.workload.cli.make import label, scale, synth
from schedsvc_lab.workload.cli.prompts import prompts
from schedsvc_lab.workload.cli.read import convert, describe
from schedsvc_lab.workload.cli.servegen import servegen
from schedsvc_lab.workload.cli.users import users

__all__ = ["workload"]

EPILOG = """\b
Example:
  schedsvc workload describe --trace AzureLLMInferenceTrace_conv.csv
  schedsvc workload convert --trace BurstGPT_3.csv --out burstgpt.jsonl
  schedsvc workload synth --requests 1000 --rate 5 --tenants 27 \\
      --out synthetic.jsonl
"""


@click.group("workload", epilog=EPILOG)
def workload() -> None:
    """Read, describe, convert and make traces of requests."""


for _command in (
    describe,
    convert,
    synth,
    label,
    scale,
    prompts,
    conversations,
    fetch,
    users,
    servegen,
):
    workload.add_command(_command)
