# Sourced by the scripts beside it, never run: brings in what parlat is built from and builds it. Every step looks
# first and does nothing where nothing is missing, so running it again is quick, after an interruption too.
set -euo pipefail
trap 'exit 130' INT
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv_python=.venv/bin/python
readonly program=build/release/parlat

say() { printf '== %s\n' "$*"; }

fail() {
  printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Runs a command whose output is of interest only if it fails.
quietly() {
  local log status=0
  log=$(mktemp)
  "$@" </dev/null >"$log" 2>&1 || status=$?
  [ $status -eq 0 ] || cat "$log" >&2
  rm -f "$log"
  return $status
}

# The Python that .venv is made with: the first that runs (a pyenv shim may have no version behind it), is new enough
# and can make environments.
find_python() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

# Debian packages that are needed and not installed, one a line. $1: --test adds what only the tests use.
missing_packages() {
  local packages=(ninja-build libopenmpi-dev openmpi-bin nlohmann-json3-dev libcli11-dev libfmt-dev libspdlog-dev
                  libpcre2-dev libutf8proc-dev libxxhash-dev libgtest-dev libgmock-dev libhwy-dev
                  libtomlplusplus-dev libdnnl-dev)
  [ "$1" != --test ] || packages+=(iproute2)
  if command -v dpkg-query >/dev/null; then
    # A name that was never installed makes dpkg-query fail after it has printed the others.
    comm -23 <(printf '%s\n' "${packages[@]}" | sort) \
             <(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null |
               sed -n 's/ installed$//p' | sort -u)
  fi
  # These may well come from elsewhere.
  command -v c++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  find_python >/dev/null || echo python3-venv
}

install_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$1")
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    printf 'These Debian packages are missing; install them and run this again:\n' >&2
    printf 'sudo apt-get install %s\n' "${missing[*]}" >&2
    exit 1
  fi
  say "installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # A foreign source that can't be read is no reason to stop: what is missing then shows in the install.
  quietly apt-get update || true
  quietly apt-get install --yes --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}" ||
    fail "apt-get could not install: ${missing[*]}"
}

# Present while wheels are being installed: a .venv that still has it was interrupted, and pip can't tell what is whole.
readonly interrupted=.venv/interrupted

prepare_venv() {
  local python
  if [ ! -e $interrupted ] && $venv_python -c 'import pip' 2>/dev/null; then return; fi
  python=$(find_python) || fail "expected python3 of version 3.11 or newer with venv and ensurepip (python3-venv)"
  say "making .venv with $python"
  if [ -L .venv ] && [ ! -e .venv ]; then rm .venv; fi
  quietly "$python" -m venv --clear .venv || fail "could not make .venv"
}

# The lines `name==version` of the given files that .venv does not fulfil; a local part (2.13.0+cpu) is no difference.
missing_wheels() {
  $venv_python - "$@" <<'PYTHON'
import importlib.metadata, sys
for path in sys.argv[1:]:
    for line in open(path):
        name, _, version = line.split("#")[0].strip().partition("==")
        try:
            installed = importlib.metadata.version(name).split("+")[0] if name else version
        except importlib.metadata.PackageNotFoundError:
            installed = None
        if installed != version:
            print(f"{name}=={version}")
PYTHON
}

# Installs the wheels that the files name, in their order: torch comes first, so nothing later brings another one.
install_wheels() {
  local file missing status begin
  for file in "$@"; do
    mapfile -t missing < <(missing_wheels "$file")
    [ ${#missing[@]} -gt 0 ] || continue
    say "installing ${missing[*]} into .venv (downloading may take minutes)"
    begin=$SECONDS status=0
    touch $interrupted
    quietly $venv_python -m pip install --quiet --no-input --disable-pip-version-check \
      --constraint scripts/requirements.txt "${missing[@]}" || status=$?
    rm $interrupted
    [ $status -eq 0 ] || fail "pip could not install ${missing[*]}"
    say "installed in $((SECONDS - begin)) s"
  done
}

# As many compilers as there are cores, each with the 2 GB that a file including torch takes.
build_jobs() {
  local cores gigabytes
  cores=$(nproc)
  gigabytes=$(awk '/^MemAvailable/ { print int($2 / 2000000) }' /proc/meminfo)
  echo $((gigabytes < 1 ? 1 : gigabytes < cores ? gigabytes : cores))
}

# Everything before building. $1: --test adds what only the tests use.
prepare() {
  install_packages "${1:-}"
  prepare_venv
  install_wheels scripts/requirements.txt ${1:+scripts/requirements-test.txt}
}

# $@: what to build; nothing: everything.
build() {
  local fresh=()
  # A build folder that came from elsewhere names paths that are gone.
  if [ -f build/release/CMakeCache.txt ] &&
     ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" build/release/CMakeCache.txt; then
    fresh=(--fresh)
  fi
  quietly cmake --preset release "${fresh[@]}" || fail "cmake could not configure build/release"
  say "building with $(build_jobs) jobs"
  cmake --build --preset release --parallel "$(build_jobs)" ${1:+--target "$@"} || fail "the build failed"
}
