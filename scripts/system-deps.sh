#!/usr/bin/env bash
# Installs the Debian packages a checkout needs where we may, and names them where we may not. With the argument
# "test" also those that only the tests need.
set -euo pipefail

python="${PYTHON:-python3.11}"
missing=()
command -v git >/dev/null || missing+=(git)
if ! command -v "$python" >/dev/null; then
  missing+=(python3.11 python3.11-venv)
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  # Debian splits venv off from Python itself.
  missing+=("$("$python" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')")
fi
# The report's page is tested in a real browser.
[ "${1:-}" = test ] && ! command -v chromium >/dev/null && missing+=(chromium)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}"
else
  echo "error: missing ${missing[*]}; install with: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
