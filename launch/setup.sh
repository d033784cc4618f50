#!/usr/bin/env bash
# Builds .venv with the CPU stack of locks/cpu-py311.txt, and installs megarl as an editable package.
#
#     bash launch/setup.sh            (or: make setup)
#     bash launch/setup.sh --stack    leaves out megarl (for Dockerfile.cpu, because megarl's sources change more often)
#     bash launch/setup.sh --tests    only installs the Debian packages for the tests, if this user may install packages
#
# The lock has every version, and pip installs with --no-deps, so that two machines get the same environment. A second call
# sees the stamp and returns at once; it continues an interrupted call. MEGARL_WHEELS=DIRECTORY installs from the wheels in
# the directory, without a package index (docs/install.md).
set -euo pipefail
WHEELS=${MEGARL_WHEELS:+$(realpath -- "$MEGARL_WHEELS")} # before leaving the caller's directory
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=locks/cpu-py311.txt
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
STACK_STAMP=.venv/.megarl-stack      # the lock that .venv was brought to
PACKAGE_STAMP=.venv/.megarl-package  # the pyproject.toml with the installed entry points
PIP_LOG=.venv/setup.log
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

case "$*" in "" | --stack | --tests) ;; *) fail "unknown: $*. It takes --stack, --tests or nothing." ;; esac
SOURCE=()
if [ -n "$WHEELS" ]; then
    [ -n "$(find "$WHEELS" -maxdepth 1 -name '*.whl' -print -quit)" ] ||
        fail "MEGARL_WHEELS = $MEGARL_WHEELS: no wheel there. docs/install.md says how to fill it."
    SOURCE=(--no-index --find-links "$WHEELS")
fi

# pip_install ARGUMENT...: writes pip's output to the log, and also to the screen if pip fails.
pip_install() {
    local first_line
    first_line=$(($(wc -l 2>/dev/null <"$PIP_LOG" || echo 0) + 1))
    "$PYTHON" -m pip install --progress-bar off --no-deps "${SOURCE[@]}" "$@" >>"$PIP_LOG" 2>&1 && return
    tail -n "+$first_line" "$PIP_LOG" | grep -v '^WARNING' | tail -n 20 >&2
    return 1
}

# install_debian PACKAGE...: installs packages if that is possible without a password.
install_debian() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing Debian packages: $*"
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
}

# Prints a Python 3.11 that can make a virtual environment, or nothing.
find_python() {
    local candidate
    for candidate in python3.11 python3 python /usr/bin/python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

make_venv() {
    if .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        return
    fi
    local python
    python=$(find_python)
    if [ -z "$python" ]; then
        install_debian python3.11 python3.11-venv python3.11-dev || true
        python=$(find_python)
    fi
    [ -n "$python" ] || fail "no Python 3.11 with venv found. The lock is for 3.11: install python3.11 and" \
        "python3.11-venv, and put python3.11 on PATH."
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
}

# vLLM's CPU kernels load libnuma; pycosat, which reasoning-gym requires, comes as C source.
install_system_libraries() {
    local missing=()
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=(libnuma1)
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=(python3.11-dev)
    # Only trainer.compile needs g++: without it torch.compile fails, and the run reports this and continues.
    command -v g++ >/dev/null || install_debian g++ || say "no g++: trainer.compile = true will fall back"
    [ ${#missing[@]} -eq 0 ] && return
    install_debian "${missing[@]}" || fail "missing from this system: ${missing[*]}. Install them and run set-up again."
}

# Never install a plain torch==X: an index without a CPU wheel would offer the CUDA build.
install_torch() {
    local torch
    torch=$(grep '^torch==' "$LOCK")
    "$PYTHON" -c "import importlib.metadata as m, sys; sys.exit('torch==' + m.version('torch') != '$torch')" \
        2>/dev/null && return
    say "installing $torch from ${WHEELS:-the configured package index}"
    pip_install "$torch" && return
    [ -z "$WHEELS" ] || fail "$torch is not among the wheels of $WHEELS."
    say "$torch is not on the configured index; trying PyTorch's own CPU index once: $TORCH_CPU_INDEX"
    pip_install --index-url "$TORCH_CPU_INDEX" "$torch" ||
        fail "$torch was found neither on the configured index nor on PyTorch's own."
}

# Tests are skipped, with a message, if their package is missing. No run needs these packages; Slurm's package would even
# start services.
if [ "${1:-}" = --tests ]; then
    command -v ip >/dev/null || install_debian iproute2 || say "no iproute2: the test over two networks will be skipped"
    command -v sbatch >/dev/null || install_debian slurm-wlm munge || say "no Slurm: the tests of launch/slurm will be skipped"
    command -v chromium >/dev/null || install_debian chromium || say "no chromium: the test of the report's page will be skipped"
    exit 0
fi

hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
stack_hash=$(hash_of "$LOCK")
PYTHON=.venv/bin/python

if [ "$(cat "$STACK_STAMP" 2>/dev/null)" != "$stack_hash" ]; then
    started=$SECONDS
    make_venv
    install_system_libraries
    install_torch
    # setuptools comes first: pip builds megarl and the few source packages with this version, and not with a newer version.
    pip_install "$(grep '^setuptools==' "$LOCK")"
    say "installing the $(grep -c '==' "$LOCK") packages of $LOCK (1 to 2 minutes on two cores; log: $PIP_LOG)"
    # pip unpacks and compiles on one core. Two pips install half of the lock each, and compileall uses all cores; like pip, it
    # skips files that are not Python 3.11.
    code=0 halves=()
    for half in 0 1; do
        awk -v half=$half 'NR % 2 == half' "$LOCK" >.venv/lock-$half.txt
        pip_install --no-build-isolation --no-compile -r .venv/lock-$half.txt &
        halves+=($!)
    done
    for half in "${halves[@]}"; do wait "$half" || code=1; done
    [ $code -eq 0 ] || fail "the lock was not installed; run set-up again to continue."
    "$PYTHON" -m compileall -q -j 0 .venv/lib >>"$PIP_LOG" 2>&1 || true
    echo "$stack_hash" >"$STACK_STAMP"
    say "the CPU stack is in .venv after $((SECONDS - started)) s"
fi

[ "${1:-}" != --stack ] || exit 0

package_hash="$PWD $(hash_of pyproject.toml)"
if [ "$(cat "$PACKAGE_STAMP" 2>/dev/null)" != "$package_hash" ]; then
    pip_install --no-build-isolation --editable . || fail "megarl itself was not installed."
    echo "$package_hash" >"$PACKAGE_STAMP"
    say "megarl is installed in .venv, editable"
fi
