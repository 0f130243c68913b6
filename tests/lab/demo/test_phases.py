import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from schedsvc_lab.demo.engine import running_engine
from schedsvc_lab.demo.phases import Setting, _run
from schedsvc_lab.demo.processes import DemoError
from schedsvc_lab.demo.traffic import generate


async def test_an_engine_that_died_before_its_phase_is_named(tmp_path: Path) -> None:
    """The refused connection, which the phase meets first, is not what the error names."""
    setting = Setting(generate(1, 5.0), 1, tmp_path, Console(quiet=True))
    async with running_engine(setting.folder, "alone") as (engine, url):
        os.kill(engine.process.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match="engine-alone ended with status -9"):
            await _run(setting, "alone", "1/4", setting.trace, url, (engine,))
