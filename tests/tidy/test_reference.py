"""The reference of the contract has all that the .proto files say, and its links have targets."""

import re
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from deploy.reference import page

from .sources import ROOT

SAMPLE = """\
// A file, with a list:
//   NOT_FOUND  no such thing
syntax = "proto3";

package schedsvc.v1;

// Serves <things>.
service ThingService {
  // Sends *all*, `a|b` too.
  rpc Watch(stream Thing) returns (Thing);
}

// One thing.
message Thing {
  // Its name,
  // in two lines.
  optional string name = 1;
  repeated Kind kinds = 7;  // Behind the field.
  map<string, Thing> parts = 3;
  oneof form {
    int64 size = 4;
  }
}

enum Kind {
  KIND_UNSPECIFIED = 0;
  // Large.
  KIND_LARGE = 5;
}

message Empty {}
"""
WRITTEN = """\
| service | file | about |
| --- | --- | --- |
| [ThingService](#thingservice) | [thing.proto](../../proto/schedsvc/v1/thing.proto) \
| Serves \\<things>. |

## thing.proto

A file, with a list:

- `NOT_FOUND`: no such thing

### ThingService

Serves \\<things>.

| method | request | response | about |
| --- | --- | --- | --- |
| `Watch` | stream of [Thing](#thing) | [Thing](#thing) | Sends \\*all\\*, `a\\|b` too. |

### Thing

One thing.

| field | number | type | about |
| --- | --- | --- | --- |
| `name` | 1 | optional string | Its name, in two lines. |
| `kinds` | 7 | list of [Kind](#kind) | Behind the field. |
| `parts` | 3 | map of string to [Thing](#thing) |  |
| `size` | 4 | int64, one of `form` |  |

### Kind

| value | number | about |
| --- | --- | --- |
| `KIND_UNSPECIFIED` | 0 |  |
| `KIND_LARGE` | 5 | Large. |

### Empty
"""


def test_a_page_has_methods_fields_values_and_comments(tmp_path: Path) -> None:
    source = tmp_path / "schedsvc/v1/thing.proto"
    source.parent.mkdir(parents=True)
    source.write_text(SAMPLE)
    compiled = tmp_path / "set"
    options = [f"-I{tmp_path}", f"--descriptor_set_out={compiled}", "--include_source_info"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *options, str(source)]
    subprocess.run(command, check=True)
    written = page(FileDescriptorSet.FromString(compiled.read_bytes()))
    assert written.partition("\n\n")[0] == "# Reference of the contract"
    assert written[written.index("| service") :] == WRITTEN


def test_each_link_has_its_heading() -> None:
    text = (ROOT / "docs/reference/contract.md").read_text()
    headings = [heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)]
    assert len(headings) == len(set(headings)), "two names of one link"
    links = set(re.findall(r"\(#(\w+)\)", text))
    assert len(links) >= 100
    assert not links - set(headings)


def test_each_comment_of_the_contract_is_on_the_page() -> None:
    text = re.sub(r"[\\`|\s:-]", "", (ROOT / "docs/reference/contract.md").read_text())
    files = sorted((ROOT / "proto/schedsvc/v1").glob("*.proto"))
    comments = [
        (file.name, line.partition("//")[2])
        for file in files
        for line in file.read_text().splitlines()
        if "//" in line
    ]
    assert len(comments) >= 500
    lost = [(n, c) for n, c in comments if re.sub(r"[\\`|\s:-]", "", c) not in text]
    assert not lost, lost
