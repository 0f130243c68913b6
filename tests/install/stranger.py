"""An index folder in which a stranger offers packages of our names and of a higher version."""

import zipfile
from pathlib import Path

STRANGE = "99.0"


def offer(folder: Path, *names: str) -> None:
    """Write a wheel that pip accepts for each of these distributions."""
    folder.mkdir(exist_ok=True)
    for name in names:
        module = name.replace("-", "_")
        info = f"{module}-{STRANGE}.dist-info"
        with zipfile.ZipFile(folder / f"{module}-{STRANGE}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "raise SystemExit('a stranger runs here')\n")
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {STRANGE}\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{info}/WHEEL", tags)
            files = (f"{module}/__init__.py", f"{info}/METADATA", f"{info}/WHEEL")
            wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in files))
