"""Tests wrong lines over all commands: each gets a sentence, the right status, and no traceback."""

import shlex
import sys
from pathlib import Path

import pytest

from schedsvc.cli import main
from tests import forked

from .test_cli import run

FILES = {
    "bad.csv": b"arrival_s,client,prompt_tokens,output_tokens\n0,a,x,5\n",
    "bad.yaml": b"listeners: [{tcp: x}]\n",
    "binary": b"\x00\x01\xff",
    "broken.jsonl": b'{"a":',
    "empty": b"",
    "ok.csv": b"arrival_s,client,prompt_tokens,output_tokens\n0,a,5,5\n",
    "ok.yaml": b"listeners: [{unix: /tmp/s}]\n",
}
#: A line, the exit status (2: the line itself is wrong), and the sentence.
WRONG = [
    ("serv", 2, "No such command 'serv'. Did you mean 'serve'?"),
    ("--versoin", 2, "No such option '--versoin'. Did you mean '--version'?"),
    ("serve --config nowhere.yaml", 1, "cannot read the file: No such file or directory"),
    ("serve --config bad.yaml", 1, "bad.yaml:1:19: listeners[0].tcp: has to be HOST:PORT"),
    ("serve --config binary", 1, "binary:1:1: not UTF-8 text (byte 2)"),
    ("serve --config .", 2, "File '.' is a directory."),
    ("serve --config ok.yaml --ready-file /no/r", 2, "the folder of /no/r does not exist; make it"),
    ("serve --config ok.yaml --watch-config 0", 2, "0.0 is not in the range x>=0.1."),
    ("edge --config ok.yaml", 1, "ok.yaml: the key 'edge' is missing; add it"),
    ("check empty", 1, "empty: 1 error"),
    ("check ok.yaml --config ok.yaml", 2, "give one configuration file, as FILE or as --config"),
    ("health everything", 2, "'everything' is not one of 'liveness', 'readiness'."),
    ("health --target unix:/no/s", 1, "no scheduler answers at that address (No such file or"),
    ("stats --target nowhere", 2, "target 'nowhere' must be host:port or unix:/path, such as"),
    ("stats --target 127.0.0.1:99999", 2, "port 99999 is not in 1..65535"),
    ("stats --flows 0", 2, "0 is not in the range 1<=x<=10000."),
    ("stats --tls-ca nowhere.pem", 2, "Path 'nowhere.pem' does not exist."),
    ("stats --tls-cert binary", 1, "certificate_file and key_file belong together; give both or"),
    ("stats --token-file empty", 2, "empty is empty; write the token into it"),
    ("stats --token-file empty --token-env X", 2, "exclude each other; give one of them"),
    ("top", 2, "`schedsvc top` needs a terminal; `schedsvc stats --watch` prints the same"),
    ("top --every 0", 2, "0.0 is not in the range 0.2<=x<=3600."),
    ("why", 2, "Missing argument 'REQUEST_ID'."),
    ("drain", 2, "name a pool, or give --all"),
    ("drain p --wait -1", 2, "-1.0 is not in the range x>=0.0."),
    ("leases revoke abc", 2, "'abc' is not a whole number."),
    ("leases list --limit -1", 2, "-1 is not in the range x>=0."),
    ("mode off", 2, "'off' is not one of 'enforce', 'dry_run', 'configured'."),
    ("tenants set a --weight 1.2345", 2, "'1.2345' has more than 3 decimals"),
    ("tenants list --origin x", 2, "'x' is not one of 'file', 'operator', 'rule'."),
    ("tenants keys rotate a --grace soon", 2, "'soon' is not a number."),
    ("pools release", 2, "Missing argument 'NAME'."),
    ("cluster init --config ok.yaml", 1, "ok.yaml has no section `cluster`; see"),
    ("usage export --config ok.yaml", 1, "ok.yaml has no usage.path, so no ledger is kept; add it"),
    ("usage export --config ok.yaml --since then", 2, "'then' is no time; write 2026-11-30 or"),
    ("state backup --config ok.yaml x.db", 1, "ok.yaml has no state.file, so no state is kept"),
    ("completion tcsh", 2, "'tcsh' is not one of 'bash', 'zsh', 'fish'."),
    ("quickstart", 2, "stdin is no terminal, so nothing can be asked; give --yes, or name tenants"),
    ("quickstart --yes --folder .", 1, "exists, and is left as it is; name another folder with"),
    ("demo --quick --out binary", 2, "Directory 'binary' is a file."),
    ("demo --failover --cluster", 2, "--failover and --cluster are two demos; give one of them"),
    ("sim", 2, "give --trace FILE and at least one --policy, --suite NAME or --replay FILE"),
    ("sim --trace binary --policy vtc", 1, "binary:1:3: not UTF-8: invalid start byte"),
    ("sim --trace bad.csv --policy vtc", 1, "bad.csv:2:prompt_tokens: not a whole number: 'x'"),
    ("sim --trace broken.jsonl --policy vtc", 1, "broken.jsonl:1:6: Expecting value"),
    ("sim --trace ok.csv --policy vtc --set engine", 2, "'engine': give NAME=VALUE, such as"),
    ("sim --trace ok.csv --policy vtc --profile best", 2, "profile 'best' is unknown; known are"),
    ("sim --replay binary", 1, "binary: is no recording of schedsvc"),
    ("advise --trace ok.csv", 2, "Missing option '--goal'."),
    ("predict --trace empty", 1, "the file begins with no header and no JSON; is it empty?"),
    ("simtest --seed -1", 2, "-1 is not in the range 0<=x<="),
    ("emulate --port 99999", 2, "99999 is not in the range 0<=x<=65535."),
    ("emulate --profile no.yaml", 2, "profile no.yaml: cannot be read: No such file or directory"),
    ("emulate --middleware no.such.Class", 2, "cannot import: No module named 'no'"),
    ("load --url ftp://x --trace ok.csv", 2, "must begin with http:// or https://, is 'ftp://x'"),
    ("load --url http://127.0.0.1:9 --trace nowhere", 2, "File 'nowhere' does not exist."),
    ("workload synth --rate 0 --out x", 2, "0.0 is not in the range x>0."),
    ("workload fetch nothing", 2, "'nothing' is unknown; known names: azure-2023-conv"),
    ("prefix --trace ok.csv", 2, "Missing option '--out'."),
    ("converse --trace nowhere --url http://127.0.0.1:9", 2, "File 'nowhere' does not exist."),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "status", "sentence"), WRONG, ids=[row[0] for row in WRONG])
