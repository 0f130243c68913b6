"""Tests that forked programs behave as those that an interpreter of their own runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

PYTHON = sys.executable
#: Whether schedsvc's command line was there before the program asked for it: a fork has it.
IS_FORKED = "import sys; print('schedsvc.cli' in sys.modules)"


def output(*command: str, **options: object) -> str:
    done = forked.run([*command], capture_output=True, text=True, check=True, **options)
    return str(done.stdout)


def test_fork_has_the_imports_done() -> None:
    assert output(PYTHON, "-c", IS_FORKED) == "True\n"


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "GRPC_VERBOSITY", "LC_ALL"])
def test_variable_read_at_start_gets_an_interpreter(name: str) -> None:
    value = {"PYTHONHASHSEED": "7", "LC_ALL": "C.UTF-8"}.get(name, "ERROR")
    assert output(PYTHON, "-c", IS_FORKED, env={**os.environ, name: value}) == "False\n"


def test_another_program_is_started_as_it_is() -> None:
    assert output("sh", "-c", "echo $0", "x") == "x\n"


@pytest.mark.parametrize("start", [subprocess.run, forked.run], ids=["started", "forked"])
@pytest.mark.parametrize("form", ["-m", "-c", "file"])
def test_arguments_folder_and_environment_are_those_given(
    form: str, start: type, tmp_path: Path
) -> None:
    code = "import os, sys; print([sys.argv, sys.path[0], os.getcwd(), os.environ['A'], __name__])"
    program = tmp_path / "shown.py"
    program.write_text(code)
    words = {"-m": ["-m", "shown"], "-c": ["-c", code], "file": [str(program)]}[form]
    done = start(
        [PYTHON, *words, "one", "two"],
        cwd=tmp_path, env={**os.environ, "A": "b"}, capture_output=True, text=True,
    )  # fmt: skip
    path = {"-c": "", "-m": str(tmp_path), "file": str(tmp_path)}[form]
    first = "-c" if form == "-c" else str(program)
    expected = [[first, "one", "two"], path, str(tmp_path), "b", "__main__"]
    assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise ValueError('x')", 1, "ValueError: x\n"),
        ("import atexit, sys; atexit.register(print, 'left', file=sys.stderr)", 0, "left\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1, ""),
    ],
)
def test_exit_status_is_the_one_of_an_interpreter(code: str, status: int, said: str) -> None:
    for start in (subprocess.run, forked.run):
        done = start([PYTHON, "-c", code], capture_output=True, text=True)
        assert done.returncode == status
        assert done.stderr.endswith(said)
        assert bool(done.stderr) == bool(said)


def test_fork_is_a_child_that_signals_reach() -> None:
    code = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
    with forked.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"%d\n" % os.getpid()
        process.send_signal(signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert stopped is not None
        assert stopped.si_pid == process.pid
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_input_reaches_a_fork() -> None:
    code = "import sys; print(sys.stdin.read().upper())"
    assert output(PYTHON, "-c", code, input="word") == "WORD\n"


def test_threads_that_start_programs_at_once_share_a_zygote() -> None:
    """With one for each, they would take each other's orphans away, and lose their statuses."""
    code = (
        "import sys, time; from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "from tests import forked\n"
        "made, start = [], forked._Zygote.__init__\n"
        "def counted(self): made.append(self); time.sleep(0.2); start(self)\n"
        "forked._Zygote.__init__ = counted\n"
        "run = lambda n: forked.run([sys.executable, '-c', f'raise SystemExit({n})']).returncode\n"
        "print(list(Pool(8).map(run, range(8))), len(made))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [PYTHON, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{list(range(8))} 1\n"


def test_forks_draw_different_random_numbers() -> None:
    code = "import random; print(random.random())"
    assert output(PYTHON, "-c", code) != output(PYTHON, "-c", code)


def test_fork_has_no_file_of_the_zygote_open() -> None:
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    assert output(PYTHON, "-c", code) == "[0, 1, 2]\n"


def test_forks_die_with_the_process_of_the_tests() -> None:
    code = (
        "import sys, os; from tests import forked;"
        "child = forked.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[2]
    # Its children keep the pipe open: the read ends when the last of them is gone.
    with subprocess.Popen([PYTHON, "-c", code], cwd=root, stdout=subprocess.PIPE) as process:
        shown, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{int(shown)}").exists() or is_zombie(int(shown))


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
