#!/usr/bin/env bash
# Makes build/sglang/venv: SGLang on the CPU, for the tests of its back-end. It sees what .venv has. Does nothing when it
# is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup-sglang: $1" >&2; }
# Each by itself: what they depend on is for GPUs, or pins other versions of what kvbaton needs.
MANAGERS=(sglang==0.5.23 requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.3 psutil==7.2.2 pybase64==1.5.1 pillow==13.0.0
    triton==3.9.0)
SERVERS=(apache-tvm-ffi==0.1.15.post2 cffi==2.1.1 compressed-tensors==0.20.1 dill==0.4.1 einops==0.8.2 gguf==0.19.0
    ipython==9.18.1 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 loguru==0.7.3 openai==3.57.0 openai-harmony==0.0.8
    partial-json-parser==0.2.1.1.post7 pycparser==3.12 python-multipart==0.0.34 referencing==0.37.0 rpds-py==2026.9.1
    sentencepiece==0.2.3 sniffio==1.3.1 soundfile==0.14.0 traitlets==5.16.1 uvloop==0.23.0 xgrammar==0.2.9)

venv=build/sglang/venv
stamp=$({ pwd; .venv/bin/python -V; cat scripts/sglang.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.stamp 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi
say "making $venv (some 900 MB)"
rm -rf $venv
mkdir -p "$(dirname $venv)"
.venv/bin/python -m venv $venv
site=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
printf '%s\n%s\n' "$PWD/src" "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" >"$site/kvbaton.pth"
install() { $venv/bin/python -m pip --disable-pip-version-check install -q --no-deps "$@"; }
install "${MANAGERS[@]}" || { say "pip could not install SGLang's managers: their tests are skipped"; exit 1; }
install "${SERVERS[@]}" || say "pip could not install what SGLang's servers import: their tests are skipped"
echo "$stamp" >$venv/.stamp
say "ready"