def test_wrong_line_ends_with_a_sentence(
    line: str, status: int, sentence: str, folder: Path
) -> None:
    result = run(*shlex.split(line))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status, result.output
    assert sentence in "\n".join(result.output.splitlines()[-2:])
    # An error that no command expected ends with this advice.
    assert "--debug" not in result.output
    assert set(folder.iterdir()) == {folder / name for name in FILES}  # and it left nothing behind


def test_each_command_has_a_wrong_line() -> None:
    assert set(main.commands) <= {line.split()[0] for line, _, _ in WRONG}
    assert len(WRONG) >= 40


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("schedsvc-proxy", "--upstream URL, --upstreams-file FILE: give one of them"),
        ("schedsvc-proxy --upstream x", "--upstream x: must be http://HOST:PORT of the server"),
        (
            "schedsvc-proxy --upstream http://127.0.0.1:9 --port 99999",
            "--port 99999: must be from 0 to 65535",
        ),
        ("schedsvc-vllm server m", "only `schedsvc-vllm serve MODEL ...` is there; see --help"),
        ("schedsvc-vllm serve m --schedsvc-token-fil x", "did you mean --schedsvc-token-file?"),
    ],
    ids=lambda value: value if value.startswith("schedsvc") else "",
)
def test_wrong_line_of_the_gate_ends_with_a_sentence(
    line: str, sentence: str, tmp_path: Path
) -> None:
    program, *words = line.split()
    beside = Path(sys.executable).parent
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    done = forked.run(
        [str(beside / program), *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
