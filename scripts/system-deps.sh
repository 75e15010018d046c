#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that are missing where it may, and names them where it may not. A run needs
# Python with venv and nothing else; with the argument "test" also what only the tests need is looked for.
set -euo pipefail

python="${PYTHON:-python3.11}"
required=() # nothing goes on without these
wished=()   # single tests are skipped without these; names of one thing in several distributions stand between |

have() { command -v "$1" >/dev/null; }

if ! have "$python"; then
  case "$python" in
    */*) echo "error: there is no $python; give another with make PYTHON=..." >&2; exit 1 ;;
  esac
  required+=("$python" "$python-venv")
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  # Debian splits venv off from Python itself.
  required+=("$("$python" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')")
fi
if [ "${1:-}" = test ]; then
  have git || required+=(git)
  # The report's page is tested in a real browser: Debian's name of it, then Ubuntu's.
  have chromium || have chromium-browser || have google-chrome || wished+=("chromium|chromium-browser")
fi
[ ${#required[@]} -eq 0 ] && [ ${#wished[@]} -eq 0 ] && exit 0

offered() { apt-cache policy "$1" 2>/dev/null | grep -q '^  Candidate: [^(]'; }

# The first of the names between | that this distribution has; nothing when it has none.
name_here() {
  local name
  for name in ${1//|/ }; do
    if offered "$name"; then
      echo "$name"
      return
    fi
  done
}

may_install=false
if [ "$(id -u)" = 0 ] && have apt-get; then
  may_install=true
  export DEBIAN_FRONTEND=noninteractive
  # Without a package index of its own an image knows no package; an old index is still one.
  apt-get update -qq || echo "warning: apt-get update failed; going on with the package lists that are there" >&2
fi

install() {
  echo "installing $1"
  apt-get install -y -qq --no-install-recommends "$1"
}

lacking=()
for name in "${required[@]}"; do
  if $may_install && offered "$name"; then
    install "$name"
  else
    lacking+=("$name")
  fi
done
for names in "${wished[@]}"; do
  name="$($may_install && name_here "$names" || true)"
  if [ -z "$name" ] || ! install "$name"; then
    echo "warning: missing ${names//|/ or }; the tests that need it are skipped (with CI=true they fail)" >&2
  fi
done
if [ ${#lacking[@]} -gt 0 ]; then
  if $may_install; then
    echo "error: this distribution has no ${lacking[*]}; install what is missing by hand (another Python from 3.11" \
      "on is named so: make PYTHON=python3.12 ...)" >&2
  else
    echo "error: missing ${lacking[*]}; install with: sudo apt-get install ${lacking[*]}" >&2
  fi
  exit 1
fi
